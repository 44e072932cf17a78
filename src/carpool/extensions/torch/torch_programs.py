"""Prepares what an instance needs when it is loaded: the network, static inputs, a program for each batch
size."""

from __future__ import annotations

import logging
import math
import threading
import time
import weakref
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol, TypeAlias
from weakref import WeakValueDictionary

import torch

from carpool.backends.agreement import how_far
from carpool.backends.backend import CompiledSize, Placement
from carpool.backends.device_memory import MemoryLedger, in_words
from carpool.config.fingerprint import beside
from carpool.config.model import DYNAMIC, ModelConfig, TensorConfig
from carpool.errors import ModelError
from carpool.extensions.torch.torch_device import (
    PRECISIONS,
    Device,
    Program,
    Run,
    as_tensor,
    carried,
    is_out_of_memory,
)
from carpool.extensions.torch.torch_files import in_one_line, open_module
from carpool.extensions.torch.torch_fusion import Fusion, fusion_of
from carpool.extensions.torch.torch_network import AdaptedNetwork, call_for
from carpool.types import DATATYPES, Array

# ---- the memory of one instance that stays where it is: inputs on their way in, and outputs on their way out

_KEPT = 8  # buffers of one shape that wait for the next batch; what is beyond goes back to the system

Part: TypeAlias = Mapping[str, Array | torch.Tensor]
"""The inputs of one request."""


class Inputs(Protocol):
    def rows(self, count: int) -> list[torch.Tensor]:
        """Returns the first rows of every input on the device, in the order of the settings."""

    def gather(self, parts: Sequence[Part], count: int) -> None:
        """Gathers the inputs of these requests, one behind the other, into those rows."""


class FixedInputs:
    """Holds one buffer on the device for the largest batch, whose first rows serve the smaller ones, and one
    to gather in. Rows behind the batch keep what an earlier one left there: they are computed and dropped."""

    def __init__(self, device: Device, tensors: Sequence[TensorConfig], largest: int | None) -> None:
        self._batched = largest is not None
        self._staged: dict[str, torch.Tensor] = {}
        self._static: dict[str, torch.Tensor] = {}
        self._views: dict[int, dict[str, tuple[torch.Tensor, torch.Tensor]]] = {}
        for tensor in tensors:
            shape = tensor.dims if largest is None else (largest, *tensor.dims)
            dtype = carried(DATATYPES[tensor.datatype])
            self._staged[tensor.name] = device.staging(shape, dtype)
            self._static[tensor.name] = device.zeros(shape, dtype)

    def rows(self, count: int) -> list[torch.Tensor]:
        return [static for _, static in self._of(count).values()]

    def gather(self, parts: Sequence[Part], count: int) -> None:
        """Copies all rows of one input in one call into pinned memory, and with one copy from there. Each
        call gives up the interpreter and has to get it back, so that few calls matter more than few bytes."""
        for name, (staged, static) in self._of(count).items():
            torch.cat([as_tensor(part[name]) for part in parts], out=staged)
            static.copy_(staged, non_blocking=True)

    def _of(self, count: int) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        views = self._views.get(count)
        if views is None:
            whole = slice(None, count if self._batched else None)
            views = self._views[count] = {
                name: (staged[whole], self._static[name][whole]) for name, staged in self._staged.items()
            }
        return views


class VaryingInputs:
    """Holds tensors whose shape differs from request to request: each batch has new ones."""

    def __init__(self, device: Device, tensors: Sequence[TensorConfig]) -> None:
        self._device = device
        self._names = [tensor.name for tensor in tensors]
        self._rows: list[torch.Tensor] = []

    def rows(self, count: int) -> list[torch.Tensor]:
        return self._rows

    def gather(self, parts: Sequence[Part], count: int) -> None:
        self._rows = [
            torch.cat([as_tensor(part[name]) for part in parts]).to(self._device.place)
            for name in self._names
        ]


