"""Requests of CVAT's gateway, mutated."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest

from frontend.access.key_files import ALICE
from frontend.http.mutations import COUNTS, JSON, Recorded, check_mutations
from frontend.picture_models import RED, detector, picture, segmenter

PHOTO = base64.b64encode(picture(RED)).decode()

ASKED = {"image": PHOTO, "threshold": 0.4}
KEYED = {"X-API-Key": ALICE}  # as a proxy adds it
RECORDED = [
    Recorded("GET", "/api/functions", fields=KEYED),
    Recorded("GET", "/api/functions/finder", fields=KEYED),
    *(
        Recorded(
            "POST",
            "/api/function_invocations",
            json.dumps(ASKED).encode(),
            {**JSON, **KEYED, "x-nuclio-function-name": name},
        )
        for name in ("finder", "cutter")
    ),
]


def is_answer(status: int, document: Any) -> bool:
    return status == 200 or isinstance(document["error"], str)


@pytest.mark.parametrize("count", COUNTS)
def test_mutated_requests_get_answers_of_the_protocol(count: int, tmp_path: Path) -> None:
    check_mutations("cvat", RECORDED, is_answer, count, tmp_path, detector(), segmenter())
