"""Tensors of BYTES are checked, and passed on, without an object for each of their elements."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.errors import InvalidInput
from carpool.types import Datatype, Signature, Tensor, TensorSpec
from carpool.wire.codec import bind_packed, check_binary, to_binary
from carpool.wire.head import MAX_STRINGS, TensorHead
from carpool.wire.strings import PackedStrings, check_strings, split_strings, unpacked
from carpool.wire.v2 import read_head

MANY = 200_000


def head_of(shape: tuple[int, ...], view: bytes, *, framed: bool = True) -> TensorHead:
    return TensorHead("x", Datatype.BYTES, shape, 0, len(view), framed=framed)


@given(st.lists(st.binary(max_size=300), max_size=20), st.integers(0, 20), st.binary(max_size=9))
def test_what_is_checked_is_what_can_be_split(elements: list[bytes], count: int, behind: bytes) -> None:
    array = np.empty(len(elements), object)
    array[:] = elements
    packed = bytes(to_binary(Tensor("x", Datatype.BYTES, array.shape, array)))
    for shape, view in (
        ((len(elements),), packed),
        ((count,), packed),
        ((count,), packed + behind),
        ((1,), behind),
    ):
        head = head_of(shape, view)
        said = []
        for read in (check_strings, split_strings):
            try:
                split = read(head, view, "input 'x'")
            except InvalidInput as error:
                said.append(error.message)
        assert len(said) in (0, 2)
        assert len(set(said)) < 2, "both say the same"
        if not said:
            assert split is not None
            assert split.shape == shape
    assert split_strings(head_of((len(elements),), packed), packed, "").tolist() == elements


def test_checking_and_passing_on_make_no_elements() -> None:
    view = bytes(4 * MANY)
    head = head_of((MANY,), view)
    tracemalloc.start()
    check_binary([head], view, "m")
    inputs = bind_packed([head], view)
    whole = to_binary(Tensor("x", Datatype.BYTES, head.shape, inputs["x"]))
    sized = inputs["x"].nbytes, inputs["x"].shape, inputs["x"][None].shape
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 64 * 1024
    assert len(whole) == len(view)
    assert sized == (len(view), (MANY,), (1, MANY))


def test_more_elements_than_the_shape_has_are_not_counted() -> None:
    view = bytes(4 * MANY)
    for read in (check_strings, split_strings):
        tracemalloc.start()
        with pytest.raises(
            InvalidInput, match="expected 6 string elements for inference input 'x', got more"
        ):
            read(head_of((6,), view), view, "input 'x'")
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 64 * 1024


def test_packed_strings_may_be_reshaped_on_their_way() -> None:
    view = bytes(to_binary(Tensor("x", Datatype.BYTES, (2,), np.array([b"a", b"bc"], object))))
    packed = bind_packed([head_of((2,), view)], view)["x"]
    assert isinstance(packed, PackedStrings)
    for given_to, shape in ((packed, (2,)), (packed[None], (1, 2)), (packed.reshape(2, 1), (2, 1))):
        found = unpacked(given_to)
        assert type(found) is np.ndarray
        assert (found.shape, found.ravel().tolist()) == (shape, [b"a", b"bc"])
    raw = bind_packed([head_of((1,), b"abc", framed=False)], b"abc")["x"]
    assert unpacked(raw).tolist() == [b"abc"]


def test_a_request_has_so_many_strings_and_a_model_that_says_how_many_has_those() -> None:
    def asked(shape: tuple[int, ...], *rest: tuple[int, ...]) -> bytes:
        listed = ",".join(
            f'{{"name":"{name}","datatype":"BYTES","shape":{list(dims)},'
            f'"parameters":{{"binary_data_size":{4 * int(np.prod(dims))}}}}}'
            for name, dims in zip("xy", (shape, *rest), strict=False)
        )
        return f'{{"inputs":[{listed}]}}'.encode()

    def model(*shapes: tuple[int, ...]) -> Signature:
        specs = (TensorSpec(name, Datatype.BYTES, shape) for name, shape in zip("xy", shapes, strict=False))
        return Signature("m", tuple(specs), (), 4)

    loose, two = model((-1,)), model((-1,), (-1,))
    assert read_head(asked((1, MAX_STRINGS)), loose).batch == 1
    for shape in ((1, MAX_STRINGS + 1), (4, MAX_STRINGS // 4 + 1)):
        with pytest.raises(InvalidInput, match=f"at most {MAX_STRINGS:,}: send them in several") as raised:
            read_head(asked(shape), loose)
        assert raised.value.field == "input 'x'.shape"
    half = (1, MAX_STRINGS // 2)
    assert read_head(asked(half, half), two).batch == 1
    with pytest.raises(InvalidInput, match="65,537 strings up to input 'y'"):
        read_head(asked(half, (1, MAX_STRINGS // 2 + 1)), two)
    assert read_head(asked((4, MAX_STRINGS)), model((MAX_STRINGS,))).batch == 4
