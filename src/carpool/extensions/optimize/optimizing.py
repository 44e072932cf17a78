"""Makes forms of a model, compares their answers, measures them, and decides: the best one, or keep."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

from carpool import backends
from carpool.backends.backend import Backend, Placement
from carpool.config.backend_kinds import kind_of
from carpool.config.fingerprint import content_digest
from carpool.config.model import ModelConfig
from carpool.config.repository import ModelSource, ModelVersion, version_folders
from carpool.config.usable_cores import usable_cores
from carpool.core.numerals import numeral
from carpool.core.objectives import Promise
from carpool.engine.loading.trial import Examined, examine, try_out
from carpool.engine.profile.hardware import hardware
from carpool.engine.profile.whole_file import write_whole
from carpool.errors import CarpoolError, InvalidInput
from carpool.extensions.optimize.answer_loss import Judge, Loss, unlike
from carpool.extensions.optimize.asked_pictures import (
    INPUTS,
    Asked,
    AskedTensors,
    Split,
    asked_pictures,
    read_requests,
    split,
)
from carpool.extensions.optimize.capacity_trial import (
    Form,
    LayoutCurve,
    Speed,
    measured_beside,
    not_batched,
)
from carpool.extensions.optimize.layer_search import LayerSearch
from carpool.extensions.optimize.lower_precision import (
    Feed,
    NotQuantized,
    OnnxQuantizer,
    checked_feeds,
    no_nncf,
    no_onnx_quantizer,
    no_quantizer,
    tool_versions,
    write_nncf,
    write_openvino,
)
from carpool.lab.batch_profile import ProfileQuestion, the_model
from carpool.lab.evaluate.scores import Measure
from carpool.types import Array
from carpool.vision.plans.settings import describe

FORMAT = 1
ONNX, OPENVINO, NNCF = "onnxruntime", "openvino", "nncf"
_FILES = {ONNX: "model.onnx", OPENVINO: "model.xml"}
_ERRORS_OF = 4  # pictures by which sensitive layers are searched
_FAR_OFF = 20.0  # times the limit: forms that lose more are not measured
_FEWER_TURNS = 2  # of forms that are measured for the picture alone
_STEADY = 0.95  # of the least gain: what a quarter of the turns may be below

Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """Describes what is asked for. `loss` is in percentage points, `slo` in seconds, None: the model's."""

    path: Path
    name: str | None = None
    pictures: Sequence[Path] = ()
    recording: Path | None = None
    calibration: Sequence[Path] = ()  # in place of a part of the pictures
    labels: Measure | None = None
    loss: float = 0.5
    slo: float | None = None
    held: int = 300
    engines: Sequence[str] = (ONNX, OPENVINO)
    least_gain: float = 1.1
    turns: int = 5
    search_s: float = 90.0
    work: Path = Path()


