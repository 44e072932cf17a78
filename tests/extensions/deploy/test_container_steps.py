"""The steps of the Dockerfile, performed in a plain folder: it copies, builds, installs, and then starts.

No image is built. Absolute paths of the image lie under one folder here, so that what a later stage copies
from an earlier one stays where it was made, as in an image. Left out: the base image itself (its Python is
that of the tests), packages of the system, and making the user. Its number the server has where the tests run
as root with a Python that everybody may run.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import pytest

from carpool.config.server import variables
from extensions.deploy.manifests import DEPLOY

ROOT = DEPLOY.parent
FILES = [DEPLOY / "container" / name for name in ("Dockerfile", "Dockerfile.cuda")]
OF_THE_IMAGE = ("apt-get ", "groupadd ", "useradd ", "rm -rf /var/lib/apt/", "install -d ")
SECONDS = 300


def instructions(file: Path) -> list[tuple[str, str]]:
    """Each with its word and the rest, on one line."""
    lines = [line for line in file.read_text().splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [(word, rest) for word, _, rest in (line.partition(" ") for line in joined.splitlines() if line)]


class Image:
    """A folder that stands for the image's /."""

    def __init__(self, folder: Path, arguments: dict[str, str]) -> None:
        self.root = folder / "image"
        self.settings: dict[str, str] = {}  # ENV of the stage
        self.last: dict[str, str] = {}  # of each instruction that is there once
        self._folder = folder
        self._arguments = arguments
        self._stages: dict[str, Path] = {}
        self._stage = self._at = ""
        self.left_out: list[str] = []

    def here(self, path: str) -> Path:
        return self.root / str(PurePosixPath(self._at, path)).lstrip("/")

    def perform(self, word: str, rest: str) -> None:
        step = getattr(self, f"_{word.lower()}", None)
        if step is not None:
            step(rest)
        self.last[word] = rest

    def _from(self, rest: str) -> None:
        if self._stage:
            self._stages[self._stage] = self._folder / f"stage-{len(self._stages)}"
            self.root.rename(self._stages[self._stage])
        self._stage = rest.partition(" AS ")[2] or "image"
        self._at, self.settings = "/", {}
        self.root.mkdir(mode=0o755)

    def _workdir(self, rest: str) -> None:
        self._at = rest
        self.here("").mkdir(parents=True, exist_ok=True)

    def _env(self, rest: str) -> None:
        for name, value in (part.split("=", 1) for part in shlex.split(rest)):
            self.settings[name] = self.mapped(value.replace("$PATH", os.environ["PATH"]))

    def _arg(self, rest: str) -> None:
        name, value = rest.split("=", 1)
        self.settings[name] = self._arguments.get(name, value)

    def _copy(self, rest: str) -> None:
        words = rest.split()
        start = self._stages[words.pop(0).partition("=")[2]] if words[0].startswith("--from=") else None
        *names, into = words
        for name in names:
            if start is not None:
                assert name == into, "what is moved within an image would not be where it was made"
                shutil.copytree(start / name[1:], self.here(into), symlinks=True, dirs_exist_ok=True)
            elif (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, self.here(into), ignore=shutil.ignore_patterns("__pycache__"))
            else:
                folder = self.here(into) if into.endswith("/") else self.here(into).parent
                folder.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, folder)

    def _run(self, rest: str) -> None:
        commands = [command.strip() for command in rest.split(" && ")]
        kept = [command for command in commands if not command.startswith(OF_THE_IMAGE)]
        self.left_out += [command for command in commands if command not in kept]
        for command in commands:
            if command.startswith("install -d "):
                self.here(command.split()[-1]).mkdir(parents=True)
            elif found := re.search(r"--home-dir (\S+)", command):
                self.here(found[1]).mkdir(parents=True)
        if kept:
            path = f"{Path(sys.base_prefix) / 'bin'}{os.pathsep}{os.environ['PATH']}"
            environment = {**plain_environment(), "PATH": path, **self.settings}
            subprocess.run(
                ["sh", "-ec", self.mapped("\n".join(kept))],
                cwd=self.here(""), env=environment, check=True, timeout=SECONDS, capture_output=True,
            )  # fmt: skip

    def mapped(self, text: str) -> str:
        return re.sub(r"(?<![\w.*'}])/(?=(?:opt|wheels|src|var)\b)", f"{self.root}/", text)


