"""Keeps what a compiler made for one model, and the profile measured with it, in one file that other servers
use.

    magic, length of the head, head (JSON: key, sizes, profile, parts), then the parts: torch's own artifacts

A file is used where its key says that it was made of the same weights and code, with the same settings, for
the same torch, CUDA and chip. Any other is named in the log and ignored, and so is one that is damaged.
Artifacts are code: a file beside a model is opened only where the model's own code is run from there, and one
in the cache folder only if no other user could have written it."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from carpool.backends.backend import CompiledSize
from carpool.config.fingerprint import COMPILED
from carpool.config.model import ModelConfig
from carpool.config.regular_file import open_regular
from carpool.config.repository import ModelVersion
from carpool.engine.profile.measuring import Point
from carpool.engine.profile.model_profile import Key, Profile, key_text, profile_key, read_profile
from carpool.engine.profile.whole_file import write_whole
from carpool.link.typed_json import as_json
from carpool.observe.logs import logger

log = logger("engine")
_MAGIC = b"carpool compiled 1\n"
_LENGTH = struct.Struct("<Q")
_MOST_HEAD = 1 << 20
_MOST_BYTES = 4 << 30
_MOST_FILES = 64  # in one folder that are looked at
_OTHERS_WRITE = 0o022


@dataclass(frozen=True, slots=True)
class CompiledFile:
    """Describes a compiled file that was checked."""

    path: Path
    sizes: tuple[int, ...]  # that were compiled
    profile: Profile | None  # None: it was measured on another machine, or with another SLO
    parts: tuple[bytes, ...]


def compiled_key(config: ModelConfig, version: ModelVersion) -> Key | None:
    """Returns what compiled code follows from: all of a profile's but the SLO, the instances and the
    processors."""
    key = profile_key(config, version)
    if key is None or key["settings"]["pytorch"] is None:
        return None
    settings = {name: key["settings"][name] for name in ("max_batch", "tensors", "pytorch")}
    if settings["pytorch"]["compile"] == "before-ready":  # the same code, at another time
        settings["pytorch"] = {**settings["pytorch"], "compile": "default"}
    return {"format": 1, "model": key["model"], "backend": key["backend"], "settings": settings}


def places(config: ModelConfig, version: ModelVersion, cache_dir: Path | None) -> Iterator[Path]:
    """Folders that may be trusted with code: see above."""
    if cache_dir is not None:
        yield cache_dir / "compiled"
    if version.file is not None and config.pytorch.module is not None:
        yield version.file.parent


def find_compiled(
    config: ModelConfig, version: ModelVersion, key: Key, profile: Key | None, cache_dir: Path | None
) -> CompiledFile | None:
    """The first that fits; those that do not are named. `profile` is the key that its profile must have."""
    own = None if cache_dir is None else cache_dir / "compiled"
    for folder in places(config, version, cache_dir):
        with suppress(OSError):
            if folder == own:  # of all models: only the one that has the right name
                files = [file for file in (folder / name_of(key),) if file.exists()]
            else:
                files = sorted(folder.glob(f"*{COMPILED}"))[:_MOST_FILES]
            for file in files:
                found = _checked(file, key, profile, config.name, private=folder == own)
                if found is not None:
                    return found
    return None


def _checked(file: Path, key: Key, profile: Key | None, model: str, *, private: bool) -> CompiledFile | None:
    try:
        if private:
            _check_private(file)
        return _read(file, key, profile)
    except (OSError, ValueError, KeyError, TypeError, RecursionError, struct.error) as error:
        log.warning("compiled-ignored", model=model, file=str(file), why=str(error) or type(error).__name__)
        return None


def _check_private(file: Path) -> None:
    for path in (file, file.parent):
        seen = path.stat()
        if seen.st_uid != os.geteuid() or seen.st_mode & _OTHERS_WRITE:
            raise ValueError("others can write there, and artifacts are code")


def _read(file: Path, key: Key, profile_key: Key | None) -> CompiledFile:
    if not len(_MAGIC) < file.stat().st_size <= _MOST_BYTES:
        raise ValueError("it has not the size of such a file")
    with open_regular(file) as opened:
        if opened.read(len(_MAGIC)) != _MAGIC:
            raise ValueError("it is no file of compiled artifacts")
        (length,) = _LENGTH.unpack(opened.read(_LENGTH.size))
        if length > _MOST_HEAD:
            raise ValueError("its head is too long")
        head = json.loads(opened.read(length))
        if head["key"] != json.loads(key_text(key)):
            raise ValueError(f"it was made for {_difference(head['key'], json.loads(key_text(key)))}")
        parts = []
        for part in head["parts"]:
            data = opened.read(int(part["bytes"]))
            if sha256(data).hexdigest() != part["sha256"]:
                raise ValueError("it is damaged: a digest does not fit")
            parts.append(data)
    said = head["profile"]
    same = said is not None and profile_key is not None and said["key"] == json.loads(key_text(profile_key))
    sizes = tuple(int(size) for size in head["sizes"])
    return CompiledFile(file, sizes, read_profile(said["profile"]) if same else None, tuple(parts))


def _difference(theirs: Any, ours: Any, where: str = "") -> str:
    """Returns the first place in which two keys differ, in words."""
    if isinstance(theirs, Mapping) and isinstance(ours, Mapping):
        for name in (*ours, *(set(theirs) - set(ours))):
            if theirs.get(name) != ours.get(name):
                return _difference(theirs.get(name), ours.get(name), f"{where} {name}".strip())
    return f"another {where or 'key'}: {str(theirs)[:80]}, and here it is {str(ours)[:80]}"


def compiled_point(plain: Point, found: Sequence[CompiledSize]) -> Point | None:
    """What a batch takes when it is compiled, by what its device was seen to save for every instance that it
    may have to wait for; None: nothing was timed."""
    timed = [one for one in found if one.before and one.after]
    if not timed:
        return None
    before, after = min(one.before for one in timed), min(one.after for one in timed)
    saved = len(found) * (before - after)
    return replace(plain, seconds=max(plain.seconds * min(1.0, after / before), plain.seconds - saved))


def name_of(key: Key) -> str:
    return f"{sha256(key_text(key).encode()).hexdigest()[:24]}{COMPILED}"


def write_compiled(
    folder: Path,
    key: str,
    sizes: Sequence[int],
    parts: Sequence[bytes],
    profile: Profile | None = None,
    profile_key: str = "",
) -> Path:
    """Writes the whole file at once. The keys are those of `key_text`. Raises OSError."""
    said = None if profile is None else {"key": json.loads(profile_key), "profile": as_json(profile)}
    listed = [{"bytes": len(part), "sha256": sha256(part).hexdigest()} for part in parts]
    about = {"key": json.loads(key), "sizes": list(sizes), "profile": said, "parts": listed}
    head = json.dumps(about).encode()
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    file = folder / name_of(json.loads(key))
    write_whole(file, (_MAGIC + _LENGTH.pack(len(head)) + head, *parts))
    return file


def saved_artifacts() -> bytes | None:
    """Returns what torch's compiler made in this process, or took from its cache; None: nothing."""
    import torch

    saved = torch.compiler.save_cache_artifacts()
    return None if saved is None else saved[0]


def load_artifacts(parts: Sequence[bytes]) -> None:
    """Loads them into the compiler's caches, for this process and those after it."""
    import torch

    for part in parts:
        torch.compiler.load_cache_artifacts(part)