@dataclass(slots=True)
class Tried:
    """Describes one form, as far as it came. The field names are keys of optimize.json."""

    name: str
    engine: str
    precision: str
    quantizer: str = ""
    kept: tuple[str, ...] = ()  # layers that stay in full precision
    why_not: str = ""  # why it is out; empty: it may be the best
    loss: Loss | None = None
    speed: Speed | None = None
    digest: str = ""

    def document(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(slots=True)
class Optimized:
    """Holds all that was found, and the decision. The field names are keys of optimize.json."""

    format: int
    model: str
    version: int
    decision: str  # write or keep
    why: str
    winner: str
    task: str
    slo_ms: float
    limit_points: float
    hardware: str
    inputs: dict[str, Any]
    tools: dict[str, str]
    base: Speed | None
    forms: list[Tried]
    notes: list[str]
    written: int | None = None

    def document(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def best(self) -> Tried | None:
        return next((form for form in self.forms if form.name == self.winner), None)


class Journal:
    """Keeps what was found in the work folder, so that a run that ended early goes on where it was."""

    def __init__(self, file: Path, key: Mapping[str, Any]) -> None:
        self._file, self._key = file, json.loads(json.dumps(key))
        self.found: dict[str, Any] = {}
        with suppress(OSError, ValueError, KeyError, TypeError):
            document = json.loads(file.read_text("utf-8"))
            if document["key"] == self._key:
                self.found = document["found"]

    def note(self, name: str, value: Any) -> None:
        self.found[name] = json.loads(json.dumps(value))
        self._file.parent.mkdir(parents=True, exist_ok=True)
        data = json.dumps({"key": self._key, "found": self.found}).encode()
        write_whole(self._file, (data,), 0o644)


@contextmanager
def _opened(config: ModelConfig, version: ModelVersion, threads: int) -> Iterator[Backend]:
    backend = backends.load(config, version, Placement(threads=threads))
    try:
        yield backend
    finally:
        backend.close()


class Optimizing:
    """Runs one question to its end."""

    def __init__(self, question: Question, tell: Tell = lambda _: None) -> None:
        self._q, self._tell = question, tell
        self._source = the_model(ProfileQuestion(question.path, question.name))
        self._cores = usable_cores()
        self._version = self._source.versions[-1]
        self._check()
        self._found = self._examined(self._source, self._version)
        self._slo = self._promised()
        self._asked, self._split = self._requests()
        self._base = Form("as it is", self._found.config, self._found.version)
        self._engine = str(self._found.config.backend)
        self._right: list[dict[str, Any]] = []
        self._judge: Judge | None = None
        self._notes: list[str] = []
        self._journal = Journal(question.work / "journal.json", self._key())
        self._quantizer: OnnxQuantizer | None = None
        self._worst: list[str] | None = None

    # ---- what is asked --------------------------------------------------------------------------------

    def _check(self) -> None:
        config = self._source.config
        if config.asks("text") or config.needs or self._version.file is None:
            raise InvalidInput(f"{config.name} is no single network, and optimize makes forms of one")
        kind = kind_of(config.backend)
        if config.decoupled or config.asks("sequences") or kind.process != "engine":
            raise InvalidInput(
                f"{config.name} runs on {config.backend}: optimize compares ONNX and OpenVINO files, whose "
                "requests are independent"
            )

    def _examined(self, source: ModelSource, version: ModelVersion) -> Examined:
        found = examine(source.config_of(version), version)

        def load(config: ModelConfig) -> Backend:
            return backends.load(config, found.version, Placement(threads=1, hurry=True))

        return try_out(found, load)

    def _promised(self) -> float:
        policy = self._source.config.policy
        if self._q.slo is not None:
            return self._q.slo
        if isinstance(policy, Promise):
            return policy.slo
        raise InvalidInput(f"{self._source.config.name} has no SLO to be measured by: give --slo-ms")

    def _requests(self) -> tuple[Asked, Split]:
        q = self._q
        if q.recording is not None:
            asked: Asked = read_requests(q.recording, self._found)
            return asked, split(asked.count, q.held)
        options = {} if q.labels is None else q.labels.options
        files = [*q.pictures, *q.calibration]
        self._tell(f"preparing {len(files)} images")
        pictures = asked_pictures(self._found, files, q.work, options)
        apart = len(set(q.calibration) & set(pictures.files)) if q.calibration else None
        return pictures, split(pictures.count, q.held, apart)

    def _key(self) -> dict[str, Any]:
        q = self._q
        assert self._version.file is not None
        digest = blake2b(digest_size=16)
        for place in (*self._split.calibrating, *self._split.held):
            for array in self._asked.feed(place).values():
                digest.update(np.ascontiguousarray(array).tobytes())
        return {
            "format": FORMAT,
            "model": content_digest(self._version.file),
            "requests": digest.hexdigest(),
            "calibrating": len(self._split.calibrating),
            "held": len(self._split.held),
            "labels": q.labels is not None,
            "settings": [q.loss, self._slo, list(q.engines), q.turns, q.search_s],
            "tools": tool_versions(),
            "hardware": str(hardware()),
        }

    @property
    def folder(self) -> Path:
        """Returns the model's folder, where its versions lie."""
        return self._source.config.path

    def winner_file(self, found: Optimized) -> Path:
        assert found.best is not None
        return self._file_of(found.best)

    def close(self) -> None:
        """Removes the prepared inputs; what is small, and what a next run begins with, stays."""
        self._asked = AskedTensors(())
        (self._q.work / INPUTS).unlink(missing_ok=True)

    # ---- forms ----------------------------------------------------------------------------------------

    def run(self) -> Optimized:
        bases: list[Speed] = []
        forms: list[Tried] = []
        self._right = self._answers(self._base, self._split.held, "as it is")
        doubts = self._judge_of(self._right).doubts()
        if doubts:
            return self._result(forms, None, doubts)
        calibrating = self._answers(self._base, self._split.calibrating, "as it is")
        self._note(unlike(calibrating, self._right))
        for tried in self._forms():
            forms.append(tried)
            bases += self._measure(tried)
        return self._result(forms, _usual(bases), "")

    def _judge_of(self, right: Sequence[dict[str, Any]]) -> Judge:
        labels, places = self._q.labels, []
        if labels is not None:
            order = {file: place for place, file in enumerate(labels.files)}
            files = getattr(self._asked, "files", ())
            places = [order[files[place]] for place in self._split.held]
        self._judge = Judge(self._asked.task, right, labels, places)
        return self._judge

    def _forms(self) -> Iterator[Tried]:
        """Yields forms with their losses: other engines first, then int8, with more layers kept where the
        limit is not met otherwise."""
        source = self._found.version.file
        assert source is not None
        for engine in self._engines():
            if engine != self._engine:
                yield self._tried(Tried(f"{engine} fp32", engine, "fp32"), self._as_for(source, engine))
        if why := no_quantizer(source):
            self._note(f"int8 was not tried: {why}")
            return
        whole: list[Tried] = []
        for tried in (*self._by_onnxruntime(source), *self._by_nncf(source)):
            whole.append(tried)
            yield tried
        yield from self._with_layers_kept(source, whole)

    def _engines(self) -> list[str]:
        """Returns the engines to try: what the settings name stays."""
        declared = self._declared_backend()
        there = [engine for engine in self._q.engines if not kind_of(engine).missing()]
        for engine in self._q.engines:
            if engine not in there:
                self._note(f"{engine} was not tried: {kind_of(engine).missing()}")
        if declared == OPENVINO:
            self._note("onnxruntime was not tried: the settings name the backend openvino")
            return [engine for engine in there if engine == OPENVINO]
        return there

    def _declared_backend(self) -> str | None:
        from carpool.config.repository import folder_settings

        config = self._source.config
        return folder_settings(config.path, config.name)[0].backend if config.path.is_dir() else None

    def _as_for(self, source: Path, engine: str) -> Callable[[Path], None]:
        def write(file: Path) -> None:
            if engine == OPENVINO:
                write_openvino(source, file)
            elif source.suffix == ".onnx":
                shutil.copyfile(source, file)
            else:
                raise NotQuantized(f"{engine} does not run {source.name}")

        return write

    def _by_onnxruntime(self, source: Path) -> Iterator[Tried]:
        """Yields the network quantized whole, for each engine."""
        engines = self._engines()
        if not engines:
            return
        if why := no_onnx_quantizer(source):
            self._note(f"onnxruntime's quantizer was not used: {why}")
            return
        for engine in engines:
            form = Tried(f"{engine} int8", engine, "int8", "onnxruntime")
            yield self._tried(form, self._qdq(engine, ()))

    def _with_layers_kept(self, source: Path, whole: Sequence[Tried]) -> Iterator[Tried]:
        """Yields forms with sensitive layers in full precision, in place of those that lose too much: they
        are slower than those, so that only what is faster than the best so far is worth the search."""
        gained = max((tried.speed.gain for tried in whole if tried.speed and not tried.why_not), default=0.0)
        left = [
            tried
            for tried in whole
            if tried.loss is not None
            and not tried.loss.within(self._q.loss)
            and (tried.speed.gain > gained if tried.speed else not gained)
        ]
        if not left or no_onnx_quantizer(source):
            return
        for kept in self._levels():
            for before in list(left):
                name = f"{before.name}, {len(kept)} layers kept"
                form = Tried(name, before.engine, "int8", before.quantizer, kept)
                by_nncf = before.quantizer == NNCF
                write = self._nncf(source, kept) if by_nncf else self._qdq(before.engine, kept)
                tried = self._tried(form, write)
                yield tried
                if not tried.why_not:
                    left.remove(before)  # more layers kept would only be slower

    def _is_far_off(self, loss: Loss) -> bool:
        return loss.points > _FAR_OFF * self._q.loss

    def _qdq(self, engine: str, kept: Sequence[str]) -> Callable[[Path], None]:
        def write(file: Path) -> None:
            whole = file.with_name("quantized.onnx") if engine == OPENVINO else file
            self._calibrated().write(whole, kept=kept)
            _keep_metadata(self._found.version.file, whole)
            if engine == OPENVINO:
                write_openvino(whole, file)
                whole.unlink()

        return write

    def _calibrated(self) -> OnnxQuantizer:
        if self._quantizer is None:
            assert self._found.version.file is not None
            self._tell("calibrating")
            self._quantizer = OnnxQuantizer.calibrated(self._found.version.file, self._feeds())
        return self._quantizer

    def _feeds(self) -> Sequence[Feed]:
        return checked_feeds([self._asked.feed(place) for place in self._split.calibrating])

    def _levels(self) -> list[tuple[str, ...]]:
        """Returns the layers to keep, fewest first: those whose error is the largest."""
        if "levels" not in self._journal.found:
            try:
                found = self._searched()
            except CarpoolError as error:
                self._note(f"sensitive layers were not searched: {error.message}")
                return []
            self._journal.note("levels", found)
        return [tuple(level) for level in self._journal.found["levels"]]

    def _searched(self) -> list[tuple[str, ...]]:
        folder = self._q.work / "search"
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / "model.onnx"
        places = self._split.calibrating[:_ERRORS_OF]
        base = replace(self._source.config, backend=ONNX, file=file.name)

        def run(path: Path) -> list[Mapping[str, Array]]:
            with _opened(base, ModelVersion(1, path), self._cores) as backend:
                return [backend.run(self._asked.feed(place), ()) for place in places]

        assert self._found.version.file is not None
        search = LayerSearch(
            self._calibrated(),
            run(self._found.version.file),
            run,
            file,
            seconds=self._q.search_s,
            tell=self._tell,
        )
        worst = [layer for layer, _ in search.sensitive()]
        layers = len(self._calibrated().layers)
        if search.searched < layers:
            self._note(
                f"sensitive layers were searched among the last {search.searched} of {layers}: then the "
                f"{self._q.search_s:g} s of --search-s were over"
            )
        return search.levels(worst)

    def _by_nncf(self, source: Path) -> Iterator[Tried]:
        if OPENVINO not in self._engines():
            return
        if why := no_nncf():
            self._note(f"NNCF was not used: {why}")
            return
        form = Tried("openvino int8 by NNCF", OPENVINO, "int8", NNCF)
        yield self._tried(form, self._nncf(source, ()))

    def _nncf(self, source: Path, kept: Sequence[str]) -> Callable[[Path], None]:
        def write(file: Path) -> None:
            write_nncf(source, file, self._feeds(), kept)

        return write

    # ---- one form -------------------------------------------------------------------------------------

    def _file_of(self, tried: Tried) -> Path:
        folder = self._q.work / "forms" / "".join(c if c.isalnum() else "-" for c in tried.name)
        return folder / _FILES[tried.engine]

    def _form(self, tried: Tried) -> Form:
        file = self._file_of(tried)
        config = replace(self._source.config, backend=tried.engine, file=file.name)
        found = self._examined(replace(self._source, config=config), ModelVersion(1, file))
        if self._q.recording is None and _seen(found) != _seen(self._found):
            raise NotQuantized(
                "the server would not see images as before, since the file says less of itself: write what "
                "carpool inspect shows into model.toml"
            )
        return Form(tried.name, found.config, found.version)

    def _tried(self, tried: Tried, write: Callable[[Path], None]) -> Tried:
        """Makes the form and finds its loss, unless an earlier run did."""
        known, file = self._journal.found.get(tried.name), self._file_of(tried)
        if known is not None and (known["why_not"] or file.is_file()):
            return _read_tried(known)
        try:
            self._tell(f"{tried.name}: making the file")
            file.parent.mkdir(parents=True, exist_ok=True)
            write(file)
            tried.digest = content_digest(file)
            form = self._form(tried)
            tried.why_not = not_batched(form)
            answers = self._answers(form, self._split.held, tried.name)
            assert self._judge is not None
            tried.loss = self._judge.loss(answers, self._q.loss)
            if not tried.why_not and not tried.loss.within(self._q.loss):
                tried.why_not = (
                    f"it loses {numeral(tried.loss.points)} points ({tried.loss.by}), and "
                    f"{numeral(self._q.loss)} are accepted"
                )
        except CarpoolError as error:
            tried.why_not = error.message  # perhaps of this moment: another run tries again
            return tried
        self._journal.note(tried.name, tried.document())
        return tried

    def _answers(self, form: Form, places: Sequence[int], name: str) -> list[dict[str, Any]]:
        found = []
        with _opened(form.config, form.version, self._cores) as backend:
            for number, place in enumerate(places, 1):
                self._tell(f"{name}: image {number} of {len(places)}")
                found.append(self._asked.answer(place, backend.run(self._asked.feed(place), ())))
        return found

    def _measure(self, tried: Tried) -> list[Speed]:
        """Measures a form beside the model as it is, whose speed it returns; none for a form that is far
        off."""
        if tried.loss is None or self._is_far_off(tried.loss):
            return []
        known = self._journal.found.get(f"speed of {tried.name}")
        if known is None:
            turns = _FEWER_TURNS if tried.why_not else self._q.turns
            base, speed = measured_beside(
                self._base,
                self._form(tried),
                slo=self._slo,
                cores=self._cores,
                turns=turns,
                prepare_s=self._asked.prepare_s,
                tell=self._tell,
            )
            known = {"base": asdict(base), "speed": asdict(speed)}
            self._journal.note(f"speed of {tried.name}", known)
        tried.speed = _read_speed(known["speed"])
        if not tried.why_not and not self._gains(tried.speed):
            tried.why_not = (
                f"its capacity is {tried.speed.gain:.2f} times that of the model as it is, and at least "
                f"{self._q.least_gain:g} times are worth a version"
            )
        return [_read_speed(known["base"])]

    def _gains(self, speed: Speed) -> bool:
        lower = sorted(speed.gains)[len(speed.gains) // 4]
        return speed.gain >= self._q.least_gain and lower >= _STEADY * self._q.least_gain

    # ---- the decision ---------------------------------------------------------------------------------

    def _result(self, forms: list[Tried], base: Speed | None, doubts: str) -> Optimized:
        good = [form for form in forms if not form.why_not and form.speed is not None]
        best = max(good, key=lambda form: form.speed.gain if form.speed else 0.0, default=None)
        disturbed = next((form.speed.disturbed for form in forms if form.speed and form.speed.disturbed), "")
        if disturbed:
            self._note(
                f"the machine was disturbed ({disturbed}): the ratios were measured in turns, but do not "
                "plan with these capacities"
            )
        key = self._key()
        return Optimized(
            FORMAT,
            self._source.config.name,
            self._version.number,
            "write" if best is not None else "keep",
            _why(best, forms, doubts),
            "" if best is None else best.name,
            self._asked.task,
            round(self._slo * 1e3, 3),
            self._q.loss,
            str(hardware()),
            {name: key[name] for name in ("model", "requests", "calibrating", "held", "labels")},
            key["tools"],
            base,
            forms,
            self._notes,
        )

    def _note(self, words: str) -> None:
        if words and words not in self._notes:
            self._notes.append(words)


def _why(best: Tried | None, forms: Sequence[Tried], doubts: str) -> str:
    if doubts:
        return doubts
    if best is not None and best.speed is not None and best.loss is not None:
        return (
            f"{best.name} sustains {best.speed.gain:.2f} times as much within the SLO, and loses "
            f"{numeral(best.loss.points)} points ({best.loss.by}; 95 %: {numeral(best.loss.low)} to "
            f"{numeral(best.loss.high)})"
        )
    if not forms:
        return "there is no other form that could be tried here"
    fastest = max(forms, key=lambda form: form.speed.gain if form.speed else 0.0)
    return f"no form is cheaper and as good; {fastest.name}: {fastest.why_not}"


def _usual(speeds: Sequence[Speed]) -> Speed | None:
    """Returns the one with the median capacity: the model as it is was measured beside each form."""
    ordered = sorted(speeds, key=lambda speed: speed.capacity)
    return ordered[len(ordered) // 2] if ordered else None


def _seen(found: Examined) -> object:
    """Returns how the server would see pictures and read answers."""
    vision = describe(found.config, found.signature, found.labels, found.seen).vision
    if vision is None:
        return None
    return vision.task, vision.image, vision.table, vision.labels, [one.name for one in vision.outputs]


def _keep_metadata(source: Path | None, file: Path) -> None:
    """Copies what an exporter wrote into the file about its task and classes."""
    import onnx

    assert source is not None
    said = onnx.load(str(source), load_external_data=False).metadata_props
    made = onnx.load(str(file))
    there = {one.key for one in made.metadata_props}
    for one in said:
        if one.key not in there:
            made.metadata_props.add(key=one.key, value=one.value)
    onnx.save(made, str(file))


def _read_tried(known: Mapping[str, Any]) -> Tried:
    given = dict(known)
    given["kept"] = tuple(given["kept"])
    given["loss"] = None if given["loss"] is None else Loss(**given["loss"])
    given["speed"] = None  # it has a line of its own
    return Tried(**given)


def _read_speed(known: Mapping[str, Any]) -> Speed:
    layouts = tuple(
        LayoutCurve(
            one["instances"],
            one["threads"],
            tuple((int(size), float(ms)) for size, ms in one["curve"]),
            one["capacity"],
        )
        for one in known["layouts"]
    )
    return Speed(**{**known, "layouts": layouts, "gains": tuple(known["gains"])})


# ---- the next version


def next_version(folder: Path) -> int:
    """Returns its number. Raises where versions have no folders of their own."""
    numbers = version_folders(folder) if folder.is_dir() else {}
    if not numbers:
        raise InvalidInput(
            f"{folder} has no folder for each version: move the model's file to {folder / '1'}, so that the "
            "next one can be written beside it"
        )
    return max(numbers) + 1


def write_version(folder: Path, number: int, file: Path, reports: Mapping[str, bytes]) -> Path:
    """Writes the files of a form as a version: whole, or not at all."""
    target, unfinished = folder / str(number), folder / f".optimize-{number}"
    shutil.rmtree(unfinished, ignore_errors=True)
    try:
        unfinished.mkdir()
        for path in sorted(file.parent.iterdir()):
            shutil.copyfile(path, unfinished / path.name)
        for name, data in reports.items():
            (unfinished / name).write_bytes(data)
        unfinished.rename(target)
    except OSError as error:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise CarpoolError(f"{target} cannot be written: {error.strerror or error}") from None
    return target
