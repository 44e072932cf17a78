"""Defines where a PyTorch model runs, behind one seam: a GPU with a stream of its own, or the CPU.

Everything that differs between the two is here, so that batches, buckets and padding are one code path, which
tests can walk without a GPU.
"""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch

from carpool.extensions.torch.device_sharing import order_of, turns_of
from carpool.types import Array, Datatype

# ---- PyTorch's datatypes and ours: which is which, and how arrays of them come and go without a copy

TORCH_TYPES: dict[Datatype, torch.dtype] = {
    datatype: torch.bfloat16 if datatype is Datatype.BF16 else getattr(torch, datatype.dtype.name)
    for datatype in Datatype
    if datatype is not Datatype.BYTES
}
DATATYPE_OF = {dtype: datatype for datatype, dtype in TORCH_TYPES.items()}
FLOATS = (Datatype.FP16, Datatype.BF16, Datatype.FP32)
"""Those that a model in any precision takes and answers: they are converted on the device."""

PRECISIONS = {"fp32": torch.float32, "tf32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def carried(datatype: Datatype) -> torch.dtype:
    """How tensors of it lie in buffers: numpy has no BF16, so that its bits go as they are."""
    return torch.uint16 if datatype is Datatype.BF16 else TORCH_TYPES[datatype]


def as_tensor(array: Array | torch.Tensor) -> torch.Tensor:
    """Returns the array as a tensor where it lies. What is read-only, unaligned or not contiguous is copied
    first."""
    if isinstance(array, np.ndarray):
        return torch.from_numpy(array if lies_well(array) else np.array(array, order="C"))
    return array


def lies_well(array: Array) -> bool:
    return array.flags.carray


# ---- a GPU, or the CPU

# A waiting thread sleeps instead of spinning: the cores belong to the front ends. A single image is done
# within a millisecond, and waking up would take a part of that: for it the thread spins.
_SPINS_FOR = 1
_WARM_UPS = 3  # while libraries choose their kernels, they take more than they need
_FILLS_DEVICE = 32  # images: a batch that leaves nothing of a GPU to another (measured: docs/gpu.md)
_COPY_THREADS = 1  # that gather a batch for a GPU: a team has to be woken for each image, and spins meanwhile

Run = Callable[[], Mapping[str, torch.Tensor]]


class Program(Protocol):
    """Defines a model prepared for one batch size, from its static inputs to its outputs."""

    @property
    def outputs(self) -> Mapping[str, torch.Tensor]:
        """Returns the outputs of the last `replay`, until the next."""

    def replay(self) -> None: ...


class Called:
    def __init__(self, run: Run) -> None:
        self._run = run
        self.outputs: Mapping[str, torch.Tensor] = {}

    def replay(self) -> None:
        self.outputs = self._run()


class Captured:
    """Holds a CUDA graph: all kernels of the model in one launch, with the outputs always in the same
    place."""

    def __init__(self, graph: torch.cuda.CUDAGraph, outputs: Mapping[str, torch.Tensor]) -> None:
        self.outputs = outputs
        self.replay: Callable[[], None] = graph.replay


_spoilt: list[torch.cuda.CUDAGraph] = []
_opened: set[int] = set()  # devices whose libraries have been opened in this process


class Marker(Protocol):
    """Defines a place in what was asked of a device."""

    def record(self) -> None:
        """Marks this place: behind everything so far."""

    def wait(self) -> None:
        """Until the device has come there, if it was recorded at all."""


class _Passed:
    def record(self) -> None: ...

    def wait(self) -> None: ...


class _InStream:
    """A thread that waits for it spins: it is for what takes less than waking up."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self.record: Callable[[], None] = partial(event.record, stream)
        self.wait: Callable[[], None] = event.synchronize


class _Here(threading.local):
    owner: object = None  # the device that this thread was set up for


_here = _Here()


class Device:
    """One instance's share of a device, used by one thread at a time; as it stands here, of the CPU: memory
    is the host's, and programs are plain calls."""

    name = "cpu"
    bounded = False  # whether its memory is counted and limited
    captures = False  # whether `capture` makes launching cheaper, and `launch` returns while it works
    fuses = False  # whether it has kernels that compute a convolution and what stands behind it

    def __init__(self, threads: int | None = None) -> None:
        self.place = torch.device("cpu")
        self._threads = threads
        self._turn = threading.Lock()

    def enter(self) -> None:
        """What this thread does from here on is this instance's: its device, its stream, its threads."""
        if _here.owner is not self:
            _here.owner = self
            if self._threads is not None:
                torch.set_num_threads(self._threads)  # of this thread, whatever the name says

    def staging(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Returns zeros in host memory that the device copies from and to without a detour."""
        return torch.zeros(tuple(shape), dtype=dtype)

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(tuple(shape), dtype=dtype)

    def warm(self, run: Run) -> int:
        """Runs so often that libraries have chosen their kernels and made their workspaces. Returns the bytes
        that a run takes of the device beside what it held already."""
        run()
        return 0

    def capture(self, run: Run) -> Program:
        """Captures a run that is warm. Raises RuntimeError where the model cannot be captured."""
        return Called(run)

    def call(self, run: Run) -> Program:
        return Called(run)

    def trial(self, run: Run) -> Program:
        """Prepares a run that is warm, for a few replays: as it would serve, but with memory of its own."""
        return Called(run)

    def launch(self, program: Program, images: int) -> None:
        """Replays it, and returns when it is on its way; large batches compute one after the other."""
        program.replay()

    def wait(self, images: int | None = None) -> None:
        """Until everything that was asked of the device is done, for so many images if that is known."""

    def marker(self) -> Marker:
        return _Passed()

    def turn(self) -> threading.Lock:
        """Returns a lock that is held while a batch runs, so that no thread captures beside it."""
        return self._turn

    def look_for_kernels(self, look: bool) -> None:
        """Sets whether libraries try several kernels for each new shape, which takes seconds for a network.
        What is compiled behind its traffic does without while it loads, and tries them when it is
        compiled."""

    @contextmanager
    def looking_for_kernels(self, images: int) -> Iterator[None]:
        """Makes libraries try several kernels for a batch of this size that this thread runs inside, beside
        other batches. The thread keeps what it found."""
        yield

    @contextmanager
    def beside(self) -> Iterator[None]:
        """Makes what this thread does inside run beside the instance's batches, and after them if it can."""
        self.enter()
        yield

    def seconds(self, program: Program) -> float:
        """Returns what one replay takes of the device."""
        began = time.perf_counter()
        program.replay()
        return time.perf_counter() - began

    def allocated(self) -> int:
        """Returns bytes of the device that this process holds."""
        return 0

    def free(self) -> int:
        """Returns the bytes of the device that are free."""
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")

    def limit(self, most: int) -> None:
        """This process may hold so many bytes, and not one more."""

    def release(self) -> None:
        """Memory that nothing uses goes back to the device."""

    def close(self) -> None:
        if _here.owner is self:
            _here.owner = None


class CudaDevice(Device):
    """Represents one stream on one GPU. Its graphs share a pool of memory, since they never run at the same
    time."""

    bounded = captures = fuses = True

    def __init__(self, index: int) -> None:
        super().__init__(_COPY_THREADS)
        self.name = f"cuda:{index}"
        self.place = torch.device("cuda", index)
        torch.cuda.init()  # type: ignore[no-untyped-call]
        with torch.cuda.device(self.place):
            # Before what runs in streams without a priority, as compiling behind the traffic does.
            self._stream = torch.cuda.Stream(self.place, priority=-1)  # type: ignore[no-untyped-call]
            self._done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            self._done_soon = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._computed = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._pool = torch.cuda.graph_pool_handle()
            # Always the same: what is allocated for one stream is not used again for another.
            self._aside = torch.cuda.Stream(self.place)  # type: ignore[no-untyped-call]
        self._turns = turns_of(index)
        self._turn = self._turns.join()
        self._order = order_of(index)
        if index not in _opened:
            _opened.add(index)
            threading.Thread(target=self._open_libraries, name="libraries", daemon=True).start()

    def _open_libraries(self) -> None:
        """cuDNN and cuBLAS are opened when they are first used, which takes a second or two: meanwhile the
        thread that loads imports and builds its network. What fails here fails again where it matters."""
        with suppress(Exception), self._turn, torch.inference_mode(), torch.cuda.stream(self._aside):
            x = torch.zeros((1, 8, 16, 16), dtype=torch.float16, device=self.place)
            x = x.contiguous(memory_format=torch.channels_last)
            made = torch.nn.functional.conv2d(x, torch.zeros_like(x[:, :, :3, :3]))
            torch.mm(made.flatten(2)[0], made.flatten(2)[0].T)
            self._aside.synchronize()

    def enter(self) -> None:
        if _here.owner is not self:
            super().enter()
            torch.cuda.set_device(self.place)
            torch.cuda.set_stream(self._stream)

    def staging(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(tuple(shape), dtype=dtype, pin_memory=True)

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        self.enter()
        return torch.zeros(tuple(shape), dtype=dtype, device=self.place)

    def warm(self, run: Run) -> int:
        self.enter()
        for _ in range(_WARM_UPS):
            run()
        self.wait()
        torch.cuda.reset_peak_memory_stats(self.place)
        held = torch.cuda.memory_allocated(self.place)
        run()
        self.wait()
        return max(0, int(torch.cuda.max_memory_allocated(self.place) - held))

    def capture(self, run: Run) -> Program:
        return self._captured(run, self._pool)

    def trial(self, run: Run) -> Program:
        """With a pool of its own: one whose last graph has gone takes no other."""
        try:
            return self._captured(run, torch.cuda.graph_pool_handle())
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise
            return Called(run)

    def _captured(self, run: Run, pool: Any) -> Program:
        self.enter()
        graph = torch.cuda.CUDAGraph()
        with self._turns.alone(), _no_collection():
            try:
                # Other threads may copy and run meanwhile: only what this one does is forbidden to it.
                graph.capture_begin(pool=pool, capture_error_mode="thread_local")
                outputs = run()
            except BaseException:
                with suppress(Exception):  # the error that matters is on its way already
                    self._end_capture(graph, pool)
                raise
            self._end_capture(graph, pool)
        program = Captured(graph, outputs)
        program.replay()
        self.wait()
        return program

    def _end_capture(self, graph: torch.cuda.CUDAGraph, pool: Any) -> None:
        """Where the driver reports that the capture was spoilt, torch leaves its allocators recording to the
        pool, and every later capture into that pool fails. So the device's allocator stops recording, the
        next capture has a pool of its own, and the graph, which the host's allocator still asks, is kept."""
        try:
            graph.capture_end()
        except BaseException:
            if pool == self._pool:
                self._pool = torch.cuda.graph_pool_handle()
            _spoilt.append(graph)
            with suppress(Exception):  # it has ended before the error
                torch._C._cuda_endAllocateToPool(self.place.index, pool)
                torch._C._cuda_releasePool(self.place.index, pool)
            raise

    def launch(self, program: Program, images: int) -> None:
        """Launches a program. One that is not captured runs the model's code, which must not delay others."""
        if images < _FILLS_DEVICE or not isinstance(program, Captured):
            program.replay()
        else:
            self._order.launch(self._stream, self._computed, program.replay)

    def wait(self, images: int | None = None) -> None:
        done = self._done_soon if images is not None and images <= _SPINS_FOR else self._done
        done.record(self._stream)
        done.synchronize()

    def look_for_kernels(self, look: bool) -> None:
        torch.backends.cudnn.benchmark = look  # shapes never change, so that it pays where no request waits

    @contextmanager
    def looking_for_kernels(self, images: int) -> Iterator[None]:
        if images < _FILLS_DEVICE:  # cuDNN times each kernel once, which says nothing of those that are short
            yield
            return
        with self._turns.uncaptured():  # each trial waits for the whole device
            self.look_for_kernels(True)
            try:
                yield
            finally:
                self.look_for_kernels(False)

    @contextmanager
    def beside(self) -> Iterator[None]:
        self.enter()
        with torch.cuda.stream(self._aside):
            yield
            self._aside.synchronize()

    def seconds(self, program: Program) -> float:
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        began.record(self._stream)
        program.replay()
        ended.record(self._stream)
        ended.synchronize()
        return float(began.elapsed_time(ended)) / 1e3

    def marker(self) -> Marker:
        with torch.cuda.device(self.place):
            return _InStream(self._stream)

    def allocated(self) -> int:
        return int(torch.cuda.memory_reserved(self.place))

    def free(self) -> int:
        return int(torch.cuda.mem_get_info(self.place)[0])

    def limit(self, most: int) -> None:
        total = int(torch.cuda.mem_get_info(self.place)[1])
        torch.cuda.set_per_process_memory_fraction(min(1.0, most / total), self.place)

    def release(self) -> None:
        with self._turns.alone():
            torch.cuda.synchronize(self.place)
            with torch.cuda.device(self.place):
                torch.cuda.empty_cache()

    def close(self) -> None:
        self._turns.leave(self._turn)
        self._order.leave(self._computed)
        super().close()


@contextmanager
def _no_collection() -> Iterator[None]:
    """What the collector frees may belong to the device, and must not be freed in the middle of a capture."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def is_out_of_memory(error: BaseException) -> bool:
    """Returns whether memory ran out, also where a library below PyTorch says so in words only."""
    return isinstance(error, torch.cuda.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and "out of memory" in str(error).lower()
    )
