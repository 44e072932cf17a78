"""Holds the list of cameras, in a file that outlives the engine, and publishes it to all processes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import orjson

from carpool.engine.engine_parts import EnginePart, EngineServer, Json
from carpool.errors import InvalidInput, NotFound


def engine(server: EngineServer) -> EnginePart:
    file = Path(os.environ["CAMERAS_FILE"])
    cameras: dict[str, Any] = orjson.loads(file.read_bytes()) if file.exists() else {}

    def publish() -> None:
        made = file.with_suffix(".new")
        made.write_bytes(orjson.dumps(cameras))
        made.replace(file)
        server.publish({"cameras": dict(cameras)})

    async def add(arguments: Json) -> Json:
        name, model, fps = (arguments.get(key) for key in ("name", "model", "fps"))
        if not isinstance(name, str) or not isinstance(model, str) or not isinstance(fps, int | float):
            raise InvalidInput("a camera has a name, a model and fps")
        cameras[name] = {"model": model, "fps": fps}
        publish()
        return {name: cameras[name]}

    async def remove(arguments: Json) -> Json:
        if cameras.pop(str(arguments["name"]), None) is None:
            raise NotFound(f"there is no camera {arguments['name']}", field="name")
        publish()
        return {}

    publish()
    return EnginePart(questions={"add": add, "remove": remove})