def plain_environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(("CARPOOL_", "PYTEST_"))}


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """That the image's user can look into."""
    with tempfile.TemporaryDirectory(prefix="carpool-image-") as name:
        Path(name).chmod(0o755)
        yield Path(name)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_what_an_image_promises(file: Path) -> None:
    read = instructions(file)
    last = dict(read[max(at for at, (word, _) in enumerate(read) if word == "FROM") :])
    settings = dict(part.split("=", 1) for part in shlex.split(last["ENV"]))
    assert settings["CARPOOL_HOST"] == "0.0.0.0"
    assert {name for name in settings if name.startswith("CARPOOL_")} <= variables().keys()
    assert last["VOLUME"] == settings["CARPOOL_CACHE_DIR"]
    assert last["USER"] == "10001:10001"
    assert json.loads(last["ENTRYPOINT"]) + json.loads(last["CMD"]) == ["carpool", "serve"]


def test_both_images_differ_in_what_they_bring_alone() -> None:
    first, second = (instructions(file) for file in FILES)
    differ = {one[0] for one, other in zip(first, second, strict=True) if one != other}
    assert differ == {"ARG", "ENV"}


@pytest.mark.conformance
@pytest.mark.skipif(
    shutil.which("strip") is None, reason="the Dockerfile installs binutils, which is missing here"
)
def test_every_step_works_and_the_server_is_healthy(open_folder: Path) -> None:
    image = Image(open_folder, {"EXTRAS": "otel"})  # the others are large and stand in make setup's list
    for word, rest in instructions(FILES[0]):
        image.perform(word, rest)
    assert all(command.startswith(OF_THE_IMAGE) for command in image.left_out)
    library = next(image.root.glob("opt/carpool/lib/python*/site-packages/uvloop/loop*.so"))
    assert library.stat().st_size < 5_000_000, "it still has its debug information"
    for folder in ("var/cache/carpool", "var/lib/carpool"):
        (image.root / folder).chmod(0o777)  # they belong to the user that was not made here
    check_server(image)


def check_server(image: Image) -> None:
    """Started with the image's own words, on free ports of the loopback, and asked by its health check."""
    names = ("CARPOOL_HTTP_PORT", "CARPOOL_GRPC_PORT", "CARPOOL_METRICS_PORT")
    ports = dict(zip(names, map(str, free_ports(3)), strict=True))
    told = {**plain_environment(), "HOME": image.mapped("/var/lib/carpool"), **image.settings}
    environment = {**told, "CARPOOL_HOST": "127.0.0.1", **ports}
    number = int(image.last["USER"].split(":")[0]) if os.geteuid() == 0 and for_everybody() else None
    command = json.loads(image.last["ENTRYPOINT"]) + json.loads(image.last["CMD"])
    health = json.loads(image.last["HEALTHCHECK"].partition("CMD ")[2])
    start = shutil.which(command[0], path=environment["PATH"])
    assert start == str(image.root / "opt/carpool/bin/carpool")
    place = image.here("")
    with (image.root / "log").open("wb") as log:
        server = subprocess.Popen(
            [start, *command[1:]],
            cwd=place,
            env=environment,
            user=number,
            group=number,
            stdout=log,
            stderr=log,
        )
        try:
            end = time.monotonic() + SECONDS
            while subprocess.run(
                health, cwd=place, env=environment, user=number, capture_output=True, check=False
            ).returncode:
                assert server.poll() is None, (image.root / "log").read_text()
                assert time.monotonic() < end, (image.root / "log").read_text()
        finally:
            server.terminate()
            assert server.wait(60) == 0
    assert any((image.root / "var/cache/carpool").rglob("*")), "what was measured is kept on the volume"


def for_everybody() -> bool:
    return all(folder.stat().st_mode & 0o001 for folder in Path(sys.base_prefix, "bin").resolve().parents)


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports
