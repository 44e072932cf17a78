"""OpenAI's client, as it is, against a front end with a fake engine."""

from __future__ import annotations

import base64
from pathlib import Path

import pytest

from carpool.config.server import ServerSettings
from carpool.frontend.access.guard import Guard
from conformance.api_clients_venv import said_by
from frontend.access.key_files import ALICE, api_keys
from frontend.http.front_end import front_end
from frontend.picture_models import BLUE, RED, detector, embedder, picture

pytestmark = pytest.mark.conformance
PROGRAM = """
import json, sys
import openai
url, key, *images = sys.argv[1:]
client = openai.OpenAI(base_url=url, api_key=key, max_retries=0)
found = {"models": [one.id for one in client.models.list().data]}
found["packed"] = [one.embedding for one in client.embeddings.create(model="vector", input=images).data]
plain = client.embeddings.create(model="vector", input=images, encoding_format="float")
found["plain"] = [one.embedding for one in plain.data]
try:
    client.embeddings.create(model="vector", input="a cat")
except openai.BadRequestError as error:
    found["param"] = error.param
try:
    client.embeddings.create(model="nobody", input=images)
except openai.NotFoundError as error:
    found["code"] = error.code
try:
    openai.OpenAI(base_url=url, api_key="wrong", max_retries=0).models.list()
except openai.AuthenticationError as error:
    found["key"] = error.status_code
print(json.dumps(found))
"""


def test_embeddings_and_models(tmp_path: Path) -> None:
    images = [
        "data:image/jpeg;base64," + base64.b64encode(picture(colour)).decode() for colour in (RED, BLUE)
    ]
    guard, settings = Guard(api_key_file=api_keys(tmp_path)), ServerSettings(api=("embeddings",))
    with front_end(embedder(), detector(), guard=guard, settings=settings) as served:
        said = said_by(PROGRAM, f"http://{served.url}/v1", ALICE, *images)
    assert sorted(said["models"]) == ["finder", "vector"]
    for packed, plain in zip(said["packed"], said["plain"], strict=True):
        assert packed == pytest.approx(plain, abs=1e-6)
    assert (said["param"], said["code"], said["key"]) == ("input", "unknown-model", 401)
