"""Collects what a front end sees of a rollout, which goes to the engine in bulk: how the two versions answer,
and how their answers to the same requests compare."""

from __future__ import annotations

import asyncio
import base64
import contextlib
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from random import Random
from time import monotonic
from typing import Any, NamedTuple

from carpool.errors import CarpoolError
from carpool.extensions.rollout.blame import fault_of
from carpool.extensions.rollout.counted import COMPARED, FALLBACKS, SKIPPED
from carpool.extensions.rollout.routing import Split
from carpool.frontend.calls.front_part import FrontServer
from carpool.frontend.pictures.picture_service import PictureService
from carpool.link.catalog import ModelEntry
from carpool.types import Array
from carpool.vision.likeness import Difference
from carpool.vision.thumbnail import block_change

_FLUSH_S = 0.1
_APART_S = 5.0  # between two comparisons of one source that count
_STILL = 6.0  # grey levels of the block that changed most: less is the same scene
_MOST_SOURCES = 1024
_PER_SECOND = 10.0  # comparisons in the canary, of one front end
_LEARNING = 0.1
_MOST_KEPT_BYTES = 4 << 20  # of a picture that goes to the engine to be kept
_KEPT_AT_ONCE, _KEPT_PER_SECOND = float(32 << 20), float(8 << 20)  # bytes of them, of one front end
_LONGEST_ID = 128
_MOST_IDS = 4096  # in one report


class LastComparison(NamedTuple):
    """Describes the last comparison of a source that counted."""

    at: float
    picture: Array | None  # small and grey


