"""Requests whose tensors lie in clients' memory: brought in, put out, and refused with the reason."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from carpool.errors import CarpoolError, InvalidInput, TooLarge, Unsupported
from carpool.frontend.calls.client_memory import ClientMemory, names_regions
from carpool.link.catalog import PublishedServer
from carpool.memory.client_files import EXTENSION, PLACE, Region, region_key
from carpool.types import Datatype, RequestedOutput, RequestOptions, SharedMemory, Tensor
from carpool.wire.v2 import RequestHead, TensorHead, bind
from frontend.client_files import client_file
from frontend.fake_door import FakeDoor

U8 = Datatype.UINT8


def memory_of(*regions: Region, max_bytes: int = 1 << 20) -> tuple[ClientMemory, FakeDoor]:
    door = FakeDoor()
    memory = ClientMemory(door, max_bytes)
    renew(door, *regions)
    return memory, door


def renew(door: FakeDoor, *regions: Region) -> None:
    door.renew(
        regions={region.name: region for region in regions}, server=PublishedServer(extensions=[EXTENSION])
    )


def in_region(name: str, size: int, offset: int = 0, datatype: Datatype = U8, **rest: Any) -> TensorHead:
    place = SharedMemory("r", size, offset)
    shape = rest.pop("shape", (1, size // max(1, datatype.size)))
    return TensorHead(name, datatype, shape, shared_memory=place, **rest)


def request(*inputs: TensorHead, outputs: Any = (), tail_size: int = 0) -> RequestHead:
    return RequestHead("id", list(inputs), list(outputs), RequestOptions(), False, tail_size)


def brought(memory: ClientMemory, head: RequestHead, tail: bytes = b"") -> dict[str, Any]:
    fetch = memory.fetch(head)
    view = memoryview(bytearray(fetch.size))
    view[: len(tail)] = tail
    fetch.into(view)
    return {tensor.name: tensor.data for tensor in bind(fetch.head.inputs, view)}


def refusal(memory: ClientMemory, head: RequestHead) -> CarpoolError:
    with pytest.raises(CarpoolError) as raised:
        brought(memory, head)
    return raised.value


# ── inputs ──


@given(st.data())
def test_every_input_arrives_where_the_head_says(data: st.DataObject) -> None:
    content = bytes(np.random.default_rng(1).integers(0, 256, 512, np.uint8))
    inputs, expected, tail = [], {}, b""
    with client_file(content) as file:
        base = data.draw(st.integers(0, 100))
        memory, _ = memory_of(file.region(offset=base))
        for index in range(data.draw(st.integers(1, 5))):
            size, name = data.draw(st.integers(0, 64)), str(index)
            if data.draw(st.booleans()):
                offset = data.draw(st.integers(0, 512 - base - size))
                inputs.append(in_region(name, size, offset))
                expected[name] = content[base + offset :][:size]
            else:
                inputs.append(TensorHead(name, U8, (1, size), len(tail), size))
                expected[name] = bytes([index]) * size
                tail += expected[name]
        found = brought(memory, request(*inputs, tail_size=len(tail)), tail)
    assert {name: array.tobytes() for name, array in found.items()} == expected


def test_a_repeated_request_has_the_same_inputs_object() -> None:
    """The link finds its templates by identity."""
    with client_file(bytes(8)) as file:
        memory, _ = memory_of(file.region())
        head = request(in_region("x", 8))
        first, second = memory.fetch(head), memory.fetch(head)
        assert first.head.inputs is second.head.inputs
        assert (first.head.id, first.head.outputs) == ("id", head.outputs)


def test_a_repeated_head_is_fetched_in_the_same_way_until_a_region_changes() -> None:
    with client_file(bytes([1]) * 8) as first, client_file(bytes([2]) * 8) as second:
        one, other = first.region(), second.region()
        memory, door = memory_of(one)
        head = request(in_region("x", 8))
        fetch = memory.fetch(head, by_engine=True)
        assert memory.fetch(head, by_engine=True) is fetch
        assert PLACE.unpack(fetch.head.regions) == (one.number, 0)
        renew(door, other)
        again = memory.fetch(head, by_engine=True)
        assert PLACE.unpack(again.head.regions) == (other.number, 0)
        assert brought(memory, head)["x"].tolist() == [[2] * 8]
        renew(door)
        assert "not registered" in refusal(memory, head).message


def test_heads_with_the_same_inputs_keep_what_is_their_own() -> None:
    with client_file(bytes(16)) as file:
        memory, _ = memory_of(file.region())
        head = request(in_region("x", 8))
        alike = RequestHead("other", head.inputs, [wanted("y", 4, 8)], RequestOptions(priority=3), True, 0)
        for _ in range(2):
            first, second = memory.fetch(head), memory.fetch(alike)
            assert (first.head.id, second.head.id) == ("id", "other")
            assert (first.head.options.priority, second.head.options.priority) == (0, 3)
            assert first.outlets is None
            assert second.outlets is not None
        for by_engine in (True, False, True):
            assert bool(memory.fetch(head, by_engine=by_engine).head.regions) == by_engine


def test_what_is_remembered_of_requests_keeps_no_memory_that_is_not_registered() -> None:
    with client_file(bytes(8)) as file:
        memory, door = memory_of(file.region())
        memory.fetch(request(in_region("x", 8)))
        assert file.descriptors() == 1
        renew(door)
        assert file.descriptors() == 0


def test_plans_are_bounded() -> None:
    with client_file(bytes(8)) as file:
        memory, _ = memory_of(file.region())
        heads = [request(in_region("x", 8)) for _ in range(600)]
        for head in heads:
            memory.fetch(head)
        assert len(memory._known) <= 256
        assert brought(memory, heads[0])["x"].size == 8


@pytest.mark.parametrize(
    ("datatype", "shape", "content", "words"),
    [
        (Datatype.BYTES, (2,), b"\3\0\0\0abc\0\0\0\0", None),
        (Datatype.BYTES, (2,), b"\3\0\0\0abc\xff\xff\xff\xff", "expected 2 string elements"),
        (Datatype.BYTES, (1,), b"\3\0\0\0abc\0\0\0\0", "expected 1 string elements"),
        (Datatype.BOOL, (3,), b"\0\1\1", None),
        (Datatype.BOOL, (3,), b"\0\1\2", "0 or 1"),
    ],
)
def test_elements_are_looked_at(
    datatype: Datatype, shape: tuple[int, ...], content: bytes, words: str | None
) -> None:
    with client_file(content) as file:
        memory, _ = memory_of(file.region())
        head = request(in_region("x", len(content), datatype=datatype, shape=shape))
        if words is None:
            assert brought(memory, head)["x"].shape == shape
        else:
            assert words in refusal(memory, head).message


def test_what_takes_long_says_so() -> None:
    with client_file(bytes(5 << 20)) as file:
        memory, _ = memory_of(file.region(), max_bytes=8 << 20)
        assert not memory.fetch(request(in_region("x", 4 << 20))).takes_long
        assert memory.fetch(request(in_region("x", (4 << 20) + 1))).takes_long
        many = in_region("x", 40_000, datatype=Datatype.BYTES, shape=(10_000,))
        assert memory.fetch(request(many)).takes_long


def test_inputs_are_bounded_as_bodies_are() -> None:
    with client_file(bytes(100)) as file:
        memory, _ = memory_of(file.region(), max_bytes=99)
        assert isinstance(refusal(memory, request(in_region("x", 100))), TooLarge)


# ── regions ──


def test_a_region_that_is_not_there() -> None:
    memory, door = memory_of()
    error = refusal(memory, request(in_region("x", 8)))
    assert isinstance(error, InvalidInput)
    assert error.message == "Unable to find shared memory region: 'r', for input 'x'; it is not registered"
    door.renew(server=PublishedServer())
    error = refusal(memory, request(in_region("x", 8)))
    assert isinstance(error, Unsupported)
    assert "--allow-client-shm" in error.message


def test_a_file_that_was_gone_before_we_came() -> None:
    with client_file(bytes(8)) as file:
        region = file.region()
    memory, door = memory_of(region)
    assert "must be registered again" in refusal(memory, request(in_region("x", 8))).message
    with client_file(bytes(8)) as file:
        renew(door, file.region())
        assert brought(memory, request(in_region("x", 8)))


def test_a_file_may_be_removed_once_the_catalogue_is_here() -> None:
    with client_file(b"12345678") as file:
        memory, door = memory_of(file.region())
        region = door.catalog.regions["r"]
        file.path.unlink()
        renew(door, region)  # a later catalogue still has it
        assert brought(memory, request(in_region("x", 8)))["x"].tobytes() == b"12345678"


def test_a_request_under_way_keeps_its_regions() -> None:
    with client_file(b"12345678") as file:
        memory, door = memory_of(file.region())
        fetch = memory.fetch(request(in_region("x", 8), outputs=[wanted("y", 4)]))
        renew(door)
        assert "not registered" in refusal(memory, request(in_region("x", 8))).message
        view = memoryview(bytearray(fetch.size))
        fetch.into(view)
        assert fetch.outlets is not None
        fetch.outlets.write([tensor("y", b"abcd")], {}, batched=False)
        assert (bytes(view), file.read()) == (b"12345678", b"abcd5678")
        assert file.descriptors() == 1
        del fetch
        assert file.descriptors() == 0


def test_a_name_that_is_registered_anew_is_another_region() -> None:
    with client_file(b"old") as old, client_file(b"new") as new:
        memory, door = memory_of(old.region())
        head = request(in_region("x", 3))
        assert brought(memory, head)["x"].tobytes() == b"old"
        renew(door, new.region())
        assert brought(memory, head)["x"].tobytes() == b"new"
        assert (old.descriptors(), new.descriptors()) == (0, 1)


# ── outputs ──


def wanted(name: str, size: int, offset: int = 0, **rest: Any) -> RequestedOutput:
    return RequestedOutput(name, shared_memory=SharedMemory("r", size, offset), **rest)


def tensor(name: str, content: bytes) -> Tensor:
    data = np.frombuffer(content, np.uint8)
    return Tensor(name, U8, data.shape, data)


def test_outputs_lie_where_they_were_wanted() -> None:
    with client_file(bytes(16)) as file:
        memory, _ = memory_of(file.region(offset=2))
        outputs = [wanted("a", 8, 1), RequestedOutput("b"), wanted("c", 2, 10)]
        outlets = memory.outlets(outputs)
        assert outlets is not None
        produced = [tensor("c", b"CC"), tensor("b", b"B"), tensor("a", b"AAA")]
        placed = outlets.write(produced, {}, batched=False)
        assert file.read() == b"\0\0\0AAA\0\0\0\0\0\0CC\0\0"
        assert {name: (at.shape, at.place) for name, at in placed.items()} == {
            "a": ((3,), SharedMemory("r", 3, 1)),
            "c": ((2,), SharedMemory("r", 2, 10)),
        }
        assert memory.outlets([RequestedOutput("b")]) is None


def test_without_room_for_one_none_is_written() -> None:
    with client_file(bytes(16)) as file:
        memory, _ = memory_of(file.region())
        outlets = memory.outlets([wanted("a", 8), wanted("b", 3, 8)])
        assert outlets is not None
        with pytest.raises(
            InvalidInput, match=r"output 'b' \(3 bytes\) should be at least 4 bytes to hold"
        ) as raised:
            outlets.write([tensor("a", b"AAAA"), tensor("b", b"BBBB")], {}, batched=False)
        assert raised.value.field == "output 'b'.parameters.shared_memory_byte_size"
        assert file.read() == bytes(16)


def test_a_region_that_shrank_before_the_answer() -> None:
    with client_file(bytes(16)) as file:
        memory, _ = memory_of(file.region())
        outlets = memory.outlets([wanted("a", 16)])
        file.shrink(4)
        assert outlets is not None
        with pytest.raises(InvalidInput, match="has shrunk"):
            outlets.write([tensor("a", b"AAAAAAAA")], {}, batched=False)
        assert file.read() == bytes(4)


def test_strings_and_classes_are_written_with_their_lengths() -> None:
    with client_file(bytes(64)) as file:
        memory, _ = memory_of(file.region())
        outlets = memory.outlets([wanted("s", 16), wanted("c", 32, 16, classification=1)])
        assert outlets is not None
        strings = np.array([b"ab", b""], object)
        scores = np.array([[1.0, 3.0]], np.float32)
        produced = [Tensor("s", Datatype.BYTES, (2,), strings), Tensor("c", Datatype.FP32, (1, 2), scores)]
        placed = outlets.write(produced, {"c": ("cat", "dog")}, batched=True)
        assert file.read()[:10] == b"\2\0\0\0ab\0\0\0\0"
        assert file.read()[20:34] == b"3.000000:1:dog"
        assert placed["s"].place.byte_size == 10
        assert (placed["c"].datatype, placed["c"].shape) == (Datatype.BYTES, (1, 1))


def test_bounds_are_checked_before_the_model_runs() -> None:
    with client_file(bytes(8)) as file:
        memory, _ = memory_of(file.region())
        with pytest.raises(InvalidInput, match="output 'y' takes 8 bytes from 1 on"):
            memory.outlets([wanted("y", 8, 1)])


def test_which_requests_name_regions() -> None:
    plain = TensorHead("x", U8, (1, 1), 0, 1)
    assert not names_regions(request(plain))
    assert names_regions(request(plain, in_region("z", 1)))
    assert names_regions(request(plain, outputs=[wanted("y", 1)]))


def test_a_region_of_another_key_is_none() -> None:
    with client_file(bytes(8)) as file:
        door = FakeDoor()
        memory = ClientMemory(door, 1 << 20)
        region = replace(file.region(), owner="alice")
        door.renew(regions={region_key("alice", "r"): region}, server=PublishedServer(extensions=[EXTENSION]))
        head = request(in_region("x", 8), outputs=[wanted("y", 4)])
        for _ in range(2):  # parsed heads are shared by those who send the same
            assert memory.fetch(head, "alice").outlets is not None
            for owner in ("", "bob"):
                with pytest.raises(InvalidInput, match="it is not registered"):
                    memory.fetch(head, owner)
                with pytest.raises(InvalidInput, match="it is not registered"):
                    memory.outlets(head.outputs, owner)
        forged = RequestedOutput("y", shared_memory=SharedMemory(region_key("alice", "r"), 4))
        with pytest.raises(InvalidInput):
            memory.outlets([forged])
