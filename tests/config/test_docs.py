"""docs/configuration.md is the reference, so nothing may be missing from it."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from absent import in_whole_server
from carpool.config.server import ServerSettings, variables
from carpool.config.table import every_key
from carpool.config.toml import toml_config
from carpool.config.triton import UNSUPPORTED
from carpool.wire.proto import message_class

TEXT = (Path(__file__).parents[2] / "docs" / "configuration.md").read_text("utf-8")


def test_every_key_of_model_toml() -> None:
    missing = [
        (section, key) for section, keys in every_key().items() for key in keys if not names(section, key)
    ]
    assert missing == []


def names(section: str, key: str) -> bool:
    """Whether the page has it."""
    if section == "" and key in every_key():
        return re.search(rf"`(\[\[?)?{key}(\]\]?)?`", TEXT) is not None
    return f"`{key}`" in TEXT or f"[{key}]" in TEXT


@in_whole_server
@in_whole_server
def test_every_variable_and_its_default() -> None:
    rows = dict(re.findall(r"^\| `(CARPOOL_\w+)` \| ([^|]+?) \|", TEXT, re.MULTILINE))
    assert rows.keys() == variables().keys()
    for variable, name in variables().items():
        default = getattr(ServerSettings(), name)
        if default not in (None, "", ()):
            shown = f"{default:g}" if isinstance(default, float) else str(default)
            assert rows[variable].strip("`").lower() == shown.lower(), variable


def test_every_field_of_config_pbtxt() -> None:
    for name in ("ModelConfig", "ModelInput", "ModelOutput", "ModelInstanceGroup"):
        for key in message_class(name).DESCRIPTOR.fields_by_name:
            assert f"`{key}`" in TEXT, f"{name}.{key}"
    assert all(path.rpartition(".")[2] in TEXT for path in UNSUPPORTED)


@in_whole_server
def test_every_example_loads() -> None:
    examples = re.findall(r"^```toml\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
    assert len(examples) >= 3
    for example in examples:
        assert tomllib.loads(example)
        toml_config(example, Path("models/m/model.toml"))
