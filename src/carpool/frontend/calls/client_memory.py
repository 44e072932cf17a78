"""Implements clients' shared memory as front ends use it, HTTP and gRPC alike.

    fetch = memory.fetch(head, entry)     # which regions, and where everything will lie in a slot
    fetch.into(slot.view)                 # copies the inputs; in a thread if `fetch.takes_long`
    … engine.infer(entry, fetch.head, slot, 0, …) …
    fetch.outlets.put(outputs, …, then)   # copies outputs, long ones in a thread

Where the engine can, it copies them itself, into the batch that they run in (`fetch.by_engine`).

A request keeps the regions it uses, so that it finishes when they are unregistered meanwhile.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

from carpool.errors import InvalidInput, ModelError, TooLarge, Unsupported
from carpool.link.catalog import Catalog, ModelEntry
from carpool.link.engine_client import EngineClient
from carpool.memory.client_files import EXTENSION, NOT_ALLOWED, PLACE, OpenRegion, Region, region_key
from carpool.memory.layout import aligned
from carpool.observe.logs import logger
from carpool.types import Datatype, RequestedOutput, SharedMemory, Tensor
from carpool.wire.codec import to_binary
from carpool.wire.strings import Between, go_on
from carpool.wire.v2 import Placed, RequestHead, TensorHead, as_requested, check_binary

_AT_ONCE = 4 << 20  # bytes to copy in the loop: about half a millisecond
_FEW_STRINGS = 4096
_RETAINED_PLANS = 256
_CHECKED = (Datatype.BYTES, Datatype.BOOL)  # not every sequence of bytes is one of these

_log = logger("memory")

Then: TypeAlias = Callable[[Callable[[], Mapping[str, Placed]] | None], None]
"""Gets a function that says where the outputs lie, or raises why they do not."""


def names_regions(head: RequestHead) -> bool:
    for tensor in head.inputs:
        if tensor.shared_memory is not None:
            return True
    return any(output.shared_memory is not None for output in head.outputs)


class ClientMemory:
    """Keeps the regions that the catalogue names open. For one thread; what it hands out is for any."""

    def __init__(self, engine: EngineClient, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._allowed = False
        self._regions: dict[str, OpenRegion] = {}
        self._lost: dict[str, tuple[Region, str]] = {}
        self._known: dict[tuple[int, str], _Known] = {}  # by the id of its inputs, which it keeps, and owner
        engine.watch(self._renewed)

    def fetch(self, head: RequestHead, owner: str = "", *, by_engine: bool = False) -> Fetch:
        """Returns a plan for a request whose other inputs lie in the first `tail_size` bytes of the slot. The
        engine may be able to fetch them itself, if that is all there is to do for them. `owner` holds the key
        that came with it: regions of others are none."""
        inputs = head.inputs
        known = self._known.get((id(inputs), owner))
        if known is None or known.inputs is not inputs:
            known = self._learn(head, owner)
        last, by_engine = known.last, by_engine and known.plan.by_engine
        if last is None or last.asked is not head or last.by_engine is not by_engine:
            last = known.last = Fetch(head, known, self.outlets(head.outputs, owner), by_engine)
        return last

    def outlets(self, outputs: Sequence[RequestedOutput], owner: str = "") -> Outlets | None:
        """Returns where the outputs go that are wanted in regions; None when there are none."""
        if not outputs:
            return None
        found = [
            Outlet(output, place, self._find(place, f"output '{output.name}'", owner))
            for output in outputs
            if (place := output.shared_memory) is not None
        ]
        return Outlets(found) if found else None

    def _find(self, place: SharedMemory, tensor: str, owner: str) -> OpenRegion:
        region = self._regions.get(region_key(owner, place.region))
        if region is None or region.region.owner != owner:
            raise self._absent(place.region, tensor, owner)
        region.check(place, tensor)
        return region

    def _absent(self, name: str, tensor: str, owner: str) -> InvalidInput | Unsupported:
        field = f"{tensor}.parameters.shared_memory_region"
        if not self._allowed:
            return Unsupported(f"{NOT_ALLOWED} ({tensor})", field=field)
        unable = f"Unable to find shared memory region: '{name[:80]}'"
        lost = self._lost.get(region_key(owner, name))
        if lost is not None:
            why = f"it must be registered again: {lost[1]}"
            return InvalidInput(f"{unable}, for {tensor}; {why}", field=field)
        return InvalidInput(f"{unable}, for {tensor}; it is not registered", field=field)

    def _learn(self, head: RequestHead, owner: str) -> _Known:
        """To be found again by the very list of inputs: clients repeat themselves, and parsed heads are
        cached."""
        plan = _plan(head.inputs, head.tail_size)
        if plan.size > self._max_bytes:
            raise TooLarge(f"the inputs take {plan.size} bytes, more than the {self._max_bytes} allowed")
        regions = [self._find(move.place, move.owner, owner) for move in plan.moves]
        if len(self._known) >= _RETAINED_PLANS:
            self._known.clear()
        known = self._known[id(head.inputs), owner] = _Known(head.inputs, plan, regions)
        return known

    def _renewed(self, catalog: Catalog) -> None:
        """Open at once what is new: a client may remove its file as soon as it hears of success. And keep
        nothing open that is not registered any more, but for requests under way."""
        self._known.clear()
        self._allowed = EXTENSION in catalog.server.extensions
        known, self._regions = self._regions, {}
        lost, self._lost = self._lost, {}
        for name, region in catalog.regions.items():
            if name in known and known[name].region == region:
                self._regions[name] = known[name]
            elif name in lost and lost[name][0] == region:
                self._lost[name] = lost[name]
            else:
                self._open(name, region)

    def _open(self, name: str, region: Region) -> None:
        try:
            self._regions[name] = OpenRegion(region)
        except InvalidInput as error:
            self._lost[name] = region, error.message
            _log.warning("region-lost", region=region.name, key=region.key, error=error.message)


@dataclass(frozen=True, slots=True)
class _Move:
    """Represents one input, from its region to a slot."""

    owner: str
    place: SharedMemory
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class _Plan:
    """Holds what all requests with the same inputs have in common."""

    inputs: Sequence[TensorHead]
    size: int
    moves: Sequence[_Move]
    checked: Sequence[TensorHead]
    takes_long: bool
    by_engine: bool  # all of them are in regions, and none needs a check


def _plan(inputs: Sequence[TensorHead], tail_size: int) -> _Plan:
    """Places them behind the inputs that came with the request, each on a boundary that arrays like."""
    placed: list[TensorHead] = []
    moves: list[_Move] = []
    checked: list[TensorHead] = []
    end = tail_size
    for tensor in inputs:
        place = tensor.shared_memory
        if place is None:
            placed.append(tensor)
            continue
        start = aligned(end)
        end = start + place.byte_size
        placed.append(TensorHead(tensor.name, tensor.datatype, tensor.shape, start, place.byte_size))
        moves.append(_Move(f"input '{tensor.name}'", place, start, end))
        if tensor.datatype in _CHECKED:
            checked.append(placed[-1])
    strings = sum(math.prod(head.shape) for head in checked if head.datatype is Datatype.BYTES)
    copied = sum(move.end - move.start for move in moves)
    takes_long = copied > _AT_ONCE or strings > _FEW_STRINGS
    return _Plan(placed, end, moves, checked, takes_long, len(moves) == len(inputs) and not checked)


class _Known:
    """Requests with the same inputs, and the regions those lie in, for as long as none is changed."""

    __slots__ = ("inputs", "last", "places", "plan", "regions")

    def __init__(self, inputs: Sequence[TensorHead], plan: _Plan, regions: Sequence[OpenRegion]) -> None:
        self.inputs = inputs
        self.plan = plan
        self.regions = regions
        self.places = b"".join(
            PLACE.pack(region.region.number, move.place.offset)
            for move, region in zip(plan.moves, regions, strict=True)
        )
        self.last: Fetch | None = None  # most come with the very same head


class Fetch:
    """Describes a request on its way from regions to a slot of `size` bytes, where `head` finds all its
    inputs. Others that ask for the same share it: nothing in it changes."""

    __slots__ = ("_plan", "_regions", "asked", "by_engine", "head", "outlets", "size", "takes_long")

    def __init__(self, asked: RequestHead, known: _Known, outlets: Outlets | None, by_engine: bool) -> None:
        self._plan = plan = known.plan
        self._regions = known.regions
        self.asked = asked
        self.size = plan.size
        self.takes_long = plan.takes_long and not by_engine
        self.outlets = outlets
        self.by_engine = by_engine
        options, binary = asked.options, asked.binary_output
        self.head = RequestHead(asked.id, plan.inputs, asked.outputs, options, binary, plan.size, asked.batch)
        if by_engine:
            self.head.regions = known.places

    def into(self, view: memoryview, between: Between = go_on) -> None:
        """Copy the inputs and look at those that need it. Safe in any thread; raises `InvalidInput`."""
        if self.by_engine:
            return
        for move, region in zip(self._plan.moves, self._regions, strict=True):
            between()
            region.read(move.place.offset, view[move.start : move.end], move.owner)
        if self._plan.checked:
            check_binary(self._plan.checked, view, "", between)


@dataclass(frozen=True, slots=True)
class Outlet:
    output: RequestedOutput
    place: SharedMemory
    region: OpenRegion


class Outlets:
    """Describes where the outputs of one request go."""

    __slots__ = ("_outlets",)

    def __init__(self, outlets: Sequence[Outlet]) -> None:
        self._outlets = outlets

    def put(self, outputs: Sequence[Tensor], entry: ModelEntry, threads: Executor, then: Then) -> bool:
        """Write them, long ones in a thread: whether that is so. `then` gets the outcome, or None if the
        thread never came to it."""
        write = partial(self.write, outputs, entry.published.labels, batched=entry.signature.max_batch > 0)
        wanted = {outlet.output.name for outlet in self._outlets}
        if sum(tensor.data.nbytes for tensor in outputs if tensor.name in wanted) <= _AT_ONCE:
            then(write)
            return False
        work = asyncio.get_running_loop().run_in_executor(threads, write)
        work.add_done_callback(lambda work: then(None if work.cancelled() else work.result))
        return True

    def write(
        self, outputs: Sequence[Tensor], labels: Mapping[str, Sequence[str]], *, batched: bool
    ) -> dict[str, Placed]:
        """Write them all, or none if one has no room; what the answer says of each. Safe in any thread."""
        produced = {tensor.name: tensor for tensor in outputs}
        ready = []
        for outlet in self._outlets:
            name = outlet.output.name
            if name not in produced:
                raise ModelError(f"the model gave no output '{name}'", field=f"output '{name}'")
            tensor = as_requested(outlet.output, produced[name], labels.get(name, ()), batched=batched)
            data = to_binary(tensor)
            if len(data) > outlet.place.byte_size:
                raise _too_small(outlet, len(data))
            ready.append((outlet, tensor, data))
        placed = {}
        for outlet, tensor, data in ready:
            place = outlet.place
            outlet.region.write(place, data, f"output '{tensor.name}'")
            written = SharedMemory(place.region, len(data), place.offset)
            placed[tensor.name] = Placed(tensor.datatype, tensor.shape, written)
        return placed


def _too_small(outlet: Outlet, needed: int) -> InvalidInput:
    owner = f"output '{outlet.output.name}'"
    place = outlet.place
    return InvalidInput(
        f"shared memory size specified with the request for {owner} ({place.byte_size} bytes) should be at"
        f" least {needed} bytes to hold the results; the region is '{place.region}'",
        field=f"{owner}.parameters.shared_memory_byte_size",
    )
