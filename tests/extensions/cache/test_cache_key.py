"""What makes two requests the same: every field of a request is in the key, or said to change nothing."""

from __future__ import annotations

from dataclasses import fields, replace
from math import inf
from typing import Any

import pytest

from carpool.errors import InvalidInput
from carpool.extensions.cache.cache_key import (
    ANY,
    CHANGES_NOTHING,
    IN_KEY,
    NOT_CACHED,
    Digests,
    Wish,
    by_blake2b,
    by_sha256,
    describe,
    fastest_keyed,
    read_cache_control,
)
from carpool.types import Datatype, RequestedOutput, RequestOptions, SharedMemory
from carpool.vision.picture_answers import Options
from carpool.vision.tasks import kinds, read_options
from carpool.wire.head import RequestHead, TensorHead

KINDS = (RequestHead, TensorHead, RequestedOutput, RequestOptions, Options)
HEAD = RequestHead(
    "", (TensorHead("x", Datatype.FP32, (2, 3), 0, 24),), (RequestedOutput("y"),), RequestOptions(), False, 24
)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_field_of_a_request_is_somewhere(kind: type[Any]) -> None:
    name = kind.__name__
    said = [*IN_KEY.get(name, ()), *NOT_CACHED.get(name, ()), *CHANGES_NOTHING.get(name, ())]
    assert sorted(said) == sorted(field.name for field in fields(kind)), "decide what a new field changes"


def test_every_option_of_every_task_has_a_field_or_is_an_extra() -> None:
    known = {field.name for field in fields(Options)}
    own = {name for kind in kinds().values() for name in kind.options}
    assert own - known == {"max_tokens"}, "others are in Options.extra, which is in the key"
    assert read_options({"max_tokens": "5"}).extra == {"max_tokens": 5}


def changed_heads() -> dict[str, RequestHead]:
    given, wanted = HEAD.inputs[0], HEAD.outputs[0]
    inputs = {
        "name": "z",
        "datatype": Datatype.INT32,
        "shape": (3, 2),
        "size": 23,
        "framed": False,
    }
    outputs = {"name": "z", "binary": True, "classification": 3}
    return {
        **{f"input.{key}": replace(HEAD, inputs=(replace(given, **{key: v}),)) for key, v in inputs.items()},
        **{
            f"output.{key}": replace(HEAD, outputs=(replace(wanted, **{key: v}),))
            for key, v in outputs.items()
        },
        "no outputs": replace(HEAD, outputs=()),
        "binary": replace(HEAD, binary_output=True),
        "custom": replace(HEAD, options=RequestOptions(custom={"a": 1})),
        "custom, other type": replace(HEAD, options=RequestOptions(custom={"a": "1"})),
    }


def test_each_of_them_changes_the_key() -> None:
    said = [describe("http", head) for head in (HEAD, *changed_heads().values())]
    said.append(describe("grpc", HEAD))
    assert None not in said
    assert len(set(said)) == len(said)


def test_each_option_of_a_picture_changes_the_key() -> None:
    other = Options(9, 0.1, 0.2, 3, 0.4, "rle", True, {"mine": 1})
    options = [replace(Options(), **{name: getattr(other, name)}) for name in IN_KEY["Options"]]
    said = {describe("picture", HEAD, (), one) for one in (Options(), *options)}
    said |= {describe("picture", HEAD, (), Options(), "jpeg"), describe("picture", HEAD, (7,), Options())}
    assert len(said) == len(options) + 3


def test_what_belongs_to_one_request_alone_does_not() -> None:
    options = RequestOptions(priority=3, timeout=1.0, source="camera", latest=True)
    other = replace(HEAD, id="7", batch=2, plain=True, options=options)
    assert describe("http", other) == describe("http", HEAD)


@pytest.mark.parametrize("what", ["input", "output", "sequence_id", "sequence_start", "sequence_end"])
def test_what_is_never_looked_up(what: str) -> None:
    place = SharedMemory("region", 24)
    heads = {
        "input": replace(HEAD, inputs=(replace(HEAD.inputs[0], shared_memory=place),)),
        "output": replace(HEAD, outputs=(replace(HEAD.outputs[0], shared_memory=place),)),
    }
    value = 1 if what == "sequence_id" else True
    head = heads.get(what) or replace(HEAD, options=replace(RequestOptions(), **{what: value}))
    assert describe("http", head) is None


def test_digests_tell_bytes_apart_and_keys_too() -> None:
    mine, others = Digests(), Digests()
    said = mine.said(b"a")
    for digest, asked in ((mine.fast, said), (mine.sure, b"a")):
        assert digest(asked, (b"bc",)) == digest(asked, (b"b", memoryview(b"c")))
        assert digest(asked, (b"bc",)) != digest(asked, (b"bd",))
    assert mine.fast(said, (b"bc",)) != mine.fast(mine.said(b"b"), (b"bc",))
    assert mine.fast(said, ()) != others.fast(others.said(b"a"), ())
    assert mine.sure(b"a", ()) != others.sure(b"a", ())
    assert Digests("secret" * 4).sure(b"a", (b"b",)) == Digests("secret" * 4).sure(b"a", (b"b",))
    assert Digests("secret" * 4).sure(b"a", ()) != Digests("secrets" * 4).sure(b"a", ())


def test_the_fastest_keyed_digest_is_one_of_the_two() -> None:
    assert fastest_keyed() in (by_blake2b, by_sha256)
    assert len(by_blake2b(b"k", b"said", (b"bytes",))) == len(by_sha256(b"k", b"said", (b"bytes",))) == 16


@pytest.mark.parametrize(
    ("field", "wish"),
    [
        (None, ANY),
        (b"", ANY),
        (b"no-cache", Wish(look=False)),
        (b"No-Store", Wish(False, False)),
        (b"max-age=5", Wish(max_age=5.0)),
        (b'private, max-age="0" , x=y=z', Wish(max_age=0.0)),
        (b"no-cache, no-store", Wish(False, False)),
        (b"\xff\xfe,,;=", ANY),
    ],
)
def test_cache_control(field: bytes | None, wish: Wish) -> None:
    assert read_cache_control(field) == wish
    assert ANY.max_age == inf


def test_a_max_age_without_a_number_is_told() -> None:
    with pytest.raises(InvalidInput) as caught:
        read_cache_control(b"max-age")
    assert caught.value.field == "Cache-Control"
