"""Sends requests that the server itself makes: for clients of other protocols, and where there is no
client."""

from __future__ import annotations

from collections.abc import Mapping
from time import monotonic

import numpy as np

from carpool.errors import CarpoolError, InvalidInput
from carpool.frontend.calls.call_service import CallService
from carpool.frontend.calls.request import Request
from carpool.frontend.calls.request_facts import RequestReply
from carpool.link.catalog import ModelEntry
from carpool.link.senders import Sender
from carpool.types import Array, Datatype
from carpool.wire.head import DEFAULT_OPTIONS, RequestHead, TensorHead
from carpool.wire.v2 import check_head


def send(
    service: CallService,
    entry: ModelEntry,
    inputs: Mapping[str, Array],
    reply: RequestReply,
    sender: Sender,
    deadline: float,
) -> Request:
    """Sends tensors, batch dimension included, in the lane of this version: what wraps its clients' requests
    wraps this one. `reply` gets what comes of it, perhaps before this returns."""
    now = monotonic()
    request = Request(service, reply, sender, deadline, now)
    request.enter(service.lane(entry))
    try:
        head, pieces = _read(entry, inputs)
        request.offer_pieces(head, pieces, checked=True)
    except CarpoolError as error:
        request.fail(error)
    return request


def _read(entry: ModelEntry, inputs: Mapping[str, Array]) -> tuple[RequestHead, list[memoryview]]:
    heads, pieces, offset = [], [], 0
    for name, array in inputs.items():
        spec = entry.signature.input_named.get(name)
        if spec is None or spec.datatype is Datatype.BYTES:
            raise InvalidInput(f"{entry.name} takes no tensor of numbers called {name}", field=name)
        data = np.ascontiguousarray(array, spec.datatype.dtype)
        heads.append(TensorHead(name, spec.datatype, data.shape, offset, data.nbytes))
        pieces.append(data.reshape(-1).view(np.uint8).data)
        offset += data.nbytes
    head = RequestHead("", heads, (), DEFAULT_OPTIONS, binary_output=True, tail_size=offset)
    return check_head(head, entry.signature), pieces
