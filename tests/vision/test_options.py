"""Options are read strictly, and described for OpenAPI from the same table."""

from __future__ import annotations

from dataclasses import fields

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.config.model import Task
from carpool.errors import InvalidInput
from carpool.vision.picture_answers import Options
from carpool.vision.tasks import options_of, parameters, read_options


def test_nothing_given_is_the_default() -> None:
    assert read_options({}) == Options() == Options(5, None, None, None, None, "png", False)


def test_everything_at_once() -> None:
    given = {
        "top_k": "3",
        "score": "0.5",
        "iou": "0",
        "max_detections": "10",
        "threshold": "1",
        "format": "rle",
        "overlay": "1",
    }
    assert read_options(given) == Options(3, 0.5, 0.0, 10, 1.0, "rle", True)
    assert given.keys() == {field.name for field in fields(Options)} - {"extra"}
    assert set(options_of()) - given.keys() == {"max_tokens"}  # of models that write, and an extra


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("topk", "5", 'unknown "topk"; did you mean "top_k"?'),
        ("zz", "5", 'unknown "zz"; valid here: format, iou'),
        ("top_k", "0", 'top_k must be a whole number from 1 to 1000, not "0"'),
        ("top_k", "1001", "from 1 to 1000"),
        ("top_k", "٣", "from 1 to 1000"),
        ("top_k", "9" * 5000, "from 1 to 1000"),
        ("top_k", "-1", "from 1 to 1000"),
        ("top_k", "", "from 1 to 1000"),
        ("score", "1.1", 'score must be a number from 0 to 1, not "1.1"'),
        ("score", "nan", "from 0 to 1"),
        ("iou", "inf", "from 0 to 1"),
        ("iou", "half", "from 0 to 1"),
        ("format", "jpeg", 'format must be png or rle, not "jpeg"'),
        ("overlay", "maybe", 'overlay must be 1 or 0, not "maybe"'),
        ("max_detections", "5000", "from 1 to 1000"),
    ],
)
def test_mistakes_name_the_option(name: str, text: str, words: str) -> None:
    with pytest.raises(InvalidInput) as error:
        read_options({name: text})
    assert words in error.value.message
    assert error.value.field == name


def test_what_means_nothing_to_a_task_is_a_mistake() -> None:
    assert read_options({"top_k": "2"}, Task.CLASSIFY).top_k == 2
    with pytest.raises(
        InvalidInput, match='"iou" is not an option of classify; valid here: overlay, score, top_k'
    ):
        read_options({"iou": "0.5"}, Task.CLASSIFY)
    with pytest.raises(InvalidInput, match="embed takes no options"):
        read_options({"overlay": "1"}, Task.EMBED)


@given(st.dictionaries(st.sampled_from([*options_of(), "x"]), st.text(max_size=8), max_size=3))
def test_any_text_gives_options_or_a_refusal(values: dict[str, str]) -> None:
    try:
        outcome: object = read_options(values).top_k in range(1, 1001)
    except InvalidInput as error:
        outcome = error.field in values
    assert outcome


@pytest.mark.parametrize("task", list(Task))
def test_openapi_lists_them(task: Task) -> None:
    listed = parameters(task)
    assert [parameter["name"] for parameter in listed] == list(options_of(task))
    for parameter in listed:
        assert parameter["in"] == "query"
        assert parameter["description"].endswith(".")
        assert parameter["schema"]["type"] in ("integer", "number", "string", "boolean")
