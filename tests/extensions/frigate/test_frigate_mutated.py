"""Forms of Frigate's plugin, mutated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from frontend.access.key_files import ALICE
from frontend.http.mutations import COUNTS, Recorded, check_mutations
from frontend.picture_models import RED, detector, picture

BOUNDARY = "f00bc1a5e1b2c3d4"
PART = b'--%b\r\nContent-Disposition: form-data; name="%b"%b\r\n\r\n%b\r\n'
B = BOUNDARY.encode()
FORM = (
    PART % (B, b"api_key", b"", ALICE.encode())
    + PART % (B, b"image", b'; filename="image"', picture(RED))
    + PART % (B, b"min_confidence", b"", b"0.4")
    + b"--%b--\r\n" % B
)
FIELDS = {"Content-Type": f"multipart/form-data; boundary={BOUNDARY}"}
RECORDED = [
    Recorded("POST", "/v1/vision/detection", FORM, FIELDS),
    Recorded("POST", "/v1/vision/custom/finder", FORM, FIELDS),
]


def is_answer(status: int, document: Any) -> bool:
    return isinstance(document["predictions"], list) and document["success"] == (status == 200)


@pytest.mark.parametrize("count", COUNTS)
def test_mutated_requests_get_answers_of_the_protocol(count: int, tmp_path: Path) -> None:
    check_mutations("frigate", RECORDED, is_answer, count, tmp_path, detector())
