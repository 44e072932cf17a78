"""Artifacts of compiled models in the place where replicas share profiles: a fleet compiles a model once.

Artifacts are code, and a client that can write to that place is not for that reason trusted with code. So a
file there begins with a digest that only holders of the servers' secret can make. The digest is checked
before anything else is read, and only for models whose own code is run. What was checked is copied into the
cache folder, where no other user can write, and is found there like any other file (`compiled_file.py`)."""

from __future__ import annotations

import hmac
from hashlib import sha256
from pathlib import Path

from carpool.config.fingerprint import COMPILED
from carpool.config.regular_file import read_regular
from carpool.engine.profile.model_profile import ProfileStore
from carpool.engine.profile.profile_folder import ProfileFolder, SharedFiles
from carpool.engine.profile.shared_profiles import FILE, PatientFiles, ProfileBucket
from carpool.engine.profile.whole_file import keep_newest, write_whole
from carpool.observe.logs import logger

log = logger("engine")
MOST_BYTES = 1 << 29
_BUDGET_BYTES = 4 << 30  # of a folder; a bucket has rules of its own for what is old
_WAIT_S = 30.0
_KEPT = 32  # in a cache folder: of models that were loaded last
_MAGIC = b"carpool shared artifacts 1\n"
_DIGEST_BYTES = sha256().digest_size
_SHORTEST_SECRET = 16


class SharedArtifacts:
    """Nothing that goes wrong with them keeps a model from being served: it is compiled here then."""

    def __init__(self, place: SharedFiles, secret: str) -> None:
        self._place = place
        self._secret = secret.encode()

    @classmethod
    def of(cls, setting: str, secret: str) -> SharedArtifacts:
        """Returns those of the setting `shared_profiles`, where `why_not_shared` says nothing."""
        place: SharedFiles
        if setting.startswith(FILE):
            folder = Path(setting.removeprefix(FILE)) / "compiled"
            place = ProfileFolder(folder, COMPILED, MOST_BYTES, budget=_BUDGET_BYTES)
        else:
            place = ProfileBucket(setting, MOST_BYTES)
        return cls(PatientFiles(place, _WAIT_S), secret)

    def fetch(self, name: str, cache_dir: Path, model: str) -> bool:
        """Fetches it into the cache folder, if it is there and was written by one of these servers."""
        try:
            data = self._place.read(name)
            if data is None:
                return False
            content, folder = self._checked(name, data), cache_dir / "compiled"
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            write_whole(folder / name, (content,))
            keep_few(folder)  # a replica that only fetches never writes, and would not tidy it otherwise
        except (OSError, ValueError) as error:
            log.warning("compiled-ignored", model=model, file=f"{self._place.where}/{name}", why=str(error))
            return False
        return True

    def share(self, file: Path, model: str) -> None:
        try:
            data = read_regular(file, MOST_BYTES - len(_MAGIC) - _DIGEST_BYTES)
            self._place.write(file.name, _MAGIC + self._digest(file.name, data) + data)
        except (OSError, ValueError) as error:
            log.warning("compiled-not-shared", model=model, file=str(file), error=str(error))
        else:
            log.info("compiled-shared", model=model, file=f"{self._place.where}/{file.name}")

    def _digest(self, name: str, data: bytes) -> bytes:
        return hmac.digest(self._secret, b"artifacts " + name.encode() + b"\0" + data, "sha256")

    def _checked(self, name: str, data: bytes) -> bytes:
        if len(data) > MOST_BYTES:
            raise ValueError(f"it has more than {MOST_BYTES >> 20} MiB")
        begin = len(_MAGIC) + _DIGEST_BYTES
        content = data[begin:]
        if not data.startswith(_MAGIC) or not hmac.compare_digest(
            data[len(_MAGIC) : begin], self._digest(name, content)
        ):
            raise ValueError("it was not written with the secret of these servers, and artifacts are code")
        return content


def why_not_shared(setting: str, secret: str) -> str:
    """Why a place for profiles holds no artifacts; empty: it does."""
    if setting.startswith(("redis", "unix")):
        return (
            "a Redis server holds profiles, and not artifacts of many megabytes: name a folder or a bucket "
            "in shared_profiles, or put what carpool compile writes beside the model"
        )
    if len(secret) < _SHORTEST_SECRET:
        return (
            "artifacts are code, and without a secret their writer is unknown: give all servers the "
            f"same cache_secret of {_SHORTEST_SECRET} characters or more"
        )
    return ""


def artifacts_of(profiles: ProfileStore | None) -> tuple[SharedArtifacts | None, str]:
    """Returns the artifacts where servers share profiles; or None, and why there are none. Empty: servers
    share no profiles."""
    if profiles is None or not profiles.place:
        return None, ""
    why = why_not_shared(profiles.place, profiles.secret)
    return (None, why) if why else (SharedArtifacts.of(profiles.place, profiles.secret), "")


def keep_few(folder: Path) -> None:
    """Keeps the artifacts of a cache folder that were compiled or fetched last."""
    keep_newest(folder, COMPILED, _KEPT)
