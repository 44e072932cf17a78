"""Settings of extensions: when their modules are imported, and what their manifests have to agree about."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from absent import ABSENT, needs
from carpool.config import known_keys
from carpool.config.known_keys import extension_of
from carpool.config.toml import toml_config
from carpool.errors import ConfigError
from carpool.extension import Extension
from carpool.extensions import installed

READ = """
import sys
from pathlib import Path
from carpool.config.repository import find_models
from carpool.config.toml import toml_config
toml_config({text!r}, Path("m/model.toml"))
find_models([Path({folder!r})])
print(*(name for name in sys.modules if name.count(".") > 2 and name.startswith("carpool.extensions.")))
"""


def loaded(text: str, folder: Path) -> set[str]:
    code = READ.format(text=text, folder=str(folder))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return {name.split(".")[2] for name in done.stdout.split()}


@needs("cache")
@needs("cache")
def test_settings_are_imported_where_their_keys_stand(tmp_path: Path) -> None:
    (tmp_path / "m" / "1").mkdir(parents=True)
    (tmp_path / "m" / "1" / "model.onnx").write_bytes(b"")
    (tmp_path / "m" / "config.pbtxt").write_text("max_batch_size: 4 dynamic_batching { }")
    assert loaded("slo_ms = 50", tmp_path) == set()
    assert loaded("[cache]\nttl_s = 5", tmp_path) == {"cache"}


@needs("cache")
@needs("cache")
def test_a_key_has_one_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    for key in ("slo_ms", "cache"):
        both = {**installed(), "mine": Extension(name="mine", owns=(key,))}
        monkeypatch.setattr(known_keys, "installed", lambda both=both: both)
        known_keys.owners.cache_clear()
        with pytest.raises(ConfigError, match=f'the extension mine cannot own "{key}"'):
            known_keys.owners()
    known_keys.owners.cache_clear()


@pytest.mark.parametrize("extension", installed().values(), ids=list(installed()))
def test_what_a_manifest_says_of_settings(extension: Extension) -> None:
    asks = (extension.owns, extension.triton, extension.file, extension.beside)
    assert extension.settings or not any(asks)
    for other, why in extension.meets.items():
        assert other.partition(".")[0] in {*installed(), *ABSENT}, "nobody can ask for it"
        assert why
    for key in extension.owns:
        assert extension_of(key) is extension


@needs("cache", "text")
@needs("cache")
def test_what_does_not_go_together_names_the_key() -> None:
    with pytest.raises(ConfigError, match=r"model\.toml: response_cache does not go with \[generate\]"):
        toml_config("response_cache = true\n[generate]", Path("m/model.toml"))
