"""One instance of a PyTorch model: a batch is gathered, copied, run as one launch, and copied back.

While it runs, the thread holds the interpreter only between a handful of calls; per image it only makes a
list of arrays. Several instances on one GPU, each with a stream of its own, overlap copies with computing.
A batch that runs cannot be interrupted: an abort takes effect when it is done.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from traceback import clear_frames
from typing import TypeVar, cast

import numpy as np

from carpool.backends.backend import (
    CompiledSize,
    FillPictures,
    Placement,
    Seen,
    aborted,
    check_wanted,
)
from carpool.backends.device_memory import in_words, ledger_of
from carpool.config.model import ModelConfig, ModelSignature
from carpool.errors import CarpoolError, ModelError
from carpool.extensions.torch.torch_device import CudaDevice, Device, as_tensor, is_out_of_memory, lies_well
from carpool.extensions.torch.torch_files import in_one_line
from carpool.extensions.torch.torch_programs import Answers, Inputs, Part, Programs
from carpool.types import Array

_log = logging.getLogger(__name__)

Outputs = Mapping[str, Array]
Errors = Mapping[int, CarpoolError]
T = TypeVar("T")


def load(config: ModelConfig, file: Path, placement: Placement) -> TorchBackend:
    """`config` is settled: see `pytorch.describe`."""
    gpu = placement.gpu
    if gpu is None and config.pytorch.device.startswith("cuda"):
        gpu = int(config.pytorch.device.partition(":")[2] or 0)
    device = Device(placement.threads) if gpu is None else CudaDevice(gpu)
    return TorchBackend(config, file, device, placement)


class TorchBackend:
    """`out_of_memory` counts the batches for which the device's memory did not suffice."""

    signature = ModelSignature()

    def __init__(self, config: ModelConfig, file: Path, device: Device, placement: Placement) -> None:
        self._model = config.name
        self._device = device
        self.device = device.name if device.bounded else ""
        self._outputs = [tensor.name for tensor in config.outputs]
        self._batched = config.max_batch != 0
        self._cap = config.max_batch or 1
        self._aborted = False
        self.broken = False
        self.out_of_memory = 0
        self._answers = Answers(device)
        self._fill: FillPictures | None = None
        self._programs: Programs | None = None
        self._ledger = ledger_of(device) if device.bounded else None
        failure: Exception | None = None
        try:
            with nullcontext() if self._ledger is None else self._ledger.loading:
                device.look_for_kernels(not placement.plain)
                self._programs = programs = Programs(config, file, device, self._ledger, placement)
                if placement.fill is not None and not programs.varying:
                    self._fill = placement.fill(device.place)
                if self._ledger is not None:
                    self._ledger.hold(self, self._model, programs.bytes)
        except Exception as error:
            failure = self._not_loaded(error)
            clear_frames(error.__traceback__)  # they would hold on to memory that is to be given back
        if failure is not None:
            self.close()
            raise failure

    def _not_loaded(self, error: Exception) -> Exception:
        if isinstance(error, CarpoolError):
            return error
        if is_out_of_memory(error) and self._ledger is not None:
            room, most = in_words(self._ledger.room), in_words(self._ledger.most)
            return ModelError(
                f"{self._model}: {self._device.name} ran out of memory while it was loaded, with "
                f"{room} of {most} left for it; unload another model, lower max_batch, or allow more "
                "(device_memory_gb)",
                reason="device-memory",
            )
        return ModelError(f"{self._model}: it cannot be run on zeros: {in_one_line(error)}")

    @property
    def alive(self) -> bool:
        return self._programs is not None and not self._aborted

    @property
    def notes(self) -> Sequence[str]:
        return () if self._programs is None else (self._programs.said(),)

    def weights(self) -> object:
        return None if self._programs is None else self._programs.network

    def compile(self, size: int) -> CompiledSize:
        programs, ledger = self._programs, self._ledger
        if programs is None or self._aborted:
            return CompiledSize(size, why_not="the instance has ended")
        try:
            found = programs.compile(size, ledger)
        except Exception as error:  # kernels and networks may raise anything
            self._device.release()
            if "CUDA error" in str(error):
                self.broken = self._aborted = True
            return CompiledSize(size, why_not=in_one_line(error))
        if ledger is not None and self._programs is not None:
            ledger.hold(self, self._model, programs.bytes)
        return found

    # ---- batches ----------------------------------------------------------------------------------------

    def run(self, inputs: Mapping[str, Array], wanted: Sequence[str]) -> Outputs:
        images = len(next(iter(inputs.values()))) if self._batched and inputs else 1
        return self.run_parts([inputs], [images], wanted)

    def view(self, inputs: Mapping[str, Array]) -> Part | None:
        if not all(map(lies_well, inputs.values())):
            return None
        return {name: as_tensor(array) for name, array in inputs.items()}

    def run_parts(self, parts: Sequence[Part], images: Sequence[int], wanted: Sequence[str]) -> Outputs:
        names = check_wanted(self._model, wanted, self._outputs)

        def once(some: Sequence[Part], count: int) -> Outputs:
            return self._once(count, names, lambda inputs: inputs.gather(some, count))

        return _joined(self._fitting(parts, images, once))

    def run_encoded(self, pictures: Sequence[Seen], wanted: Sequence[str]) -> tuple[Outputs, Errors]:
        names = check_wanted(self._model, wanted, self._outputs)
        fill = self._fill
        if fill is None:
            raise ModelError(f"{self._model} takes no encoded images on {self._device.name}")
        errors: dict[int, CarpoolError] = {}
        done = 0

        def once(some: Sequence[Seen], count: int) -> Outputs:
            nonlocal done
            found: Errors = {}

            def stage(inputs: Inputs) -> None:
                nonlocal found
                found = fill.fill(some, inputs.rows(count)[0])

            outputs = self._once(count, names, stage)
            errors.update({done + index: error for index, error in found.items()})
            done += count
            return outputs

        return _joined(self._fitting(pictures, [1] * len(pictures), once)), errors

    def _once(self, count: int, names: Sequence[str], stage: Callable[[Inputs], object]) -> Outputs:
        """Fills rows, replays the program and copies the answers; back when all of it is done."""
        with self._device.turn():
            if self._programs is None or self._aborted:
                raise aborted(self._model)
            self._device.enter()
            outputs, size = self._programs.replay(count, stage)
            arrays = self._answers.copy(outputs, names)
            self._device.wait(count)
        if self._aborted:
            raise aborted(self._model)
        if not self._batched or count == size:
            return arrays
        # An answer with another number of rows is passed on as it is, and the engine says what is wrong.
        return {name: array[:count] if len(array) == size else array for name, array in arrays.items()}

    # ---- when memory does not suffice -------------------------------------------------------------------

    def _fitting(
        self, units: Sequence[T], sizes: Sequence[int], once: Callable[[Sequence[T], int], Outputs]
    ) -> list[Outputs]:
        """Runs it in one piece, or in two where a batch like this did not fit into memory before, or does not
        now."""
        count = sum(sizes)
        if count <= self._cap:
            try:
                return [once(units, count)]
            except CarpoolError:
                raise
            except Exception as error:  # kernels and networks may raise anything
                if not is_out_of_memory(error):
                    raise self._failed(error) from None
                self._lower_cap(count)
        if len(units) == 1:
            # The inputs of one request: a single picture, if it does not fit, has raised above.
            at, inputs = sizes[0] // 2, cast(Part, units[0])
            parts = [
                {name: array[part] for name, array in inputs.items()} for part in (slice(at), slice(at, None))
            ]
            units, sizes = cast(Sequence[T], parts), [at, sizes[0] - at]
        middle = len(units) // 2
        first = self._fitting(units[:middle], sizes[:middle], once)
        return first + self._fitting(units[middle:], sizes[middle:], once)

    def _lower_cap(self, count: int) -> None:
        assert self._programs is not None
        self.out_of_memory += 1
        self._device.release()
        free = in_words(self._device.free())
        cap = self._programs.smaller(count)
        if cap < 1 or count == 1:
            raise ModelError(
                f"{self._model}: {self._device.name} has no memory for even the smallest batch: {free} free",
                reason="device-memory",
            )
        self._cap = cap
        what = f"a batch of {count} did not fit into the memory of {self._device.name} ({free} free)"
        _log.warning("%s: %s; from here on batches end at %d", self._model, what, cap)

    def _failed(self, error: Exception) -> ModelError:
        if "CUDA error" in str(error):  # whatever broke stays broken, for every instance in this process
            self._aborted = True
            self.broken = True
        return ModelError(f"{self._model}: {in_one_line(error)}")

    # ---- the end ----------------------------------------------------------------------------------------

    def abort(self) -> None:
        self._aborted = True

    def close(self) -> None:
        """Graphs, buffers and, with the last instance, the weights: the device has it all back."""
        if self._programs is None and self._ledger is None:
            return
        self._programs = None
        self._fill = None
        self._answers.close()
        if self._device.bounded:  # compiled networks are full of circles
            gc.collect()
        self._device.release()
        if self._ledger is not None:
            self._ledger.drop(self)
            self._ledger = None
        self._device.close()


def _joined(pieces: Sequence[Outputs]) -> Outputs:
    if len(pieces) == 1:
        return pieces[0]
    return {name: np.concatenate([piece[name] for piece in pieces]) for name in pieces[0]}
