"""Reads `pipeline.toml`, or raises an error that names the file, the line and the nearest key.

The file is a user's: how many steps there are, how many crops a picture becomes and how large it is kept are
all bounded here, before anything is loaded for it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from carpool.config import rules
from carpool.config.known_keys import extension_of
from carpool.config.model import Mode, ModelConfig, ModelStep, TensorConfig, VersionPolicy, eager_policy
from carpool.config.settings_part import SettingsPart, TritonPart, why_not
from carpool.config.table import TomlTable
from carpool.config.toml import MAX_VERSION, read_versions
from carpool.config.toml_text import parse_toml
from carpool.core.objectives import FixedBatching, Promise
from carpool.errors import ConfigError
from carpool.extensions import installed
from carpool.extensions.pipelines.settings import (
    LATE,
    MOST_CROPS,
    MOST_STEPS,
    MOST_WIDTHS,
    NAME,
    PARTS,
    REFUSE,
    REGIONS,
    CropSettings,
    EscalateSettings,
    PipelineSettings,
    PipelineStep,
    StepKeepSettings,
    pipeline_settings,
)

PIPELINE_TOML = "pipeline.toml"
PIPELINE = "pipeline"
"""The platform, and what stands for a backend."""
_CASCADES = "cascades"
"""The extension that runs a step with `escalate`."""

KEYS: Mapping[str, tuple[str, ...]] = {
    "": ("slo_ms", "slo_may_grow", "keep_px", "versions", "step", "answer"),
    "step": ("name", "model", "version", "keep", "each", "crop", "escalate"),
    "step.keep": ("labels", "score", "most"),
    "step.crop": ("pad", "square", "least", "rectify", "height", "widths", "stretch"),
    "step.escalate": ("from", "by", "below"),
    "answer": ("from", "attach", "if_late", "under_load"),
}
"""Every key, by table; the tests hold the reference in docs/ against this list."""

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,31}")
_RESERVED = frozenset(
    [
        "angle",
        "answered_by",
        "box",
        "class_id",
        "classes",
        "corners",
        "degraded",
        "detections",
        "escalated",
        "image",
        "keypoints",
        "label",
        "late",
        "lines",
        "model",
        "polygon",
        "regions",
        "score",
        "steps",
        "text",
        "version",
    ]
)
"""What answers have anyway."""
_HEADER = re.compile(r"\s*(\[\[?)\s*([^\]]+?)\s*\]")
_KEY = re.compile(r'\s*"?([A-Za-z0-9_-]+)"?\s*=')


class _Lines:
    """Knows where things stand in the file: what reads TOML does not say."""

    def __init__(self, text: str) -> None:
        self._found: dict[tuple[str, str], int] = {}
        table, step = "", -1
        for number, line in enumerate(text.splitlines(), 1):
            header, key = _HEADER.match(line), _KEY.match(line)
            if header is not None:
                step += header[1] == "[[" and header[2] == "step"
                table = re.sub(r"^step\b", f"step[{step}]", header[2])
                self._found.setdefault((table, ""), number)
            elif key is not None:
                self._found.setdefault((table, key[1]), number)

    def at(self, path: str, key: str) -> int:
        """Returns the line of the key, or of the table that it should be in."""
        owner, _, inner = path.rpartition(".")
        places = ((path, key), (owner, inner), (path, ""), (owner, ""))
        return next((self._found[place] for place in places if place in self._found), 1)


@dataclass(frozen=True, slots=True)
class _LinedTable(TomlTable):
    """Represents a table whose messages say the line."""

    lines: _Lines

    def where(self, key: str) -> str:
        return f"{self.file_at(key)}: {self.name(key)}"

    def file_at(self, key: str) -> str:
        return f"{self.file}:{self.lines.at(self.path, key)}"

    def part(self, key: str) -> _LinedTable:
        """What is not there says nothing."""
        section = f"{self.section}.{key}" if self.section else key
        return _part(self.file, self.name(key), section, self.data.get(key, {}), self.lines)


def _part(file: str, path: str, section: str, data: object, lines: _Lines) -> _LinedTable:
    if not isinstance(data, dict):
        raise ConfigError(f"{file}:{lines.at(path, '')}: {path} must be a table")
    table = _LinedTable(file, path, section, data, lines)
    for key in data:
        other = extension_of(key) if not section else None
        if other is not None and other.name in installed()[NAME].meets:
            raise ConfigError(f"{table.file_at(key)}: {why_not(NAME, other.name, key)}")
        if key not in KEYS[section]:
            raise ConfigError(f"{table.where(key)} is unknown; {rules.nearest(key, KEYS[section])}")
    return table


def read_pipeline(path: Path, name: str) -> ModelConfig:
    """Returns the settings of the pipeline in this file, which has its folder's name."""
    return pipeline_config(rules.read_settings(path), path, name)


