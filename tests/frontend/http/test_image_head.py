"""What the head of a picture's request says: which answer is wanted, and options that are spelt right."""

from __future__ import annotations

import pytest

from carpool.errors import InvalidInput
from carpool.frontend.http.image_reading import read_accept, read_layout
from carpool.frontend.http.query_text import read_query


@pytest.mark.parametrize(
    ("accept", "drawn"),
    [
        (b"", None),
        (b"*/*", None),
        (b"application/json", None),
        (b"application/json, image/png;q=0.5", None),
        (b"image/*, */*", None),
        (b"text/html", None),
        (b"image/*", "jpeg"),
        (b"IMAGE/PNG", "png"),
        (b"image/webp, image/png;q=0.9, */*;q=0.1", "webp"),
        (b"image/avif, image/png", "png"),
        (b"application/json;q=0.2, image/jpeg", "jpeg"),
        (b"image/png;q=0", None),
        (b"image/png;q=x, ,;", "png"),
    ],
)
def test_a_drawn_answer_is_for_those_who_like_it_better_than_json(accept: bytes, drawn: str | None) -> None:
    form, wanted = read_accept(accept)
    assert (form if wanted else None) == drawn


def test_queries_are_read_once_each() -> None:
    assert read_query("a=1&b=x%20y&c=&d") == {"a": "1", "b": "x y", "c": "", "d": ""}
    for bad in ("a=1&a=2", "a=%ff", "&".join(f"k{n}=1" for n in range(40))):
        with pytest.raises(InvalidInput):
            read_query(bad)


@pytest.mark.parametrize(
    ("content_type", "kind"),
    [
        (None, "raw"),
        (b"image/jpeg", "raw"),
        (b"application/octet-stream", "raw"),
        (b"application/x-www-form-urlencoded", "raw"),  # what curl says of --data-binary
        (b"application/json; charset=utf-8", "json"),
        (b"Multipart/Form-Data; boundary=a", "form"),
    ],
)
def test_the_content_type_says_how_pictures_lie_in_the_body(content_type: bytes | None, kind: str) -> None:
    assert read_layout(content_type).kind == kind
