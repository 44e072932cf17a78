"""Lists the keys that a model.toml may have: the server's own by table, and those of extensions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from functools import cache
from typing import Any

from carpool.config import model, rules
from carpool.errors import ConfigError
from carpool.extension import Extension
from carpool.extensions import installed

SECTIONS: Mapping[str, type[Any]] = {
    "image": model.ImageSettings,
    "detect": model.DetectSettings,
    "classify": model.ClassifySettings,
    "segment": model.SegmentSettings,
    "pose": model.PoseSettings,
    "obb": model.ObbSettings,
    "depth": model.DepthSettings,
    "anomaly": model.AnomalySettings,
    "embed": model.EmbedSettings,
    "text_regions": model.TextRegionsSettings,
    "read": model.ReadSettings,
    "fake": model.FakeSettings,
    "onnxruntime": model.OnnxruntimeSettings,
    "pytorch": model.PytorchSettings,
}
"""The tables whose keys are the fields of these."""

# The server's own keys of model.toml, by table. With those of extensions: `every_key`.
KEYS: Mapping[str, tuple[str, ...]] = {
    table: tuple(keys.split())
    for table, keys in {
        "": (
            "name backend file task preset slo_ms slo_may_grow max_batch instances "
            "versions labels execution_timeout_ms decoupled max_open device_weight batching "
            "image detect classify segment pose obb depth anomaly embed text_regions read "
            "fake onnxruntime pytorch parameters input output"
        ),
        "instances": "count kind gpus",
        "versions": "latest",
        "batching": (
            "max_delay_ms preferred preserve_ordering priorities max_queue_size timeout_ms "
            "timeout_action allow_timeout_override level"
        ),
        "batching.priorities": "levels default",
        "batching.level": "max_queue_size timeout_ms timeout_action allow_timeout_override",
        **{name: " ".join(key.name for key in fields(kind)) for name, kind in SECTIONS.items()},
        "input": "name datatype shape reshape optional layout",
        "output": "name datatype shape reshape labels",
    }.items()
}


@cache
def owners() -> Mapping[str, Extension]:
    """Returns the extensions by the keys that they own at the top of a file; each key has one owner."""
    found: dict[str, Extension] = {}
    for extension in installed().values():
        for key in extension.owns:
            if key in KEYS[""] or key in found:
                raise ConfigError(
                    f"the extension {extension.name} cannot own {rules.shown(key)}: it is taken"
                )
            found[key] = extension
    return found


def extension_of(key: str) -> Extension | None:
    """Returns the extension that a key at the top of a file asks for."""
    return owners().get(key) or next((one for one in installed().values() if key in one.fields), None)