class Mirror:
    """Collects for one front end, in its loop's thread only."""

    def __init__(self, server: FrontServer) -> None:
        self._server = server
        self._random = Random()
        self._seen: OrderedDict[tuple[str, str], LastComparison] = OrderedDict()  # by model and source
        self._tokens: dict[str, tuple[float, float]] = {}  # by model: when, and how many comparisons it may
        self._reports: dict[tuple[str, int], dict[str, Any]] = {}  # by model and epoch
        self._keeping = 0.0, _KEPT_AT_ONCE  # when, and how many bytes of pictures may be kept
        self._flushing: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def pictures(self) -> PictureService:
        return self._server.pictures

    def wants(self, split: Split, entry: ModelEntry, source: str, now: float) -> bool:
        """Returns whether the other version is to answer it, too."""
        route = split.route
        if entry is split.stable:
            return route.mirrored > 0.0 and self._random.random() < route.mirrored
        if not route.compared:
            return False
        name = split.stable.name
        last = self._seen.get((name, source)) if source else None
        if last is not None and now - last.at < _APART_S:
            self.skipped(split, "thinned")
            return False
        at, tokens = self._tokens.get(name, (now, _PER_SECOND))
        tokens = min(_PER_SECOND, tokens + (now - at) * _PER_SECOND)
        wanted = tokens >= 1.0
        self._tokens[name] = now, tokens - wanted  # what is not compared leaves them to later requests
        if not wanted:
            self.skipped(split, "thinned")
        return wanted

    # ── what was seen ──

    def count_answer(self, split: Split, entry: ModelEntry, took: float, request_id: str) -> None:
        report = self._report(split)
        side = report["candidate" if entry is split.candidate else "stable"]
        side["answers"] += 1
        if entry is split.stable:
            split.stable_s += _LEARNING * (took - split.stable_s)
            split.usual.learn(took)
        elif split.route.slower and (usual := split.usual.median) is not None:
            side["timed"] += 1
            side["slow"] += took > split.route.slower * usual
        if entry.batching.slo is not None and took > entry.batching.slo:
            side["late"] += 1
        if request_id and len(report["ids"]) < _MOST_IDS:
            report["ids"].append((request_id[:_LONGEST_ID], entry.version))

    def count_failure(self, split: Split, entry: ModelEntry, error: CarpoolError) -> None:
        """It was answered with this error, or would have been."""
        fault = fault_of(error)
        if fault:
            side = self._report(split)["candidate" if entry is split.candidate else "stable"]
            side["answers"] += 1
            side[fault] += 1

    def fell_back(self, split: Split, error: CarpoolError) -> None:
        self.count_failure(split, split.candidate, error)
        self._server.row(split.candidate).add(FALLBACKS)
        self._report(split)["fallbacks"] += 1

    def shadow_failed(self, split: Split, error: CarpoolError) -> None:
        """Notes that the candidate failed a request that stable had answered, unseen by its client."""
        self._server.row(split.candidate).add(COMPARED["candidate-failed"])
        self.count_failure(split, split.candidate, error)

    def skipped(self, split: Split, why: str) -> None:
        self._server.row(split.candidate).add(SKIPPED[why])
        skipped = self._report(split)["skipped"]
        skipped[why] = skipped.get(why, 0) + 1

    def compared(
        self,
        split: Split,
        source: str,
        difference: Difference,
        small: Array | None,
        answers: Any,
        picture: bytes,
    ) -> None:
        now = monotonic()
        self._server.row(split.candidate).add(COMPARED["differs" if difference.differs else "same"])
        report = self._report(split)
        if split.route.mirrored:
            report["candidate"]["answers"] += 1
        if not self._counts(split.stable.name, source, small, now):
            report["seen"] += 1
        else:
            report["comparisons"].append((source, difference.differs))
        if difference.differs and split.route.keeps:
            fits = len(picture) <= min(_MOST_KEPT_BYTES, self._room_to_keep(now))
            whole = picture if fits else b""
            self._keeping = now, self._keeping[1] - len(whole)
            report["differences"].append(_kept(source, difference, answers, whole))

    def _room_to_keep(self, now: float) -> float:
        """Bytes of pictures that may go to the engine now; without room, the answers go alone."""
        at, room = self._keeping
        room = min(_KEPT_AT_ONCE, room + (now - at) * _KEPT_PER_SECOND)
        self._keeping = now, room
        return room

    def _counts(self, model: str, source: str, small: Array | None, now: float) -> bool:
        """Returns whether it is a new trial: frames of one still camera are not."""
        if not source:
            return True
        last = self._seen.pop((model, source), None)
        if last is not None and (now - last.at < _APART_S or _is_still(small, last.picture)):
            self._seen[model, source] = last
            return False
        self._seen[model, source] = LastComparison(now, small)
        if len(self._seen) > _MOST_SOURCES:
            self._seen.popitem(last=False)
        return True

    # ── to the engine ──

    def _report(self, split: Split) -> dict[str, Any]:
        key = split.stable.name, split.route.epoch
        report = self._reports.get(key)
        if report is None:
            report = self._reports[key] = {
                "stable": {"answers": 0, "errors": 0, "late": 0},
                "candidate": {"answers": 0, "errors": 0, "late": 0, "timed": 0, "slow": 0},
                "comparisons": [],
                "seen": 0,
                "skipped": {},
                "fallbacks": 0,
                "ids": [],
                "differences": [],
            }
            if self._flushing is None:
                self._flushing = asyncio.get_running_loop().call_later(_FLUSH_S, self._flush)
        return report

    def _flush(self) -> None:
        self._flushing = None
        reports, self._reports = self._reports, {}
        seen = [{"model": model, "epoch": epoch, **report} for (model, epoch), report in reports.items()]
        task = asyncio.get_running_loop().create_task(self._send(seen))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _send(self, seen: Sequence[Mapping[str, Any]]) -> None:
        with contextlib.suppress(CarpoolError):  # an engine that is gone counts anew
            await self._server.ask("rollout/seen", {"seen": seen})

    def close(self) -> None:
        if self._flushing is not None:
            self._flushing.cancel()
        for task in self._tasks:
            task.cancel()


def _kept(source: str, difference: Difference, answers: Any, picture: bytes) -> dict[str, Any]:
    stable, candidate = answers or (None, None)
    return {
        "source": source,
        "how_much": difference.how_much,
        "why": difference.why,
        "details": difference.details,
        "stable": stable,
        "candidate": candidate,
        "picture": base64.b64encode(picture).decode(),
    }


def _is_still(one: Array | None, other: Array | None) -> bool:
    """Returns whether two small pictures show the same scene."""
    return one is not None and other is not None and block_change(one, other) <= _STILL
