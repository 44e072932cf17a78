"""Implements `carpool demo`: something to look at, on this machine alone."""

from __future__ import annotations

import time
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from carpool.cli import show
from carpool.cli import verb_options as o
from carpool.errors import CarpoolError

if TYPE_CHECKING:
    from carpool.demo.demo_cameras import Traffic
    from carpool.lab.load.facts import RunningServer

What = StrEnum("What", ["rollout", "ocr", "reader"])

_MODEL = "classifier"
_PATH = f"/v2/models/{_MODEL}/rollout"
_PLAN = """
[rollout]
shadow = 1.0
shadow_h = {hours}
canary = [0.3, 0.6]
canary_h = {hours}
least = 50
guards = {{ disagreement = false, confidence = 0.8 }}
"""
_WHY = (
    "Both versions are right about most images, but not in the same words: one says tabby where the other "
    "says Egyptian cat. Comparing their first classes would roll a good version back, so disagreement = "
    "false. The labels judge them instead: each response gets feedback, right if a fitting class is among "
    "its first five. The guards errors, late and feedback decide, with a confidence of 0.8, because "
    "minutes bring few responses."
)
_PICTURES = 64
_LOAD, _LEAST_RATE, _MOST_RATE = 0.3, 3.0, 40.0  # of what stable carries; requests a second
_OF_CANDIDATE = 0.8  # of what it carries: it answers six tenths of them at most
_LOOK_S, _WAITING_S = 0.25, 10.0
_PATIENCE_S = 1800.0
_GOOD, _BAD = ("standby", "done"), ("rolled-back", "failed")


def _write_reader(folder: Path) -> list[str]:
    import shutil

    from carpool.demo import text_model

    shutil.copytree(text_model(), folder / "reader", ignore=shutil.ignore_patterns("line.png"))
    return ["reader"]


@dataclass(frozen=True, kw_only=True)
class Demo:
    """Show a rollout in minutes instead of days, or read a page of text.

    A new server replaces EfficientNet-Lite0 by Lite1 while simulated cameras send photos. Its console shows
    the rollout:

        carpool demo rollout

    Then a wrong version, which is rolled back within seconds:

        carpool demo rollout --broken

    A pipeline of two models reads a page, line by line:

        carpool demo ocr

    A PyTorch model writes lines character by character, with continuous batching:

        carpool demo reader
    """

    what: What = o.argument("The demo.", metavar="|".join(What))
    port: int = o.option(0, "Port of the server and its console; 0 takes a free one.")
    seconds: float = o.option(20.0, "Shortest length of a step, in seconds.")
    broken: bool = o.option(False, "At the end, also roll out a wrong version.")
    wheels: list[Path] | None = o.option(
        None, "ocr: a wheel of rapidocr-onnxruntime or rapidocr, whose models are used.", name="--with"
    )
    into: Path | None = o.option(None, "ocr: write the models and pipelines into this new folder, and exit.")
    stay: bool = o.option(False, "Keep the server running at the end, until Ctrl-C.")

    def run(self) -> int:
        import asyncio
        import signal

        from carpool.demo import text_model
        from carpool.demo.labelled import candidate_file, write_classifier
        from carpool.lab.load.facts import TRUSTING, RunningServer
        from carpool.lab.sweep.conduct import OwnServer

        o.whole("--port", self.port, least=0, most=65535)
        needed = {What.rollout: candidate_file(), What.reader: text_model()}.get(self.what)
        if needed is not None and not needed.exists():
            raise CarpoolError(
                "its models are not installed: pip install 'carpool[demos]' (from a clone: ./tools/demos)"
            )
        if self.what != What.rollout:
            return self._read_page()
        hours = o.number("--seconds", self.seconds, least=1, most=86400) / 3600
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # its server is not left behind
        with TemporaryDirectory(prefix="carpool-demo-") as scratch:
            folder = Path(scratch) / "models" / _MODEL
            write_classifier(folder, _PLAN.format(hours=hours))
            options = ["--http-port", str(self.port), "--allow-rollouts"]
            environ = {"CARPOOL_STATE_DIR": str(Path(scratch) / "state")}
            server = OwnServer(folder, Path(scratch) / "server.log", options, environ)
            try:
                url = asyncio.run(server.address())
                return self._show(url, RunningServer(url, TRUSTING), folder)
            except KeyboardInterrupt:
                return 130
            finally:
                server.ask_to_end()
                server.end()

    def _read_page(self) -> int:
        import asyncio
        import signal
        from threading import Event

        from carpool.client.client import Client
        from carpool.config.backend_kinds import kind_of
        from carpool.demo import text_model
        from carpool.demo.ocr_repository import ocr_page, write_repository
        from carpool.lab.sweep.conduct import OwnServer

        writes = self.what == What.reader
        if writes and (missing := kind_of("pytorch").missing()):
            raise CarpoolError(f"carpool demo reader: {missing}")
        page = text_model() / "line.png" if writes else ocr_page()
        with TemporaryDirectory(prefix="carpool-demo-") as scratch:
            folder = self.into or Path(scratch) / "models"
            try:
                names = _write_reader(folder) if writes else write_repository(folder, self.wheels or ())
            except (ValueError, FileExistsError) as error:
                raise CarpoolError(str(error)) from None
            if self.into is not None:
                show.paragraph(f"{folder} has {', '.join(names)}: carpool serve {folder}")
                return 0
            signal.signal(signal.SIGTERM, signal.default_int_handler)  # its server is not left behind
            environ = {"CARPOOL_STATE_DIR": str(Path(scratch) / "state")}
            server = OwnServer(folder, Path(scratch) / "log", ["--http-port", str(self.port)], environ)
            try:
                url = asyncio.run(server.address())
                print(f"curl -F file=@{page} {url}/read", flush=True)
                with Client(url) as client:
                    for name in names:
                        answer = client.predict(page, task="read", model=name)
                        show.paragraph(f"{name}:")
                        print(answer["text"], flush=True)
                if self.stay:
                    show.paragraph(f"{url} keeps running. Ctrl-C stops it.")
                    Event().wait()
                return 0
            except KeyboardInterrupt:
                return 130
            finally:
                server.ask_to_end()
                server.end()

    def _show(self, url: str, server: RunningServer, folder: Path) -> int:
        from threading import Event

        from carpool.demo.demo_cameras import SOURCES, Traffic
        from carpool.demo.labelled import CANDIDATE, STABLE, labelled_pictures, write_broken

        show.paragraph(f"Version 1 is {STABLE}, version 2 {CANDIDATE}. The console:")
        print(url, flush=True)
        show.paragraph(_WHY)
        carried = server.get(f"/v2/models/{_MODEL}/profile")["promise"]["capacity_rps"]
        traffic = Traffic(url, _MODEL, labelled_pictures(_PICTURES), min(_MOST_RATE, _LOAD * carried))
        show.paragraph(f"{SOURCES} cameras send {traffic.rate:.0f} requests a second.")
        with traffic.sending():
            found = follow(server, 0, traffic)
            _tell_end(found, traffic)
            if found["state"] in _BAD:
                return 1
            if self.broken:
                show.paragraph("Now version 3: as fast as version 2, and with its classes in another order.")
                server.send(_PATH, {"action": "promote", "reason": "the demo does not wait a day"})
                write_broken(folder, 3)
                seen = len(_until_over(server)["history"])
                server.send(_PATH, {"action": "start", "version": 3, "plan": {"shadow": 0}})
                found = follow(server, seen, traffic)
                _tell_end(found, traffic)
                if found["state"] != "rolled-back":
                    return 1
            if self.stay:
                show.paragraph(f"{url} keeps running. Ctrl-C stops it.")
                Event().wait()
        return 0


