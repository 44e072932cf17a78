"""Makes files of lower precision, by onnxruntime's quantizer or NNCF; both are needed here and never to
serve."""

from __future__ import annotations

import copy
import logging
import math
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

from carpool.errors import CarpoolError, InvalidInput
from carpool.extension import importable
from carpool.types import Array

Feed = Mapping[str, Array]

_BOUNDLESS = 1e9  # numbers of this size are no activations

TOOLS = ("carpool", "onnxruntime", "openvino", "nncf", "onnx", "numpy")


def tool_versions() -> dict[str, str]:
    """Returns the versions of what was used here, as far as it is installed."""
    found = {}
    for name in TOOLS:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


class NotQuantized(CarpoolError):
    """Means that the tool cannot make this file, for a reason of its own."""

    exit_code = 1


@contextmanager
def _own_words(tool: str) -> Iterator[None]:
    """The tools log every step, and raise whatever they like."""
    root = logging.getLogger()
    level = root.level
    try:
        yield
    except CarpoolError:
        raise
    except Exception as error:  # see above
        line = " ".join(str(error).split())[:300]
        raise NotQuantized(f"{tool}: {type(error).__name__}: {line}") from None
    finally:
        root.setLevel(level)


def no_quantizer(source: Path) -> str:
    """Returns why nothing can be quantized here, or nothing."""
    if source.suffix not in (".onnx", ".xml"):
        return f"{source.name} is neither an ONNX nor an OpenVINO file"
    return ""


def no_onnx_quantizer(source: Path) -> str:
    """Returns why onnxruntime's quantizer cannot make a file of this one, or nothing."""
    if source.suffix != ".onnx":
        return f"{source.name} is no ONNX file"
    return "" if importable("onnx") else "it needs onnx: pip install 'carpool[optimize]'"


def no_nncf() -> str:
    """Returns why NNCF cannot be used, or nothing."""
    missing = [name for name in ("openvino", "nncf") if not importable(name)]
    return f"it needs {' and '.join(missing)}: pip install 'carpool[optimize]'" if missing else ""


# ---- onnxruntime's quantizer: scales in the file (QDQ), weights by channel, activations in uint8


@dataclass(slots=True)
class OnnxQuantizer:
    """Holds a prepared network and the ranges of its activations, from which files with any choice of layers
    are made in less than a second each."""

    _model: Any
    _ranges: Any
    _operators: Sequence[str]
    _boundless: Sequence[str] = ()  # layers whose numbers have no scale, such as a padding with -infinity

    @classmethod
    def calibrated(cls, source: Path, feeds: Sequence[Feed]) -> OnnxQuantizer:
        """Runs the pictures through the network and notes the ranges of its activations."""
        import onnx

        shapes: Any = import_module("onnxruntime.quantization.shape_inference")
        calibrate: Any = import_module("onnxruntime.quantization.calibrate")
        registry: Any = import_module("onnxruntime.quantization.registry")
        operators = list(dict.fromkeys((*registry.QLinearOpsRegistry, *registry.QDQRegistry)))
        with _own_words("onnxruntime's quantizer"), tempfile.TemporaryDirectory() as folder:
            prepared = Path(folder) / "prepared.onnx"
            try:
                shapes.quant_pre_process(str(source), str(prepared), skip_symbolic_shape=True)
            except Exception:  # it is a help, and may fail on files that can be quantized all the same
                onnx.save(onnx.load(str(source)), str(prepared))
            wanted = {tensor.name for tensor in onnx.load(str(prepared)).graph.input}
            weights = {tensor.name for tensor in onnx.load(str(prepared)).graph.initializer}
            lacking = sorted(wanted - weights - set(feeds[0]))
            if lacking:
                raise NotQuantized(f"onnxruntime's quantizer: nothing gives its input {', '.join(lacking)}")
            collector = calibrate.create_calibrator(
                prepared,
                operators,
                augmented_model_path=str(Path(folder) / "augmented.onnx"),
                calibrate_method=calibrate.CalibrationMethod.MinMax,
            )
            collector.collect_data(_Reader(feeds))
            model, ranges = onnx.load(str(prepared)), collector.compute_data()
            wild = {name for name in ranges.keys() if _is_boundless(ranges[name])}  # noqa: SIM118
            boundless = [node.name for node in model.graph.node if wild & {*node.input, *node.output}]
            return cls(model, ranges, operators, [name for name in boundless if name])

    @property
    def layers(self) -> list[str]:
        """Returns the names of the layers that can be quantized."""
        return [
            node.name
            for node in self._model.graph.node
            if node.op_type in self._operators and node.name and node.name not in self._boundless
        ]

    def write(self, file: Path, *, kept: Sequence[str] = (), only: Sequence[str] = ()) -> None:
        """Writes a file in which all layers but those `kept` are quantized, or `only` these."""
        import onnx

        quantizer: Any = import_module("onnxruntime.quantization.qdq_quantizer")
        types: Any = import_module("onnxruntime.quantization.quant_utils").QuantType
        with _own_words("onnxruntime's quantizer"):
            made = quantizer.QDQQuantizer(
                copy.deepcopy(self._model),
                True,  # weights by channel
                False,
                types.QInt8,
                types.QUInt8,  # of activations: int8 runs far slower on processors with VNNI
                self._ranges,
                list(only) or None,
                [*kept, *self._boundless],
                list(self._operators),
                {},
            )
            made.quantize_model()
            onnx.save(made.model.model, str(file))


