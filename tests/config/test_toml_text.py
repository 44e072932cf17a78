"""What a settings file would have a parser build is limited before it is parsed."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.config.toml import toml_config
from carpool.config.toml_text import parse_toml
from carpool.config.triton import pbtxt_config, read_override
from carpool.errors import ConfigError


def test_what_a_parser_would_build_is_limited_before() -> None:
    """Each of these takes a parser seconds or gigabytes, and a glance finds the line."""
    long = ".".join(["a"] * 20_000)
    for text, line, why in (
        (f"\n{long} = 1", 2, "a key of more than 32 parts"),
        (f'x = """\n\n"""\n[{long}]', 4, "a key of more than 32 parts"),
        (f"x = {{ {' . '.join(['a'] * 40)} = 1 }}", 1, "a key of more than 32 parts"),
        ("x = '''\n'''\na = " + "{b=" * 40, 3, "nested too deep: more than 32"),
        ("# [[[\n\na = [" + "0," * 200_000 + "]", 3, "more than 100000 values"),
        ("a = " + "[" * 100_000, 1, "nested too deep"),
        ("[[a]]\n" * 60_000, 50_001, "more than 100000 values"),
    ):
        with pytest.raises(ConfigError) as found:
            toml_config(text, Path("m/model.toml"))
        assert str(found.value).startswith(f"m/model.toml:{line}: {why}")


def test_strings_and_comments_are_not_counted() -> None:
    dots, open_brackets = ".a" * 40, "[{" * 40
    for text in (
        f'x = "{dots}{open_brackets}\\"{dots}"',
        f"x = '{dots}{open_brackets}'",
        f'x = """{dots}"" \\"""{open_brackets}"""""',
        f"x = '''{dots}''{open_brackets}'''''",
        f"x = 1 # {dots}{open_brackets}",
        f'"{dots}" = 1',
        "x = 1.5e1\ny = [1.5, 2.5]",
    ):
        assert parse_toml(text, "file") == tomllib.loads(text)


@given(
    st.lists(
        st.sampled_from(["'", '"', "\\", "\n", "#", ".", "a", "[", "]", "{", "=", ",", " "]), max_size=60
    )
)
def test_what_is_small_is_parsed_as_before(pieces: list[str]) -> None:
    text = "".join(pieces)
    try:
        expected = tomllib.loads(text)
    except ValueError:
        with pytest.raises(ConfigError):
            parse_toml(text, "file")
    else:
        assert parse_toml(text, "file") == expected


def test_messages_of_triton_are_counted() -> None:
    with pytest.raises(ConfigError, match=r"m/config\.pbtxt:1:700006: more than 100000 values"):
        pbtxt_config("input{}" * 100_001, Path("m/config.pbtxt"))
    with pytest.raises(ConfigError, match=r"config: more than 100000 values"):
        read_override(json.dumps({"input": [{}] * 100_001}), Path("m"), "m")


def test_a_key_that_is_set_twice_is_named_with_both_lines() -> None:
    for text, said in (
        ("slo_ms = 50\nmax_batch = 8\nslo_ms = 60\n", "m.toml:3: slo_ms is set twice: on line 1, too"),
        ("[image]\nsize = 3\n\nsize = 4", "m.toml:4: size is set twice: on line 2, too"),
    ):
        with pytest.raises(ConfigError) as caught:
            parse_toml(text, "m.toml")
        assert caught.value.message == said
    lists = "[[input]]\nname = 'a'\n[[input]]\nname = 'b'\nname = 'c'\n"
    with pytest.raises(ConfigError, match=r"m.toml:5: name is set twice: on line 4, too"):
        parse_toml(lists, "m.toml")
    assert parse_toml(lists.replace("name = 'c'\n", ""), "m.toml")["input"] == [{"name": "a"}, {"name": "b"}]
    with pytest.raises(ConfigError, match=r"m\.toml: Cannot declare"):
        parse_toml("[a]\n[a]\n", "m.toml")