class Answers:
    """Manages host memory for outputs. An array that is handed out belongs to its receiver, and its memory is
    used again once that array and all its parts are gone: nothing is copied, and nothing grows when answers
    are taken away as fast as they come."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._free: dict[tuple[torch.Size, torch.dtype], list[torch.Tensor]] = defaultdict(list)

    def copy(self, outputs: Mapping[str, torch.Tensor], names: Sequence[str]) -> dict[str, Array]:
        """Copies them on their way: they are there when the device was waited for."""
        arrays: dict[str, Array] = {}
        for name in names:
            output = outputs[name]
            free = self._free[output.shape, output.dtype]
            memory = free.pop() if free else self._device.staging(output.shape, output.dtype)
            memory.copy_(output, non_blocking=True)
            array = memory.numpy()
            weakref.finalize(array, _give_back, free, memory).atexit = False
            arrays[name] = array
        return arrays

    def close(self) -> None:
        self._free.clear()


def _give_back(free: list[torch.Tensor], memory: torch.Tensor) -> None:
    """Is called from whichever thread lets go of the array last."""
    if len(free) < _KEPT:
        free.append(memory)


# ---- the network on a device: its weights in memory once, for all instances there, and compiled once

_log = logging.getLogger(__name__)
_COMPILE_S = 300.0  # for all batch sizes of a model: those that are not done by then run as they are
_TOLERANCE = {"fp32": 1e-3, "tf32": 1e-2, "fp16": 2e-2, "bf16": 5e-2}
"""How far compiled answers may be from plain ones, as the norm of the difference over the norm."""
_OTHERS_DIFFER = 0.01  # of the elements of an output that are no fractions
_WARM_UPS = 2  # of what ran once when it was compared
_TRIAL = 32  # images, by which it is decided whether a network is fused
_TIMED = 5  # replays of each program, in turn
_ROOM = 3.0  # times what a batch takes: as much is free on the device before another one is captured
_PAUSE = 4.0  # times what a replay took: so long requests have the device to themselves before the next

_shared: WeakValueDictionary[tuple[object, ...], Network] = WeakValueDictionary()
_sharing = threading.Lock()

Tell = Callable[[str], None]


class Network:
    def __init__(self, config: ModelConfig, file: Path, device: Device, ledger: MemoryLedger | None) -> None:
        module, exported = open_module(config, file, device.place)
        precision = PRECISIONS[config.pytorch.precision]
        self.model = config.name
        self.weights = sum(
            tensor.numel() * (precision.itemsize if tensor.is_floating_point() else tensor.itemsize)
            for tensor in (*module.parameters(), *module.buffers())
        )
        if ledger is not None:
            ledger.check(config.name, self.weights, "its weights take")
            ledger.hold(id(self), config.name, self.weights)
            weakref.finalize(self, ledger.drop, id(self)).atexit = False
        names = [tensor.name for tensor in config.inputs]
        call = call_for(config.name, names, module, exported)
        half = config.pytorch.precision not in ("fp32", "tf32")
        self.pipeline = AdaptedNetwork(config, module, call, device.place)
        fits = ledger is None or ledger.room >= self.weights  # the trial needs both forms on the device
        self._fusion = fusion_of(self.pipeline, "network") if half and device.fuses and fits else None
        self.fused = False
        for each in (module, *(self._fusion.modules() if self._fusion is not None else ())):
            each.to(device=device.place, dtype=precision)
            if config.pytorch.channels_last:
                each.to(memory_format=torch.channels_last)
        device.wait()  # other instances use it from streams of their own
        self._names = [tensor.name for tensor in config.outputs]
        self._tf32 = None if half or device.place.type != "cuda" else config.pytorch.precision == "tf32"
        self._make: Callable[[], Callable[..., Any]] | None = _compiler(config, self.pipeline, module)
        self._compiled: Callable[..., Any] | None = None
        self._fails = "TorchScript cannot be compiled"
        self._sizes: dict[int, str] = {}  # those that were compiled, and why they are not used, if so
        self._compiling = threading.Lock()
        self._tolerance = _TOLERANCE[config.pytorch.precision]
        self._bits = {tensor.name for tensor in config.outputs if tensor.datatype == "BF16"}

    @property
    def is_compiled(self) -> bool:
        return "" in self._sizes.values()

    @property
    def compiles(self) -> bool:
        return self._make is not None

    def runs(self, rows: Sequence[torch.Tensor], *, compiled: bool) -> Run:
        """Returns the whole way from these rows to the outputs, for a program to repeat."""
        call: Callable[..., Any] | None = self._compiled if compiled else self.pipeline
        assert call is not None

        def run() -> dict[str, torch.Tensor]:
            if self._tf32 is not None:  # switches of the whole process: each model sets its own
                torch.backends.cuda.matmul.allow_tf32 = self._tf32
                torch.backends.cudnn.allow_tf32 = self._tf32
            with torch.inference_mode():
                return dict(zip(self._names, call(*rows), strict=True))

        return run

    def fuse(self, rows: Sequence[torch.Tensor], device: Device) -> None:
        """Uses the fused form of the network from here on, if it answers the same on noise and is not
        slower. Decided once, by the first instance, before anything else runs."""
        with self._compiling:
            fusion, self._fusion = self._fusion, None
            if fusion is None:
                return
            noise = [_noise(row) for row in rows]
            run = self.runs(noise, compiled=False)
            try:
                why = self._against(fusion, run, device)
            except Exception as error:  # libraries refuse what they have no kernel for, in many ways
                why = in_one_line(error)
            fusion.use(fused=not why)
            self.fused = not why
            if why:
                _log.info("%s: its convolutions are not fused: %s", self.model, why)
        device.release()

    def _against(self, fusion: Fusion, run: Run, device: Device) -> str:
        """Returns why the fused form is not to be used, or nothing. Both are timed in turn, since other
        models may use the device meanwhile."""
        plain, before = _tried(run, device)
        fusion.use(fused=True)
        fused, after = _tried(run, device)
        if why := self._difference(plain, fused, "fused"):
            return why
        forms = ((before, False), (after, True))
        shortest = {False: math.inf, True: math.inf}
        for _ in range(_TIMED):
            for program, is_fused in forms:
                fusion.use(fused=is_fused)
                shortest[is_fused] = min(shortest[is_fused], device.seconds(program))
        if shortest[True] <= shortest[False]:
            return ""
        times = f"{shortest[True] * 1e3:.3g} ms fused, and {shortest[False] * 1e3:.3g} ms as it is"
        return f"it is not faster: {times}"

    def compile_for(self, rows: Sequence[torch.Tensor], size: int) -> str:
        """Compile batches of this size once, whichever instance asks. Returns why they are not to be used,
        or nothing: a network that cannot be compiled, or answers otherwise then, runs as it is."""
        with self._compiling:
            if self._make is None:
                return self._fails
            if size not in self._sizes:
                plain = self.runs(rows, compiled=False)()  # what fails here is not the compiler's fault
                self._sizes[size] = why = self._compile(plain, rows)
                if why:
                    which = "" if self._fails else f" in batches of {size}"
                    _log.warning("%s: runs without torch.compile%s: %s", self.model, which, why)
            return self._sizes[size]

    def _compile(self, plain: Mapping[str, torch.Tensor], rows: Sequence[torch.Tensor]) -> str:
        assert self._make is not None
        try:
            if self._compiled is None:
                self._compiled = self._make()
            return self._difference(plain, self.runs(rows, compiled=True)())
        except Exception as error:  # compilers fail in many ways
            if is_out_of_memory(error):
                raise
            self._make, self._fails = None, in_one_line(error)
            return self._fails

    def _difference(
        self, plain: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor], when: str = "compiled"
    ) -> str:
        """Returns what is wrong with the answers of another form of the network, or nothing."""
        for name, before in plain.items():
            after = other[name]
            if before.shape != after.shape or before.dtype != after.dtype:
                return f'its output "{name}" has another form when {when}'
            if name in self._bits:
                before, after = before.view(torch.bfloat16), after.view(torch.bfloat16)
            fractions = before.is_floating_point()
            far = how_far(_as_array(before), _as_array(after))
            if far == math.inf:
                return f'its output "{name}" has infinities or NaN elsewhere when {when}'
            if not fractions and far > _OTHERS_DIFFER:
                return f'{far:.1%} of its output "{name}" differ when {when}'
            if fractions and far > self._tolerance:
                return (
                    f'its output "{name}" is off by {far:.2g} of its size when {when}, '
                    f"and {self._tolerance:g} are allowed"
                )
        return ""


def _as_array(tensor: torch.Tensor) -> Array:
    return tensor.double().cpu().numpy() if tensor.is_floating_point() else tensor.cpu().numpy()


def _tried(run: Run, device: Device) -> tuple[dict[str, torch.Tensor], Program]:
    """Returns its answers, and a program to time."""
    device.warm(run)
    answers = {name: tensor.clone() for name, tensor in run().items()}
    return answers, device.trial(run)


def network_for(config: ModelConfig, file: Path, device: Device, ledger: MemoryLedger | None) -> Network:
    """Returns the one that another instance on the same device has, or a new one."""
    used = config.pytorch
    key = (
        file,
        beside(file),
        device.place,
        config.name,
        config.inputs,
        config.outputs,
        config.image,
        config.max_batch,
        (used.precision, used.channels_last, used.compile, used.module, used.weights),
    )
    with _sharing:
        network = _shared.get(key)
        if network is None:
            try:
                network = _shared[key] = Network(config, file, device, ledger)
            except (RuntimeError, NotImplementedError) as error:
                if is_out_of_memory(error):
                    raise
                raise ModelError(
                    f"{config.name}: {file.name} cannot be moved to {device.name} in {used.precision}: "
                    f"{in_one_line(error)}"
                ) from None
    return network


def _compiler(
    config: ModelConfig, pipeline: AdaptedNetwork, module: torch.nn.Module
) -> Callable[[], Callable[..., Any]] | None:
    """What makes the compiled network, when it is wanted: importing the compiler alone takes seconds."""
    mode = config.pytorch.compile
    if mode == "off":
        return None
    if isinstance(module, torch.jit.ScriptModule):
        _log.warning("%s: runs without torch.compile: TorchScript cannot be compiled", config.name)
        return None

    def make() -> Callable[..., Any]:
        import torch._dynamo

        # Compiled anew for each batch size, when it first comes; CUDA graphs are ours, not the compiler's.
        torch._dynamo.config.cache_size_limit = max(128, torch._dynamo.config.cache_size_limit)
        chosen = "max-autotune-no-cudagraphs" if mode == "max-autotune" else None
        return torch.compile(pipeline, dynamic=False, mode=chosen)

    return make


# ---- a program for each batch size


class Programs:
    """`sizes` are the batches that run; none: each as it comes. `footprint` is what each was seen to take of
    the device's memory, in bytes."""

    def __init__(
        self,
        config: ModelConfig,
        file: Path,
        device: Device,
        ledger: MemoryLedger | None,
        placement: Placement,
    ) -> None:
        """In a `hurry` nothing is compiled, warmed or captured: sizes run as they come, as plain calls. Those
        that are only `plain` are warmed and captured, and may be compiled later, while they serve."""
        self._hurried = placement.hurry
        self._plain = placement.plain or placement.hurry
        self._fast: set[int] = set()  # sizes whose programs are compiled
        self._seconds: dict[int, float] = {}  # what programs take of the device, where it was looked at
        self._instead: dict[int, int] = {}  # larger sizes that are compiled and take less
        self._config = config
        self._finish = finish = placement.finish
        self._device = device
        self._ready: dict[int, Program] = {}
        self.footprint: dict[int, int] = {}
        self.sizes = config.pytorch.buckets if config.max_batch else (1,)
        self._plain_sizes = set(self.sizes)  # that the compiler has not tried yet
        self.varying = any(DYNAMIC in tensor.dims for tensor in config.inputs)
        self.bytes = 0  # beside the weights
        device.enter()
        added = () if finish is None else finish.adds  # the network does not make these itself
        own = tuple(tensor for tensor in config.outputs if tensor.name not in added)
        self.network = network_for(replace(config, outputs=own), file, device, ledger)
        before = device.allocated()
        self.inputs: Inputs
        if self.varying:  # nothing can be laid out for tensors of any size
            self.inputs = VaryingInputs(device, config.inputs)
            self.sizes = ()
            return
        largest = config.max_batch or None
        buffers = sum(
            (largest or 1) * math.prod(tensor.dims) * carried(DATATYPES[tensor.datatype]).itemsize
            for tensor in config.inputs
        )
        if ledger is not None:
            ledger.check(config.name, buffers, f"its inputs for batches of {largest or 1} take")
        self.inputs = FixedInputs(device, config.inputs, largest)
        self.network.fuse(self.inputs.rows(min(_TRIAL, largest or 1)), device)
        if placement.hurry:
            self.bytes = buffers
            return
        self._warm(ledger, buffers, placement.tell)
        device.release()  # what warming up took is not needed beside the graphs
        for size in sorted(self.sizes, reverse=True):  # the smaller ones find room where the largest had it
            placement.tell(f"preparing batches of {size}")
            self._ready[size] = self._program(size)
        device.release()
        self.bytes = device.allocated() - before

    def _warm(self, ledger: MemoryLedger | None, buffers: int, tell: Tell) -> None:
        """Warms small batches first: the memory they take shows whether the next larger one would fit."""
        seen: list[tuple[int, int]] = []
        end = time.monotonic() + _COMPILE_S
        for size in self.sizes or (1,):
            if ledger is not None:
                needed = _expected(seen, size)
                ledger.check(self._config.name, needed, f"with batches of {size} it would take about")
            rows = self.inputs.rows(size)
            if not self._plain and self.network.compiles:
                if time.monotonic() > end:
                    _log.warning(
                        "%s: batches of %d are not compiled: that takes too long", self._config.name, size
                    )
                else:
                    tell(f"compiling for batches of {size}")
                    if not self.network.compile_for(rows, size):
                        self._fast.add(size)
            self.footprint[size] = buffers + self._device.warm(self._runs(rows, size))
            seen.append((size, self.footprint[size]))

    def _runs(self, rows: Sequence[torch.Tensor], size: int) -> Run:
        run, finish = self.network.runs(rows, compiled=size in self._fast), self._finish
        return run if finish is None else lambda: finish(run())

    def _program(self, size: int) -> Program:
        run = self._runs(self.inputs.rows(size), size)
        if self._hurried or not self._config.pytorch.graphs or size not in self.sizes:
            return self._device.call(run)
        try:
            return self._device.capture(run)
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise
            model = self._config.name
            _log.warning("%s: batches of %d run without a graph: %s", model, size, in_one_line(error))
            return self._device.call(run)

    def said(self) -> str:
        used, device = self._config.pytorch, self._device
        form = ", channels last" if used.channels_last else ""
        form += ", convolutions fused" if self.network.fused else ""
        how = f"On {device.name} in {used.precision}{form}"
        if self.sizes and used.graphs:
            how += f", as {'CUDA graphs' if device.place.type == 'cuda' else 'plain calls'}"
        if self.network.is_compiled and not self._plain:
            how += ", compiled"
        if not device.bounded:
            return f"{how}."
        sizes = ", ".join(f"{size}: {in_words(taken)}" for size, taken in self.footprint.items())
        weights = in_words(self.network.weights)
        # Other models come and go on the device meanwhile: less than nothing says only that they did.
        more = f"{in_words(self.bytes)} more" if self.bytes > 0 else "an unknown amount more"
        return f"{how}; weights {weights}, each instance {more} (by batch {sizes})."

    # ---- compiling while it serves ----------------------------------------------------------------------

    def compile(self, size: int, ledger: MemoryLedger | None) -> CompiledSize:
        """In a thread of its own, beside batches: compile, compare, capture, time, adopt. The size is run as
        it was until the last step, and for good if any step fails. One that was loaded in a hurry, and is not
        to serve, is only compiled."""
        if size in self._fast:
            return CompiledSize(size)
        device, steps = self._device, _Steps()
        why = self._compiled(size, steps)
        steps.done("warm")
        self._plain_sizes.discard(size)
        if self._hurried or not self._plain_sizes or self._memory_is_short(size, ledger):
            device.release()  # which batches wait for
            steps.done("release")
        if why or self._hurried:
            return CompiledSize(size, why_not=why)
        before = self._ready.get(size) or self._program(size)
        held = device.allocated()
        with nullcontext() if ledger is None else ledger.loading:
            self._fast.add(size)
            try:
                after = self._program(size)
            except BaseException:
                self._fast.discard(size)
                raise
        steps.done("capture")
        found = CompiledSize(size, self._timed(before), self._timed(after), "", steps.began, steps.seconds)
        if found.after > found.before:
            self._fast.discard(size)
            times = f"{found.after * 1e3:.3g} ms compiled, and {found.before * 1e3:.3g} ms as it is"
            return CompiledSize(size, why_not=f"it is not faster: {times}")
        self._seconds[size] = found.after
        for other in self.sizes:
            if other not in self._seconds and other < size and other in self._ready:
                self._seconds[other] = self._timed(self._ready[other])
        steps.done("time")
        with device.turn():
            self._ready[size] = after
            self._instead = self._cheaper()
        self.bytes += max(0, device.allocated() - held)
        return found

    def _compiled(self, size: int, steps: _Steps) -> str:
        """Returns why the compiled form is not to be used, or nothing."""
        device, network = self._device, self.network
        with device.beside():
            rows = [_noise(row) for row in self.inputs.rows(size)]
            if not self._hurried:
                with device.looking_for_kernels(size):
                    network.runs(rows, compiled=False)()
                steps.done("look")
            why = network.compile_for(rows, size)
            steps.done("compile")
            if not why and not self._hurried:
                run = network.runs(rows, compiled=True)
                for _ in range(_WARM_UPS):
                    run()
        return why

    def _memory_is_short(self, size: int, ledger: MemoryLedger | None) -> bool:
        """Memory that compiling took and the allocator still holds may be needed for the capture."""
        held = self._device.allocated()
        room = self._device.free() if ledger is None else min(self._device.free(), ledger.most - held)
        return room < _ROOM * self.footprint.get(size, 0)

    def _timed(self, program: Program) -> float:
        """Seconds that it takes of the device, the shortest of a few; requests run in between."""
        shortest = math.inf
        for _ in range(_TIMED):
            with self._device.turn():
                self._device.enter()
                seconds = self._device.seconds(program)
            shortest = min(shortest, seconds)
            time.sleep(_PAUSE * seconds)
        return shortest

    def _cheaper(self) -> dict[int, int]:
        """Returns, for sizes that are not compiled yet, the compiled one that takes the least, if less."""
        found = {}
        for size, seconds in self._seconds.items():
            larger = [other for other in self._fast if other > size]
            best = min(larger, key=self._seconds.__getitem__, default=size)
            if size not in self._fast and self._seconds[best] < seconds:
                found[size] = best
        return found

    # ---- running ----------------------------------------------------------------------------------------

    def padded(self, count: int) -> int:
        """Returns the batch that runs for so many images."""
        if not self.sizes:
            return count
        place = bisect_left(self.sizes, count)
        if place == len(self.sizes):
            model, most = self._config.name, self.sizes[-1]
            raise ModelError(f"{model}: batches end at {most} images, and this one has {count}")
        size = self.sizes[place]
        return self._instead.get(size, size)

    def smaller(self, count: int) -> int:
        """Returns what to try where the batch for so many images did not fit: half, or the next bucket; 0:
        none."""
        size = self.padded(count)
        if not self.sizes:
            return size // 2
        return max((other for other in self.sizes if other < size), default=0)

    def replay(self, count: int, stage: Callable[[Inputs], object]) -> tuple[Mapping[str, torch.Tensor], int]:
        """Returns the outputs, on their way, and the size of the batch that ran."""
        stage(self.inputs)
        size = self.padded(count)
        program = self._ready.get(size)
        if program is None:
            program = self._program(size)
            if not self.varying:
                self._ready[size] = program
        self._device.launch(program, size)
        return program.outputs, size


class _Steps:
    """What one adoption did when, for those who look for what delayed batches meanwhile."""

    def __init__(self) -> None:
        self.began = time.time()
        self.seconds: dict[str, float] = {}
        self._last = time.monotonic()

    def done(self, name: str) -> None:
        last, self._last = self._last, time.monotonic()
        self.seconds[name] = round(self._last - last, 4)


def _noise(row: torch.Tensor) -> torch.Tensor:
    """Returns an input to compare by. Whole numbers may be places in a table: only those of pictures can be
    any."""
    if row.is_floating_point():
        return torch.rand_like(row)
    if row.dtype is torch.uint8:
        return torch.randint(0, 256, row.shape, dtype=row.dtype, device=row.device)
    return torch.zeros_like(row)


def _expected(seen: Sequence[tuple[int, int]], size: int) -> int:
    """Returns what a batch of this size will take, on the line through the two largest that were tried."""
    if not seen:
        return 0
    last, used = seen[-1]
    if len(seen) == 1:
        return used
    before, less = seen[-2]
    return used + max(0, used - less) * (size - last) // (last - before)
