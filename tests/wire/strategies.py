"""Hypothesis strategies for tensors and requests."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import strategies as st

from carpool.types import Datatype, RequestedOutput, RequestOptions, Tensor

names = st.text(st.characters(codec="utf-8"), min_size=1, max_size=12)
shapes = st.lists(st.integers(0, 4), max_size=3).map(tuple)
uints = st.integers(0, 2**64 - 1)


@st.composite
def tensors(draw: st.DrawFn, name: str, rows: int | None = None, *, json: bool = False) -> Tensor:
    """A tensor of any datatype; `json` leaves out what JSON cannot carry."""
    datatype = draw(st.sampled_from([d for d in Datatype if not (json and d.binary_only)]))
    shape = draw(shapes) if rows is None else (rows, *draw(shapes))
    count = math.prod(shape)
    if datatype is Datatype.BYTES:
        element = (
            st.text(st.characters(codec="utf-8"), max_size=5).map(str.encode)
            if json
            else st.binary(max_size=5)
        )
        data = np.empty(count, dtype=object)
        data[:] = draw(st.lists(element, min_size=count, max_size=count))
    else:
        raw = draw(st.binary(min_size=count * datatype.size, max_size=count * datatype.size))
        data = np.frombuffer(raw, np.uint8 if datatype is Datatype.BOOL else datatype.dtype)
        if datatype is Datatype.BOOL:
            data = data % 2 == 1
        if json and data.dtype.kind == "f":
            data = np.where(np.isfinite(data), data, data.dtype.type(0))
    return Tensor(name, datatype, shape, data.reshape(shape))


options = st.builds(
    RequestOptions,
    priority=uints,
    timeout=st.none() | st.integers(1, 10**9).map(lambda us: us / 1e6),
    source=st.text(st.characters(codec="utf-8").filter(str.isprintable), max_size=9),
    sequence_id=st.just(0),  # others are refused
    sequence_start=st.booleans(),
    sequence_end=st.booleans(),
    custom=st.dictionaries(names.map("x-".__add__), st.booleans() | uints | names, max_size=2),
)

requested = st.builds(RequestedOutput, names, st.booleans(), st.integers(0, 5))
