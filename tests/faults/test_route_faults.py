"""Whatever raises, once, on whichever route: every client is answered once, and nothing is left behind."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import fsspec
import pytest

from carpool.errors import CarpoolError
from carpool.extensions.registry import remote_listing, remote_repository, version_store
from carpool.extensions.registry.remote_repository import RemoteRepository
from carpool.extensions.rollout.front import Beside
from carpool.frontend.calls.request import Request
from extensions.registry.test_remote import ADDRESS, TOML, contents
from faults import routes
from faults.injection import Fault, Point
from faults.routes import Routes, points_of
from later import exhaustive, first, later
from link.redis_server import RedisServer, redis_server

WHERE = {
    "cached": (
        *("extensions.cache.cache_wrapper", "extensions.cache.front_caches", "frontend.calls.request"),
        *("link.contents", "extensions.cache.answer_store", "extensions.cache.cache_key"),
    ),
    "pipeline": (
        *("extensions.pipelines.pipeline_run", "extensions.pipelines.pipeline_pictures"),
        *(
            "extensions.pipelines.run_steps",
            "extensions.pipelines.pipeline_route",
            "engine.routes.stepped_route",
        ),
        *("core.remaining", "extensions.pipelines.picture_graph"),
    ),
    "cascade": (
        *("extensions.cascades.cascade_steps", "extensions.cascades.cascade_audit"),
        "extensions.cascades.cascade_run",
        "frontend.pictures.recomputation",
    ),
    "workers": (
        *("frontend.pictures.workers", "frontend.pictures.picture_service"),
        *("frontend.pictures.sent_pictures", "vision.transforms"),
    ),
    "text": ("extensions.text.text_driver", "extensions.text.text_loop", "extensions.text.text_scheduler"),
    "sequence": ("extensions.sequences.sequence_route", "extensions.sequences.law"),
    "canary": (
        *("extensions.rollout.front", "extensions.rollout.mirror", "extensions.rollout.comparison"),
        "frontend.pictures.recomputation",
        *("extensions.rollout.routing", "frontend.calls.request", "link.contents"),
    ),
}
"""The modules of each route, by which it is called in routes.py."""
GIVES_BACK = {
    # What other code trusts to give back, or to answer: where that fails, nothing else can help.
    *("PipelineRun._guarded", "PipelineRun._end", "PipelineRun._let_go", "PipelineRun._drop"),
    *("PipelineRun._let_go_of_device", "extensions.pipelines.run_steps.give_back"),
    *("extensions.pipelines.run_steps.release_all", "PictureService.forget", "PictureService.let_go"),
    *("OpenBooking.over", "Booking.gone", "Booking.done", "Booking._leave"),
    *("OpenBooking._over", "Recomputation._release"),
    *("frontend.pictures.workers._failed", "Workers._deliver", "Workers._next"),
    *("Workers.drop", "Request.give_back", "Request._give_back", "Request._take_back", "Request._stop_aside"),
    *("Request._drop_content", "Request.fail", "Request.end_with", "Request.fail_unexpectedly"),
    *("Request._unexpected", "Request._finish", "Request.go", "Request.recall", "Content.drop"),
    *("TextDriver._end", "TextDriver._turn_away", "SequenceRoute._tell", "SequenceRoute._done"),
    *("Beside._stop", "Beside.left", "Lookup._guarded", "Lookup.left", "Lookup.end"),
    # The door takes the slot in it, and nobody knows whether it had before it raised.
    "PipelineRun.ready",
    # The door tells each of its answer once, whatever comes of that; all that they do is guarded in them.
    *("Request.done", "PipelineRun.answered", "RequestHears.done"),
    # What the engine's end of the link calls. An error there costs the link, as everywhere.
    *("TextDriver.ready", "TextDriver._take"),
    "OpenBooking._learn",
    # Called when the catalogue changes, as it may at any time where a model is measured again; by no request.
    *("Mirroring._around", "Mirroring._choose"),
    *("SequenceRoute._count", "Sequences.finished"),  # without it a place is taken until its sequence is idle
}
SHARED = ("link.redis_client", "extensions.cache.cache_wrapper", "extensions.cache.front_caches")


def modules(names: tuple[str, ...]) -> list[Any]:
    return [importlib.import_module(f"carpool.{name}") for name in names]


def cases() -> list[object]:
    """Of each route every twelfth point in `make test`, and all of them later."""
    found: list[object] = []
    for route, names in WHERE.items():
        points = [point for point in points_of(*modules(names)) if str(point) not in GIVES_BACK]
        points.append(Point(routes.Backend, "run"))
        for number, point in enumerate(points):
            case = (route, point)
            name = f"{route}-{point}"
            found.append(exhaustive(*case, name=name) if number % 12 else pytest.param(*case, id=name))
    return found


@pytest.fixture(autouse=True)
def nothing_is_logged() -> Iterator[None]:
    """Who keeps a record keeps what raised, and with it everything that its stack refers to."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