def follow(server: RunningServer, seen: int, traffic: Traffic) -> dict[str, Any]:
    """Print each state as it comes, and now and then what is waited for, until it stands or is over."""
    usual, counted = traffic.rate, (0, 0)
    began, told, give_up = time.monotonic(), time.monotonic(), time.monotonic() + _PATIENCE_S
    while time.monotonic() < give_up:
        found: dict[str, Any] = server.get(_PATH)
        for line in found.get("history", [])[seen:]:
            state = f"{line['to']} {line['step']}" if line["step"] else line["to"]
            print(f"{time.monotonic() - began:6.1f} s  {state}: {line['why']}", flush=True)
            seen, told = seen + 1, time.monotonic()
        if found["state"] in (*_GOOD, *_BAD):
            return found
        carried = found.get("capacity", {}).get("candidate_rps")
        if carried and usual > _OF_CANDIDATE * carried:
            usual = _OF_CANDIDATE * carried
            traffic.ask_for(usual)
            print(f"{'':10} the candidate is slower: {usual:.0f}/s from now on", flush=True)
        if time.monotonic() - told >= _WAITING_S:
            told = time.monotonic()
            print(f"{'':10} waits: {found['why']}", flush=True)
            if found["state"] == "shadow":
                counted = _make_room(found["counts"], counted, traffic)
        if found["state"] == "canary" and traffic.rate != usual:
            traffic.ask_for(usual)
        time.sleep(_LOOK_S)
    raise CarpoolError(f"the rollout did not end within {_PATIENCE_S / 60:.0f} minutes")


def _make_room(counts: dict[str, Any], before: tuple[int, int], traffic: Traffic) -> tuple[int, int]:
    """Lets the cameras ask less often where the demo's shadow gets too little of the device."""
    now = counts["stable"]["answers"], counts["candidate"]["answers"]
    asked, shown = now[0] - before[0], now[1] - before[1]
    if shown < asked / 2 and traffic.rate > _LEAST_RATE:
        traffic.ask_for(max(_LEAST_RATE, traffic.rate / 2))
        print(f"{'':10} little is left over for a shadow: {traffic.rate:.0f}/s until the canary", flush=True)
    return now


def _until_over(server: RunningServer) -> dict[str, Any]:
    while (found := server.get(_PATH))["state"] != "done":
        time.sleep(_LOOK_S)
    return dict(found)


def _tell_end(found: dict[str, Any], traffic: Traffic) -> None:
    parts = [f"version {version}: {right} of {asked}" for version, (right, asked) in traffic.judged()]
    failed = ", ".join(f"{times} {reason}" for reason, times in traffic.failed.items()) or "none"
    show.paragraph(f"Right by the labels: {'; '.join(parts)}. Not answered: {failed}.")
    if found["state"] == "standby":
        show.paragraph(
            f"Version {found['candidate']} answers everything; version {found['stable']} stays loaded for "
            f"{found['plan']['standby_h']:g} h, and carpool rollout abort would roll back to it at once."
        )
    elif found["state"] == "rolled-back":
        show.paragraph(f"Version {found['stable']} answers everything again.")