def pipeline_config(text: str, path: Path, name: str) -> ModelConfig:
    data = parse_toml(text, str(path))
    top = _part(str(path), "", "", data, _Lines(text))
    slo_ms = top.number("slo_ms", 0, 1e7, above=True)
    policy: Promise | FixedBatching = eager_policy() if slo_ms is None else Promise(slo_ms / 1e3, 1)
    may_grow = top.flag("slo_may_grow")
    if may_grow and slo_ms is None:
        raise top.error("slo_may_grow", "needs slo_ms: without an SLO there is nothing to raise")
    versions: VersionPolicy = read_versions(top)
    settings = _settings(top, name)
    extra: dict[str, object] = {NAME: settings}
    escalates = [step.escalate for step in settings.steps if step.escalate is not None]
    if escalates:
        extra[_CASCADES] = escalates[0]
    return ModelConfig(
        name=rules.check_name(name, str(path)),
        path=path.parent,
        backend=PIPELINE,
        inputs=(TensorConfig("image", "BYTES", (1,)),),
        outputs=(TensorConfig("answer", "BYTES", (1,)),),
        max_batch=0,
        mode=Mode.EAGER if slo_ms is None else Mode.PROMISE,
        policy=policy,
        slo_may_grow=may_grow,
        versions=versions,
        steps=tuple(
            ModelStep(step.model, step.version, settings.at(number))
            for number, step in enumerate(settings.steps)
        ),
        extra=extra,
    )


def _settings(top: _LinedTable, name: str) -> PipelineSettings:
    listed = top.data.get("step", [])
    if not isinstance(listed, list) or not 1 <= len(listed) <= MOST_STEPS:
        many = len(listed) if isinstance(listed, list) else "no list"
        raise top.error("step", f"must be 1 to {MOST_STEPS} tables [[step]], not {many}")
    tables = [_part(top.file, f"step[{n}]", "step", each, top.lines) for n, each in enumerate(listed)]
    steps = tuple(_step(table, name) for table in tables)
    names = [step.name for step in steps]
    for table, step in zip(tables, steps, strict=True):
        if names.count(step.name) > 1:
            raise table.error("name", f"{rules.shown(step.name)} is given twice")
        if step.each is not None and step.each[0] not in names:
            said = f"there is no step {rules.shown(step.each[0])}; {rules.nearest(step.each[0], names)}"
            raise table.error("each", said)
    _check_order(tables, steps)
    big = _check_cascade(tables, steps)
    answer = top.part("answer")
    settings = PipelineSettings(
        top.file,
        steps,
        _answer(answer, steps, big),
        answer.text("if_late", LATE) or REFUSE,
        answer.text("under_load", [REFUSE, *names]) or REFUSE,
        top.integer("keep_px", 64, 4096) or 1600,
    )
    if settings.under_load != REFUSE and (big is None or settings.under_load != settings.answer[-1]):
        cheap = "a step with escalate" if big is None else f"to be {REFUSE} or {settings.answer[-1]}"
        raise answer.error("under_load", f"needs {cheap}")
    _check_attached(answer, steps, settings.answer)
    return settings


