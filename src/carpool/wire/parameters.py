"""The `parameters` objects of a request: known keys are checked and typed, unknown ones kept."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from carpool.errors import InvalidInput
from carpool.types import RequestOptions, Scalar, SharedMemory

DEFAULT_OPTIONS = RequestOptions()
MAX_SOURCE_CHARS = 128
_NO_PARAMETERS: dict[str, Any] = {}
_RESERVED_PREFIX = "triton_"
_FINAL_RESPONSE = "triton_enable_empty_final_response"


def shorten(text: str) -> str:
    """Quote what a client sent, without letting it fill the error."""
    return f"'{text}'" if len(text) <= 80 else f"'{text[:80]}…'"


def read_uint(value: Any, field: str) -> int:
    if type(value) is not int or value < 0:
        raise InvalidInput(f"{field} must be an integer of 0 or more", field=field)
    return value


def read_bool(value: Any, field: str) -> bool:
    if type(value) is not bool:
        raise InvalidInput(f"{field} must be true or false", field=field)
    return value


def read_object(value: Any, field: str) -> dict[str, Any]:
    """The `parameters` of one thing; absent or null is empty."""
    if value is None:
        return _NO_PARAMETERS
    if type(value) is not dict:
        raise InvalidInput(f"{field} must be a JSON object", field=field)
    return value


def _read_timeout(value: Any, field: str) -> float | None:
    return read_uint(value, field) / 1e6 or None  # the wire's microseconds; 0 means none


def read_source(value: Any, field: str) -> str:
    """Who asks: the same rule for the parameter and for the header."""
    if type(value) is not str or len(value) > MAX_SOURCE_CHARS or not value.isprintable():
        raise InvalidInput(
            f"{field} must be printable text of at most {MAX_SOURCE_CHARS} characters", field=field
        )
    return value


def _read_sequence_id(value: Any, field: str) -> int | str:
    return value if type(value) is str else read_uint(value, field)


_OPTIONS: Mapping[str, Callable[[Any, str], Any]] = {
    "priority": read_uint,
    "timeout": _read_timeout,
    "source": read_source,
    "latest": read_bool,
    "sequence_id": _read_sequence_id,
    "sequence_start": read_bool,
    "sequence_end": read_bool,
}


def read_options(parameters: dict[str, Any]) -> tuple[RequestOptions, bool]:
    """The request's options, and whether outputs are binary unless they say otherwise."""
    binary_output = False
    known: dict[str, Any] = {}
    custom: dict[str, Scalar] = {}
    for key, value in parameters.items():
        reader = _OPTIONS.get(key)
        if reader is not None:
            known[key] = reader(value, f"parameters.{key}")
        elif key == "binary_data_output":
            binary_output = read_bool(value, "parameters.binary_data_output")
        else:
            custom[key] = _read_custom(key, value)
    if not known and not custom:
        return DEFAULT_OPTIONS, binary_output
    return RequestOptions(custom=custom, **known), binary_output


def _read_custom(key: str, value: Any) -> Scalar:
    if key == "headers" or (key.startswith(_RESERVED_PREFIX) and key != _FINAL_RESPONSE):
        raise InvalidInput(f"parameter {shorten(key)} is reserved", field=f"parameters.{key[:80]}")
    if key == _FINAL_RESPONSE:
        return read_bool(value, f"parameters.{key}")
    if type(value) not in (bool, int, float, str):
        raise InvalidInput(
            f"parameter {shorten(key)} must be a string, a number or a bool", field=f"parameters.{key[:80]}"
        )
    scalar: Scalar = value
    return scalar


def write_options(options: RequestOptions) -> dict[str, Scalar]:
    """The same parameters as a client sends them: defaults are left out."""
    document: dict[str, Scalar] = dict(options.custom)
    for key in _OPTIONS:
        value = getattr(options, key)
        if value != getattr(DEFAULT_OPTIONS, key):
            document[key] = round(value * 1e6) if key == "timeout" else value
    return document


def read_shared_memory(parameters: dict[str, Any], owner: str) -> SharedMemory:
    region = parameters["shared_memory_region"]
    if type(region) is not str or not region:
        field = f"{owner}.parameters.shared_memory_region"
        raise InvalidInput(f"{field} must be the name of a region", field=field)
    if "shared_memory_byte_size" not in parameters:
        field = f"{owner}.parameters.shared_memory_byte_size"
        raise InvalidInput(f"{field} is missing", field=field)
    byte_size = read_uint(
        parameters["shared_memory_byte_size"], f"{owner}.parameters.shared_memory_byte_size"
    )
    offset = read_uint(parameters.get("shared_memory_offset", 0), f"{owner}.parameters.shared_memory_offset")
    return SharedMemory(region, byte_size, offset)


def write_shared_memory(place: SharedMemory) -> dict[str, Scalar]:
    return {
        "shared_memory_region": place.region,
        "shared_memory_byte_size": place.byte_size,
        "shared_memory_offset": place.offset,
    }