def _is_boundless(data: Any) -> bool:
    """Returns whether no scale fits the numbers of a tensor."""
    return any(not abs(float(np.max(np.abs(end)))) < _BOUNDLESS for end in data.range_value)


class _Reader:
    """Gives the pictures one by one, as onnxruntime's calibration asks for them."""

    def __init__(self, feeds: Sequence[Feed]) -> None:
        self._left = iter(feeds)

    def get_next(self) -> dict[str, Array] | None:
        feed = next(self._left, None)
        return None if feed is None else dict(feed)

    def __iter__(self) -> _Reader:
        return self

    def __next__(self) -> dict[str, Array]:
        feed = self.get_next()
        if feed is None:
            raise StopIteration
        return feed

    def set_range(self, start_index: int, end_index: int) -> None:
        raise NotImplementedError


# ---- OpenVINO: its own form of a file, and NNCF's quantization of it


def write_openvino(source: Path, file: Path) -> None:
    """Writes OpenVINO's own form of a network: an .xml file, and its weights in a .bin file beside it."""
    openvino: Any = import_module("openvino")
    with _own_words("OpenVINO"):
        openvino.save_model(openvino.Core().read_model(str(source)), str(file), compress_to_fp16=False)


def write_nncf(source: Path, file: Path, feeds: Sequence[Feed], kept: Sequence[str] = ()) -> None:
    """Writes a network that NNCF quantized, without the layers that are `kept`."""
    openvino: Any = import_module("openvino")
    with _own_words("NNCF"), _quiet_terminal():
        nncf: Any = import_module("nncf")
        logging.getLogger("nncf").setLevel(logging.ERROR)
        model = openvino.Core().read_model(str(source))
        names = {node.get_friendly_name() for node in model.get_ops()}
        ignored = [name for name in kept if name in names]
        made = nncf.quantize(
            model,
            nncf.Dataset(list(feeds)),
            preset=nncf.QuantizationPreset.MIXED,
            target_device=nncf.TargetDevice.CPU,
            subset_size=len(feeds),
            ignored_scope=nncf.IgnoredScope(names=ignored, validate=False) if ignored else None,
        )
        openvino.save_model(made, str(file), compress_to_fp16=False)


@contextmanager
def _quiet_terminal() -> Iterator[None]:
    """NNCF draws its own progress on the standard output, which belongs to the result."""
    from contextlib import redirect_stderr, redirect_stdout

    with (
        Path(os.devnull).open("w", encoding="utf-8") as nothing,
        redirect_stdout(nothing),
        redirect_stderr(nothing),
    ):
        yield


def checked_feeds(feeds: Sequence[Feed]) -> Sequence[Feed]:
    """Returns them, if there are any and all numbers are finite."""
    if not feeds:
        raise InvalidInput("there is nothing to calibrate with")
    for feed in feeds:
        for name, array in feed.items():
            if array.dtype.kind == "f" and not math.isfinite(float(array.sum())):
                raise InvalidInput(f"the input {name} has numbers that are not finite")
    return feeds