def _step(table: _LinedTable, pipeline: str) -> PipelineStep:
    name, model = table.text("name"), table.text("model")
    if not name or not model:
        raise table.error("name" if not name else "model", "is missing")
    if not _NAME.fullmatch(name) or name in _RESERVED:
        why = (
            "is already a field of responses"
            if name in _RESERVED
            else "must be a letter, then letters and digits"
        )
        raise table.error("name", f"{rules.shown(name)} {why}")
    if model == pipeline:
        raise table.error("model", f"{rules.shown(model)} is the pipeline itself")
    each = _each(table)
    if each is None and table.has("crop"):
        raise table.error("crop", 'needs each, like "find.boxes": without it a step sees the whole image')
    return PipelineStep(
        name,
        model,
        table.integer("version", 1, MAX_VERSION) or -1,
        _keep(table.part("keep")),
        each,
        _crop(table.part("crop"), each),
        _escalate(table.part("escalate")) if table.has("escalate") else None,
        table.lines.at(table.path, "model"),
    )


def _each(table: _LinedTable) -> tuple[str, str] | None:
    text = table.text("each")
    if text is None:
        return None
    step, dot, parts = text.partition(".")
    if not dot or not step or parts not in PARTS:
        said = " or ".join(f'"STEP.{known}"' for known in PARTS)
        raise table.error("each", f"must be {said}, not {rules.shown(text)}")
    return step, parts


def _keep(table: _LinedTable) -> StepKeepSettings:
    usual = StepKeepSettings()
    labels = table.texts("labels")
    if table.has("labels") and not labels:
        raise table.error("labels", "is empty: leave it out to keep all")
    score = table.number("score", 0, 1)
    most = table.integer("most", 1, MOST_CROPS)
    return StepKeepSettings(labels, usual.score if score is None else score, most or usual.most)


def _crop(table: _LinedTable, each: tuple[str, str] | None) -> CropSettings:
    usual = CropSettings()
    rectify = table.flag("rectify")
    for key in ("height", "widths", "stretch") if not rectify else ("pad", "square", "least"):
        if table.has(key):
            said = "needs rectify = true" if not rectify else "does not go with rectify"
            raise table.error(key, said)
    if rectify and each is not None and each[1] != REGIONS:
        raise table.error("rectify", f'needs quadrilaterals: each = "{each[0]}.{REGIONS}"')
    widths = table.integers("widths", 8, 4096)
    if widths is not None and not 1 <= len(set(widths)) <= MOST_WIDTHS:
        raise table.error("widths", f"must be 1 to {MOST_WIDTHS} numbers of pixels")
    return CropSettings(
        table.number("pad", 0, 2) or 0.0,
        table.flag("square"),
        table.integer("least", 1, 1024) or usual.least,
        rectify,
        table.integer("height", 8, 1024) or usual.height,
        tuple(sorted(set(widths))) if widths else usual.widths,
        table.number("stretch", 0.5, 2) or usual.stretch,
    )


def _escalate(table: _LinedTable) -> EscalateSettings:
    source, by = table.text("from"), table.text("by", ("margin", "confidence", "entropy"))
    below = table.number("below", 0, 1)
    if source is None or by is None or below is None:
        missing = [key for key, value in (("from", source), ("by", by), ("below", below)) if value is None]
        raise table.error(missing[0], "is missing")
    return EscalateSettings(source, by, below)


