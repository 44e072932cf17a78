"""The text format itself: what parses, and that every mistake says where it is."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from carpool.config.pbtxt import MAX_DEPTH, Message, Scalar, decimal, integer, parse
from carpool.errors import ConfigError


def plain(message: Message) -> list[tuple[str, object]]:
    return [
        (field.name, [plain(v) if isinstance(v, Message) else v.text for v in field.values])
        for field in message.fields
    ]


def scalar(text: str) -> Scalar:
    value = parse(f"a: {text}").fields[0].values[0]
    assert isinstance(value, Scalar)
    return value


@pytest.mark.parametrize(
    ("text", "tree"),
    [
        ("", []),
        ("# only a comment", []),
        ('name: "a"', [("name", ["a"])]),
        ("name: 'a' # why\nx: 1", [("name", ["a"]), ("x", ["1"])]),
        ('name: "a" "b"\n  \'c\'', [("name", ["abc"])]),
        ("dims: [1, -1,3]", [("dims", ["1", "-1", "3"])]),
        ("dims: []", [("dims", [])]),
        ("dims: 1 dims: 2", [("dims", ["1"]), ("dims", ["2"])]),
        ("a { b: 1 }", [("a", [[("b", ["1"])]])]),
        ("a: { b: 1 }", [("a", [[("b", ["1"])]])]),
        ("a < b: 1 >", [("a", [[("b", ["1"])]])]),
        ("a [ { b: 1 }, { b: 2 } ]", [("a", [[("b", ["1"])], [("b", ["2"])]])]),
        ("a: [ < b: X > ]", [("a", [[("b", ["X"])]])]),
        ("a: 1, b: 2; c: 3", [("a", ["1"]), ("b", ["2"]), ("c", ["3"])]),
        ("a { b: 1, c: 2; }", [("a", [[("b", ["1"]), ("c", ["2"])]])]),
        ("a:-5", [("a", ["-5"])]),
        ("a: - 5", [("a", ["-5"])]),
        ("a: -inf", [("a", ["-inf"])]),
    ],
)
def test_tree(text: str, tree: object) -> None:
    assert plain(parse(text)) == tree


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (r'"\n\t\r\\\"\'\?\a\b\f\v"', "\n\t\r\\\"'?\a\b\f\v"),
        (r'"\101\x42\u0043\U00000044"', "ABCD"),
        (r'"\303\244ö"', "äö"),
        ("'it''s'", "its"),
    ],
)
def test_escapes(text: str, value: str) -> None:
    assert scalar(text).text == value


def test_numbers() -> None:
    assert [integer(scalar(t)) for t in ("0", "17", "-3", "0x1F", "017", "-0X10")] == [0, 17, -3, 31, 15, -16]
    assert [decimal(scalar(t)) for t in ("1", "1.5", ".5", "2.", "1e3", "1.5f", "-0x10")] == [
        1,
        1.5,
        0.5,
        2,
        1000,
        1.5,
        -16,
    ]
    assert decimal(scalar("-inf")) == float("-inf")


@pytest.mark.parametrize("text", ["1.5", '"1"', "x", "08", "1e3"])
def test_not_whole(text: str) -> None:
    with pytest.raises(ConfigError, match="whole number"):
        integer(scalar(text))


@pytest.mark.parametrize("text", ['"1"', "word"])
def test_not_a_number(text: str) -> None:
    with pytest.raises(ConfigError, match="a number was expected"):
        decimal(scalar(text))


@pytest.mark.parametrize(
    ("text", "place", "words"),
    [
        ("a {\n  b: 1", "2:7", 'ends before a "}"'),
        ("a: 1\n}", "2:1", "field name was expected"),
        ("a: <b: 1}", "1:9", "field name"),
        ("a 1", "1:3", '":" or "{" was expected'),
        ("a:", "1:3", "value was expected, not the end of the file"),
        ("a: [1 2]", "1:7", '"," or "]"'),
        ("a: [1,]", "1:7", "value was expected"),
        ("a: [[1]]", "1:5", "value was expected"),
        ("a [1]", "1:4", '":" or "{"'),
        ('a: "open', "1:4", "does not end on its line"),
        ('a: "two\nlines"', "1:4", "does not end on its line"),
        ("\n\n  a: 12x", "3:6", "number that cannot be read"),
        ("a: 1.2.3", "1:4", "number that cannot be read"),
        ("a: @", "1:4", "unexpected character '@'"),
        ("[ext]: 1", "1:1", "field name"),
        (r'a: "\q"', "1:4", "unknown escape"),
        (r'a: "\400"', "1:4", "larger than a byte"),
        (r'a: "\ud800"', "1:4", "no character"),
        (r'a: "\xff"', "1:4", "UTF-8"),
        ("a: - x", "1:6", 'number was expected after "-"'),
        ("a: " + "9" * 100, "1:4", "too long"),
    ],
)
def test_errors_name_the_place(text: str, place: str, words: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse(text, "models/x/config.pbtxt")
    assert str(error.value).startswith(f"models/x/config.pbtxt:{place}: ")
    assert words in str(error.value)


def test_depth_is_limited() -> None:
    assert parse("a {" * MAX_DEPTH + "}" * MAX_DEPTH)
    with pytest.raises(ConfigError, match="deep"):
        parse("a {" * 100_000)


def test_number_of_values_is_limited() -> None:
    with pytest.raises(ConfigError, match="values"):
        parse("a: [" + "1," * 100_001 + "1]")


FRAGMENTS = st.sampled_from(
    [
        "a",
        "input",
        ":",
        "{",
        "}",
        "<",
        ">",
        "[",
        "]",
        ",",
        ";",
        "-",
        "1",
        "0x",
        "1e",
        '"',
        "'",
        "\\",
        "#",
        "\n",
        " ",
    ]
)


@settings(max_examples=150, deadline=None)
@given(st.one_of(st.text(max_size=60), st.lists(FRAGMENTS, max_size=40).map("".join)))
def test_hostile_text_gives_a_tree_or_a_config_error(text: str) -> None:
    try:
        outcome = str(parse(text).place)
    except ConfigError as error:
        outcome = str(error)
    assert outcome.startswith("config.pbtxt:")