class Kept:
    """One server for all points; a new one after a failure, which may have left something."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._number = folder, 0
        self._stack = ExitStack()
        self._server: Routes | None = None

    def server(self) -> Routes:
        if self._server is None:
            self._number += 1
            folder = self._folder / str(self._number) / "models"
            folder.parent.mkdir()
            self._server = self._stack.enter_context(routes.routes(folder))
        return self._server

    def end(self) -> None:
        self._server = None
        self._stack.close()


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kept]:
    found = Kept(tmp_path_factory.mktemp("routes"))
    found.server()
    yield found
    found.end()


@pytest.mark.parametrize(("route", "point"), cases())
def test_one_fault_on_a_route(kept: Kept, route: str, point: Point, request: pytest.FixtureRequest) -> None:
    """A point that the route does not come to is none of it."""
    thorough = any(mark.name == "conformance" for mark in request.node.iter_markers())
    server, ask = kept.server(), getattr(routes, route)
    try:
        routes.recovers(server, ask)
        routes.suffer(server, ask, point, 3 if thorough else 1)
    except BaseException:
        kept.end()
        raise


def test_the_candidate_fails_and_stable_answers(kept: Kept) -> None:
    """So the points of the canary's route are met on the way back, too, of numbers and of pictures."""
    server = kept.server()
    routes.recovers(server, routes.canary)
    with Fault(Point(Beside, "_moves_to_stable"), 0).injected() as fault:
        assert set(routes.canary(server).statuses) == {200}
    assert fault.calls >= 4


@pytest.mark.parametrize("point", [Point(Request, "admitted"), Point(Beside, "_begins_again")], ids=str)
def test_a_picture_that_falls_back_gives_back_both_slots(kept: Kept, point: Point) -> None:
    routes.suffer(kept.server(), routes.canary, point, 3)


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with redis_server(tmp_path_factory.mktemp("redis")) as found:
        yield found


@pytest.fixture(scope="module")
def sharing(redis: RedisServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Routes]:
    folder = tmp_path_factory.mktemp("shared") / "models"
    url, secret = f"redis://127.0.0.1:{redis.port}", "a-secret-of-this-test-alone"
    with routes.routes(folder, cache_url=url, cache_secret=secret) as found:
        yield found


REDIS_POINTS = [point for point in points_of(*modules(SHARED)) if str(point) not in GIVES_BACK]


@pytest.mark.parametrize("point", first(6, REDIS_POINTS), ids=str)
def test_one_fault_beside_redis(sharing: Routes, point: Point) -> None:
    routes.suffer(sharing, routes.cached, point, 1)


REMOTE = points_of(remote_repository, remote_listing, version_store)


@pytest.fixture
def bucket() -> Iterator[Any]:
    fs = fsspec.filesystem("memory")
    fs.store.clear()
    fs.pseudo_dirs[:] = [""]
    fs.pipe({"/bucket/models/a/model.toml": TOML, "/bucket/models/a/1/weights.bin": b"one"})
    fs.pipe({"/bucket/models/b/model.toml": TOML, "/bucket/models/b/1/weights.bin": b"two"})
    yield fs
    fs.store.clear()
    fs.pseudo_dirs[:] = [""]


@pytest.mark.parametrize("kind", [OSError, later(RuntimeError)])
@pytest.mark.parametrize("point", first(12, REMOTE), ids=str)
def test_one_fault_while_a_remote_repository_is_read(
    bucket: Any, tmp_path: Path, point: Point, kind: type[Exception]
) -> None:
    """The folder is never half of what is there, the next look mends it, and nothing is left over."""
    whole = {"a/model.toml": TOML, "a/1/weights.bin": b"one", "b/model.toml": TOML, "b/1/weights.bin": b"two"}
    for at in range(1, 40):
        found = RemoteRepository(ADDRESS, tmp_path / str(at), remote_listing.Budget())
        made = Point(point.owner, point.name, lambda: kind("a fault that was made"))
        with Fault(made, at).injected() as fault:
            try:
                found.refresh()
            except (CarpoolError, RuntimeError, OSError):
                """The caller is told."""
        now = contents(found.folder) if found.folder.exists() else {}
        assert now.items() <= whole.items()
        assert len(now) in (0, 2, 4)
        assert found.refresh() == []
        assert contents(found.folder) == whole
        left = [path for path in (found._root / "parts").rglob("*") if path.is_file()]
        assert not left
        if fault.calls < at:
            break
