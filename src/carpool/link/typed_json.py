"""Settings and results as JSON, and back by the types that they are declared with: nothing else can come in.

What runs in the runner is users' code, so the engine reads what it says as it would a stranger's words: what
is not of the declared type is refused, and no class is made but those that the types name. Pickle would run
whatever its data names.
"""

from __future__ import annotations

import enum
import functools
import json
import os
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from carpool.core.curve import BatchCurve

T = TypeVar("T")

_IS = "is"  # the name of the class, for where the type leaves a choice
_SCALARS = (str, int, float, bool, type(None))


@dataclass(frozen=True, slots=True)
class KindsByName:
    """Represents the type of a mapping in which the name says the type of the value. A dataclass declares a
    field so by `metadata={"kinds": …}`."""

    kind_of: Callable[[str], Any]


def write_document(document: object) -> bytes:
    return json.dumps(as_json(document)).encode()


def read_document(kind: type[T], data: bytes) -> T:
    """Reads a document, and raises ValueError where it is nothing of that type. `kind` may be any type with
    arguments, too."""
    try:
        return cast(T, from_json(kind, json.loads(data)))
    except (TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from None


def as_json(value: Any) -> Any:
    if isinstance(value, enum.Enum):
        return value.value if isinstance(value, str) else value.name  # also where any str is declared
    if isinstance(value, _SCALARS):
        return value
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, BatchCurve):
        return {name: as_json(getattr(value, name)) for name in ("points", "max_batch", "buckets")}
    if is_dataclass(value) and not isinstance(value, type):
        made = {each.name: as_json(getattr(value, each.name)) for each in fields(value) if each.init}
        return {_IS: type(value).__name__, **made}
    if isinstance(value, Mapping):
        return [[as_json(key), as_json(one)] for key, one in value.items()]
    if isinstance(value, Sequence | frozenset | set):
        return [as_json(one) for one in value]
    raise TypeError(f"{type(value).__name__} cannot be sent")


def from_json(kind: Any, value: Any) -> Any:
    if isinstance(kind, KindsByName):
        return {from_json(str, name): from_json(kind.kind_of(name), one) for name, one in value}
    origin = get_origin(kind)
    if origin in (Union, types.UnionType):
        return _read_one_of(get_args(kind), value)
    if origin is not None:
        return _read_many(origin, get_args(kind), value)
    if kind in (str, int, bool, type(None)) and type(value) is kind:
        return value
    if kind is float and type(value) in (int, float):
        return float(value)
    if isinstance(kind, type):
        return _read_class(kind, value)
    raise ValueError(f"{_short(value)} is not of {kind}")


def _read_class(kind: type, value: Any) -> Any:
    if issubclass(kind, enum.Enum) and type(value) is str:
        return kind(value) if issubclass(kind, str) else kind[value]
    if issubclass(kind, Path) and type(value) is str:
        return Path(value)
    if kind is BatchCurve and type(value) is dict:
        points = from_json(tuple[tuple[int, float], ...], value["points"])
        return BatchCurve(
            points, from_json(int, value["max_batch"]), from_json(tuple[int, ...], value["buckets"])
        )
    if is_dataclass(kind) and type(value) is dict and value.get(_IS) == kind.__name__:
        declared = _declared(kind)
        given = {name: one for name, one in value.items() if name != _IS}
        if not given.keys() <= declared.keys():
            raise ValueError(f"{kind.__name__} has no {', '.join(given.keys() - declared.keys())}")
        return kind(**{name: from_json(declared[name], one) for name, one in given.items()})
    raise ValueError(f"{_short(value)} is not of {kind.__name__}")


@functools.cache
def _declared(kind: type) -> Mapping[str, Any]:
    hints = get_type_hints(kind)
    for each in fields(kind):
        if "kinds" in each.metadata:
            hints[each.name] = KindsByName(each.metadata["kinds"])
    return {each.name: hints[each.name] for each in fields(kind) if each.init}


def _read_one_of(kinds: Sequence[Any], value: Any) -> Any:
    for kind in kinds:
        try:
            return from_json(kind, value)
        except (ValueError, KeyError, TypeError):
            continue
    raise ValueError(f"{_short(value)} is none of {kinds}")


def _read_many(origin: Any, inner: Sequence[Any], value: Any) -> Any:
    if type(value) is not list:
        raise ValueError(f"{_short(value)} is no list")
    if issubclass(origin, Mapping):
        return {from_json(inner[0], key): from_json(inner[1], one) for key, one in value}
    if origin is tuple and inner[-1] is not Ellipsis:
        if len(inner) != len(value):
            raise ValueError(f"{len(value)} values instead of {len(inner)}")
        return tuple(from_json(one, each) for one, each in zip(inner, value, strict=True))
    found = [from_json(inner[0], one) for one in value]
    return found if origin is list else frozenset(found) if origin is frozenset else tuple(found)


def _short(value: object) -> str:
    return repr(value)[:100]


@contextmanager
def as_file(document: object) -> Iterator[int]:
    """Yields a file with this in it, to be sent along with a message, whatever its length."""
    fd = os.memfd_create("carpool-document", os.MFD_CLOEXEC)
    try:
        with open(fd, "wb", closefd=False) as file:
            file.write(write_document(document))
        yield fd
    finally:
        os.close(fd)


def from_file(kind: type[T], fd: int) -> T:
    """Closes it. ValueError where it holds nothing of that kind."""
    with open(fd, "rb") as file:
        file.seek(0)
        return read_document(kind, file.read())