def _check_cascade(tables: list[_LinedTable], steps: tuple[PipelineStep, ...]) -> PipelineStep | None:
    """A cascade is a cheap model and a big one that see the whole picture. Returns the big one's step."""
    asked = [(table, step) for table, step in zip(tables, steps, strict=True) if step.escalate is not None]
    if not asked:
        return None
    table, big = asked[0]
    if _CASCADES not in installed():
        raise table.error("escalate", f"needs the extension {_CASCADES}, which is not installed")
    assert big.escalate is not None
    others = [step.name for step in steps if step is not big]
    if big.escalate.source not in others:
        said = f"there is no other step {rules.shown(big.escalate.source)}; "
        raise table.part("escalate").error("from", said + rules.nearest(big.escalate.source, others))
    if len(steps) != 2 or len(asked) > 1 or any(step.each is not None for step in steps):
        raise table.error("escalate", "needs two steps, a cheap and a large one, that see the whole image")
    return big


def _check_order(tables: list[_LinedTable], steps: tuple[PipelineStep, ...]) -> None:
    """Every step waits for another one until, in the end, one sees the whole picture."""
    waits = {step.name: step.each[0] for step in steps if step.each is not None}
    for table, step in zip(tables, steps, strict=True):
        way = [step.name]
        while way[-1] in waits:
            way.append(waits[way[-1]])
            if way[-1] in way[:-1]:
                raise table.error("each", f"goes round in a circle: {' → '.join(way)}")


def _answer(table: _LinedTable, steps: tuple[PipelineStep, ...], big: PipelineStep | None) -> tuple[str, ...]:
    """Returns the step whose answer is the pipeline's. It sees the whole picture; default: the first such
    step. Of a cascade, it is the big model's answer if there is one, and else the cheap one's."""
    whole = [step.name for step in steps if step.each is None]
    text = table.text("from")
    if big is not None and big.escalate is not None:
        either = (big.name, big.escalate.source)
        if text not in (None, " or ".join(either)):
            raise table.error("from", f'must be "{" or ".join(either)}" in a cascade')
        return either
    if text is None:
        return (whole[0],)
    names = text.split(" or ")
    for name in names:
        if name not in whole:
            raise table.error("from", f"{rules.shown(name)} cannot be it; {rules.nearest(name, whole)}")
    if len(names) > 1:
        raise table.error("from", f"{rules.shown(text)} needs a step with escalate")
    return tuple(names)


def _check_attached(table: _LinedTable, steps: tuple[PipelineStep, ...], answer: tuple[str, ...]) -> None:
    """`attach` may say what goes where: to the parts that a step was asked about, which is where it goes
    anyway, or to the whole answer."""
    data: Any = table.data.get("attach", {})
    if not isinstance(data, dict):
        raise table.error("attach", 'must be like { kind = "find.boxes" }')
    known = {step.name: ".".join(step.each) if step.each else answer[0] for step in steps}
    for name, where in data.items():
        if name not in known or name in answer:
            raise table.error(
                "attach", f"{rules.shown(name)} cannot be attached; {rules.nearest(name, known)}"
            )
        if where != known[name]:
            raise table.error(
                "attach", f'{name} belongs to "{known[name]}", not to {rules.shown(str(where))}'
            )


def pipeline_document(settings: PipelineSettings) -> dict[str, Any]:
    """Returns the settings for clients that read a model's settings."""
    return {
        "step": [
            {
                "name": step.name,
                "model": step.model,
                "version": step.version,
                "each": ".".join(step.each) if step.each else "",
            }
            for step in settings.steps
        ],
        "answer": {"from": " or ".join(settings.answer), "if_late": settings.if_late},
    }


def _document(config: ModelConfig) -> Mapping[str, object]:
    """Triton's settings have no words for a pipeline: it is a parameter, in JSON."""
    settings = pipeline_settings(config)
    if settings is None:
        return {}
    shown = {**config.parameters, PIPELINE: json.dumps(pipeline_document(settings))}
    return {"parameters": {key: {"string_value": value} for key, value in shown.items()}}


PART = SettingsPart(kind=PipelineSettings, model=read_pipeline, triton=TritonPart(document=_document))
