"""Repositories of other machines that a server follows."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import fsspec

from carpool.config.server import ServerSettings
from carpool.engine.control.engine_questions import ControlDesk
from carpool.engine.engine import Engine
from carpool.engine.engine_host import EngineHost
from carpool.extensions.registry.remote_repository import Remotes
from engine.scripted import Stage, model, run, scripted_stage

__all__ = ["scripted_stage"]


def test_a_repository_that_lies_elsewhere_is_followed(tmp_path: Path, stage: Stage) -> None:
    fs = fsspec.filesystem("memory")
    address, made = "memory://followed/models", tmp_path / "made"

    def put() -> None:
        files = (path for path in made.rglob("*") if path.is_file())
        fs.pipe({f"/followed/models/{path.relative_to(made)}": path.read_bytes() for path in files})

    async def story() -> None:
        model(made, "a", v1=1.0)
        put()
        settings = ServerSettings(
            model_control_mode="poll", poll_s=3600.0, models=(address,), cache_dir=tmp_path / "cache"
        )
        remotes = Remotes.of(settings)
        assert remotes.refresh() == []
        host = EngineHost(partial(Engine, *remotes.folders([Path(address)])), settings=settings)
        host.start_parts()
        desk = ControlDesk(host, settings)
        await desk.open(lambda _step: None)
        assert sorted(host.catalog.entries) == [("a", "1")]
        (made / "a").rename(tmp_path / "before")
        model(made, "a", v1=1.0, v2=2.0)
        model(made, "b", v1=3.0)
        put()
        await desk.look()
        assert sorted(host.catalog.entries) == [("a", "1"), ("a", "2"), ("b", "1")]
        fs.rm("/followed", recursive=True)
        await desk.look()  # nothing is there: a warning, and what serves goes on
        assert sorted(host.catalog.entries) == [("a", "1"), ("a", "2"), ("b", "1")]
        await host.drain(5.0)

    run(story())
