"""Both clients of the package mcp, as they are, against a front end with a fake engine."""

from __future__ import annotations

import base64
from pathlib import Path

import pytest

from carpool.config.server import ServerSettings
from conformance.api_clients_venv import said_by
from frontend.http.front_end import front_end
from frontend.picture_models import RED, classifier, detector, picture

pytestmark = pytest.mark.conformance
PROGRAM = """
import asyncio, json, sys
from mcp import ClientSession
from mcp.client import Client
from mcp.client.streamable_http import streamable_http_client
url, image = sys.argv[1:]

async def main():
    found = {}
    async with streamable_http_client(url) as streams:
        async with ClientSession(streams[0], streams[1]) as session:
            found["server"] = (await session.initialize()).server_info.name
            found["tools"] = [one.name for one in (await session.list_tools()).tools]
            good = await session.call_tool("detect", {"image": image})
            found["found"] = good.structured_content
            bad = await session.call_tool("detect", {"image": "!!"})
            found["bad"] = [good.is_error, bad.is_error, bad.content[0].text]
    async with Client(url) as client:
        found["client"] = [one.name for one in (await client.list_tools()).tools]
    print(json.dumps(found))

asyncio.run(main())
"""


def test_tools_are_listed_and_called(tmp_path: Path) -> None:
    image = base64.b64encode(picture(RED)).decode()
    settings = ServerSettings(api=("mcp",), cache_dir=tmp_path)
    with front_end(detector(), classifier(), settings=settings) as served:
        said = said_by(PROGRAM, f"http://{served.url}/mcp", image)
    assert said["server"] == "carpool"
    assert sorted(said["tools"]) == sorted(said["client"]) == ["classify", "detect"]
    assert said["found"]["detections"][0]["label"] == "red"
    assert said["bad"] == [False, True, "image is not valid base64"]
