"""Reads `[rollout]` of model.toml, rollout.toml beside config.pbtxt, and the same as JSON."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

from carpool.config import rules
from carpool.config.model import LatestVersions, ModelConfig
from carpool.config.settings_part import SettingsPart
from carpool.config.table import TomlTable
from carpool.config.toml_text import parse_toml
from carpool.errors import ConfigError
from carpool.extensions.rollout.settings import GuardSettings, KeepSettings, RolloutSettings
from carpool.vision.compare_settings import CompareSettings

ROLLOUT_TOML = "rollout.toml"
NEWEST = "newest"
_DAYS = 366 * 24.0  # hours that a step may last
_MAX_VERSION = 10**18
_MOST_STEPS = 16
_HEADER = re.compile(r"header:([!#$%&'*+\-.^_`|~0-9A-Za-z]{1,64})")


def _read_table(table: TomlTable) -> RolloutSettings:
    """Raises `ConfigError` that names the key."""
    said: dict[str, Any] = {
        "shadow": table.number("shadow", 0, 1),
        "canary": _steps(table),
        **{key: table.number(key, 0, _DAYS) for key in ("shadow_h", "canary_h", "standby_h")},
        "least": table.integer("least", 0, 10**9),
        "sticky": _sticky(table),
        "promote": table.text("promote", ("proven", "by-hand")),
        "fallback": table.switch("fallback"),
        "evaluate": table.inside("evaluate") if table.data.get("evaluate") != "" else None,
        "tolerate": table.number("tolerate", 0, 1),
        "candidate": _candidate(table),
        "guards": _guards(table.table("guards")),
        "compare": _compare(table.table("compare")),
        "keep": _keep(table.table("keep")),
    }
    return replace(RolloutSettings(), **_given(said))


def read_rollout_toml(path: Path) -> RolloutSettings:
    """Reads the file beside a config.pbtxt. Its keys are those of [rollout], with or without that line above
    them."""
    data: Any = parse_toml(rules.read_settings(path), str(path))
    if data.keys() == {"rollout"}:
        data = data["rollout"]
    return _read_table(TomlTable.checked(str(path), "", "rollout", data))


def plan_of(document: Mapping[str, Any], where: str) -> RolloutSettings:
    """Reads JSON: what a request to start one says, or what `as_document` wrote."""
    given = {key: value for key, value in document.items() if value is not None}
    guards = given.get("guards")
    if isinstance(guards, dict):
        given["guards"] = {key: False if value is None else value for key, value in guards.items()}
    return _read_table(TomlTable.checked(where, "", "rollout", given))


def as_document(plan: RolloutSettings) -> dict[str, Any]:
    """Returns the plan as JSON: what `plan_of` reads."""
    document = {**asdict(plan), "canary": list(plan.canary), "candidate": plan.candidate or NEWEST}
    if plan.guards.slower is None:
        del document["guards"]["slower"]  # releases that do not know it read what is kept and shared, too
    return {key: value for key, value in document.items() if value != ""}


def _given(said: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in said.items() if value is not None}


def _candidate(table: TomlTable) -> int | None:
    if isinstance(table.data.get("candidate"), str):
        table.text("candidate", (NEWEST,))
        return None
    return table.integer("candidate", 1, _MAX_VERSION)


def _steps(table: TomlTable) -> tuple[float, ...] | None:
    steps = table.numbers("canary", 0, above=True)
    if steps is None:
        return None
    if len(steps) > _MOST_STEPS:
        raise table.error("canary", f"has {len(steps)} steps, more than {_MOST_STEPS}")
    for before, share in zip((0.0, *steps), steps, strict=False):
        if share >= 1:
            raise table.error(
                "canary", f"takes shares below 1, not {share:g}: the last step, 1, is added automatically"
            )
        if share <= before:
            raise table.error("canary", f"must rise from step to step, not {before:g}, {share:g}")
    return steps


def _sticky(table: TomlTable) -> str | None:
    text = table.text("sticky")
    if text is not None and text.lower() in ("header:traceparent", "header:content-length"):
        # Front ends read the heads that differ in these alone as one.
        raise table.error("sticky", f"cannot be {rules.shown(text)}, which keeps to nothing: write 'request'")
    if text is None or text in ("source", "request") or _HEADER.fullmatch(text):
        return text
    hint = rules.nearest(text, ("source", "request", "header:NAME"))
    raise table.error("sticky", f"cannot be {rules.shown(text)}; {hint}")


def _limit(table: TomlTable, key: str, low: float, high: float) -> float | None:
    """A number, or false for none; `low` itself is left out."""
    if table.data.get(key) is False:
        return None
    default: float | None = getattr(GuardSettings(), key)
    return table.number(key, low, high, above=True) if table.has(key) else default


def _guards(table: TomlTable | None) -> GuardSettings | None:
    if table is None:
        return None
    confidence = table.number("confidence", 0.5, 0.999999)
    return GuardSettings(
        disagreement=_limit(table, "disagreement", 0, 1),
        late=_limit(table, "late", 0, 1e6),
        errors=_limit(table, "errors", 0, 1e6),
        feedback=_limit(table, "feedback", 0, 1e6),
        slower=_limit(table, "slower", 1, 1e6),
        memory_gb=_limit(table, "memory_gb", 0, 1e6),
        confidence=GuardSettings().confidence if confidence is None else confidence,
        on_breach=table.text("on_breach", ("rollback", "pause")) or GuardSettings().on_breach,
    )


def _compare(table: TomlTable | None) -> CompareSettings | None:
    if table is None:
        return None
    shares = {key: table.number(key, 0, 1) for key in ("score", "iou", "mask_iou", "cosine")}
    return replace(CompareSettings(), **_given({**shares, "top_k": table.integer("top_k", 1, 1000)}))


def _keep(table: TomlTable | None) -> KeepSettings | None:
    if table is None:
        return None
    folder = table.text("folder")
    if folder and ("\0" in folder or len(folder) > 4096):
        raise table.error("folder", "must be the path of a folder")
    said = {
        "folder": folder,
        "pictures": table.integer("pictures", 1, 10**6),
        "mb": table.number("mb", 1, 1e6),
    }
    return replace(KeepSettings(), **_given(said))


def _read(top: TomlTable) -> RolloutSettings | None:
    table = top.table("rollout")
    if table is None:
        return None
    settings = _read_table(table)
    if top.has("versions"):
        raise top.error("versions", "does not go with [rollout], which chooses the versions itself")
    return settings


def _read_beside(path: Path, config: ModelConfig) -> RolloutSettings:
    settings = read_rollout_toml(path)
    if config.needs:
        raise ConfigError(
            f"{path}: does not go with ensemble_scheduling, whose versions have the same"
            " steps: roll out the models that are its steps"
        )
    if config.versions != LatestVersions():
        pbtxt = path.with_name("config.pbtxt")
        raise ConfigError(f"{pbtxt}: version_policy does not go with {ROLLOUT_TOML}, which chooses versions")
    return settings


PART = SettingsPart(
    kind=RolloutSettings,
    tables={
        "rollout": (
            *("candidate", "shadow", "canary", "shadow_h", "canary_h", "standby_h", "least", "sticky"),
            *("promote", "fallback", "evaluate", "tolerate", "guards", "compare", "keep"),
        ),
        "rollout.guards": tuple(each.name for each in fields(GuardSettings)),
        "rollout.compare": tuple(each.name for each in fields(CompareSettings)),
        "rollout.keep": tuple(each.name for each in fields(KeepSettings)),
    },
    read=_read,
    beside=_read_beside,
    reloads=False,
)
