"""Reads the JSON head of a message: which tensors it lists, and where their bytes lie in the tail behind it.

Reading a head needs no tensor bytes, so a server does it while the body is still arriving.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import numpy as np
import orjson

from carpool.errors import InvalidInput
from carpool.types import DATATYPES, Datatype, RequestedOutput, RequestOptions, Scalar, SharedMemory

if TYPE_CHECKING:
    from carpool.wire.long_json import LongNumbers, ShortJson

Buffer: TypeAlias = bytes | bytearray | memoryview

MAX_TENSORS = 1024
MAX_PARAMETERS = 1024  # of a request, an input or an output
MAX_STRINGS = 65_536
"""Elements of BYTES in a request, in all inputs whose shapes the model leaves open: each is an object."""
MAX_RANK = 32  # numpy 1.x allows no more
MAX_ELEMENTS = 2**40
MAX_JSON_VALUES = 4_000_000  # by its commas
MAX_JSON_LISTS = 500_000  # and objects
_FEW_JSON_VALUES = 100_000  # of a document without tensors
_FEW_JSON_LISTS = 10_000
_SHORT_JSON = 64 * 1024
_AS_BINARY = ": send tensors as binary"
_MOST_LEFT = 4 << 20  # bytes of a long document when all that is long was cut out
_LOOKED_AT = 256 * 1024


@dataclass(slots=True)
class TensorHead:
    """Describes one listed tensor. Its data is in the tail (`offset`, `size`), in the JSON (`data`), or
    elsewhere."""

    name: str
    datatype: Datatype
    shape: tuple[int, ...]
    offset: int = 0
    size: int = 0
    data: list[Any] | LongNumbers | None = None
    shared_memory: SharedMemory | None = None
    framed: bool = True  # BYTES elements carry their length; a raw request's body does not


@dataclass(slots=True)
class RequestHead:
    """Describes an infer request without its tensor bytes. Heads are cached and shared: never change one."""

    id: str
    inputs: Sequence[TensorHead]
    outputs: Sequence[RequestedOutput]
    options: RequestOptions
    binary_output: bool
    tail_size: int
    batch: int = 1  # right once the head was checked against a model
    encoded: bool = False  # the tail is a picture's file behind its length; only within the server
    plain: bool = False  # once checked: any bytes of the right size are good, and need no further check
    regions: bytes = b""  # from where in clients' memory the engine is to fetch its inputs, all of them


def parse_head(json: Buffer, model: str = "") -> RequestHead:
    """Read a request's JSON; `model` is for its errors. Whether it fits is for `check_head` to say."""
    return parse_document(load_object(json, "request"), model)


def parse_document(document: dict[str, Any], model: str = "") -> RequestHead:
    request_id = document.get("id", "")
    if type(request_id) is not str:
        raise InvalidInput("id must be a string", field="id")
    options, binary_output = read_options(read_object(document.get("parameters"), "parameters"))
    inputs, tail_size = parse_tensors(document, "input", model)
    outputs = parse_requested(document.get("outputs"))
    return RequestHead(request_id, inputs, outputs, options, binary_output, tail_size)


def load_object(json: Buffer, what: str, *, tensors: bool = True) -> dict[str, Any]:
    """Returns a JSON object. Without `tensors` it has few values, however long its texts are. In one that is
    long, `LongNumbers` stand for long lists: it takes its time, but lets other threads run."""
    check_cost(json, what, tensors=tensors)
    try:
        # orjson knows no kind of bytearray but the plain one
        short = len(json) <= _SHORT_JSON
        document = orjson.loads(memoryview(json)) if short else _load_long(json, what)
    except orjson.JSONDecodeError as error:
        if "depth" in error.msg:
            raise _too_deep(what) from None
        raise InvalidInput(f"the {what} is not valid JSON: {error.msg}", field="body") from None
    if type(document) is not dict:
        raise InvalidInput(f"the {what} must be a JSON object", field="body")
    return document


def _load_long(json: Buffer, what: str) -> Any:
    cut = cut_long(json, what)
    try:
        return cut.restored(orjson.loads(cut.left))
    except RecursionError:
        raise _too_deep(what) from None


def _too_deep(what: str) -> InvalidInput:
    return InvalidInput(f"the {what}'s JSON is nested too deeply", field="body")


def cut_long(json: Buffer, what: str) -> ShortJson:
    """Returns the document without what is long; what is left can be read at once."""
    from carpool.wire.long_json import ShortJson

    cut = ShortJson(json)
    if len(cut.left) > _MOST_LEFT:
        raise InvalidInput(
            f"the {what}'s JSON has more than {_MOST_LEFT} bytes of short values{_AS_BINARY}", field="body"
        )
    check_cost(cut.left, what, tensors=False, hint=f" beside long lists of numbers{_AS_BINARY}")
    return cut


def check_cost(json: Buffer, what: str, *, tensors: bool = True, hint: str = "") -> None:
    """Checks JSON before it is read: four bytes can become a list of seventy, which blocks the loop."""
    if len(json) <= _SHORT_JSON:
        return
    hint = _AS_BINARY if tensors else hint
    values, lists = (MAX_JSON_VALUES, MAX_JSON_LISTS) if tensors else (_FEW_JSON_VALUES, _FEW_JSON_LISTS)
    commas = opened = 0
    for start in range(0, len(json), _LOOKED_AT):
        piece = np.frombuffer(json, np.uint8, min(_LOOKED_AT, len(json) - start), start)
        commas += int(np.count_nonzero(piece == ord(",")))
        opened += int(np.count_nonzero((piece | 0x20) == ord("{")))  # which makes a brace of a bracket, too
    if commas >= values or opened > lists:
        raise InvalidInput(
            f"the {what}'s JSON has more than {values:,} values or {lists:,} lists{hint}", field="body"
        )


def read_list(document: dict[str, Any], key: str) -> list[Any]:
    value = document.get(key)
    if type(value) is not list:
        raise InvalidInput(f"'{key}' must be a JSON array", field=key)
    if len(value) > MAX_TENSORS:
        raise InvalidInput(f"'{key}' lists more than {MAX_TENSORS} tensors", field=key)
    return value


def parse_tensors(document: dict[str, Any], kind: str, model: str = "") -> tuple[list[TensorHead], int]:
    """Returns the tensors listed under `inputs` or `outputs`, and how many tail bytes they take."""
    tail_size = 0
    heads: list[TensorHead] = []
    for entry in read_list(document, f"{kind}s"):
        head = _parse_tensor(entry, kind, tail_size, model)
        tail_size += head.size
        heads.append(head)
    if len(heads) > 1:
        check_unique([head.name for head in heads], kind)
    return heads, tail_size


def begin_tensor(entry: Any, kind: str, offset: int) -> tuple[TensorHead, int]:
    """Returns a listed tensor and its number of elements, before it is known where its data is."""
    name = _read_name(entry, kind)
    datatype_name = entry.get("datatype")
    datatype = DATATYPES.get(datatype_name) if type(datatype_name) is str else None
    if datatype is None:
        raise InvalidInput(
            f"{kind} {shorten(name)} has no valid datatype; valid are {', '.join(DATATYPES)}",
            field=f"{kind} {shorten(name)}.datatype",
        )
    shape, elements = _read_shape(entry.get("shape"), name, kind)
    return TensorHead(name, datatype, shape, offset), elements


def _parse_tensor(entry: Any, kind: str, offset: int, model: str) -> TensorHead:
    head, elements = begin_tensor(entry, kind, offset)
    parameters = entry.get("parameters")
    if type(parameters) is dict and "data" not in entry and "shared_memory_region" not in parameters:
        size = parameters.get("binary_data_size")
        if type(size) is int and size == elements * head.datatype.size and head.datatype.size:
            head.size = size
            return head
    _place_data(head, entry, elements, f"{kind} {shorten(head.name)}", model)
    return head


def _place_data(head: TensorHead, entry: dict[str, Any], elements: int, owner: str, model: str) -> None:
    """Find where the data is: every way but the plain binary one, and every way to be wrong."""
    parameters = read_object(entry.get("parameters"), f"{owner}.parameters")
    ways = ("data" in entry, "binary_data_size" in parameters, "shared_memory_region" in parameters)
    if sum(ways) != 1:
        said = "no data" if not any(ways) else "its data in more than one way"
        raise InvalidInput(
            f"{owner} has {said}; give one of data, binary_data_size or shared_memory_region",
            field=f"{owner}.data",
        )
    if "shared_memory_region" in parameters:
        head.shared_memory = read_shared_memory(parameters, owner)
        field = f"{owner}.parameters.shared_memory_byte_size"
        check_size(head, head.shared_memory.byte_size, elements, field, model)
    elif "binary_data_size" in parameters:
        field = f"{owner}.parameters.binary_data_size"
        head.size = read_uint(parameters["binary_data_size"], field)
        check_size(head, head.size, elements, field, model)
    elif head.datatype.binary_only:
        sentence = f"{owner} is {head.datatype.value}, which JSON cannot represent: send it as binary"
        raise InvalidInput(sentence, field=f"{owner}.data")
    elif type(entry["data"]) is not list and not _are_long(entry["data"]):
        raise wrong(f"{owner}.data", "must be a JSON array")
    else:
        head.data = entry["data"]


def _are_long(values: object) -> bool:
    from carpool.wire.long_json import LongNumbers

    return type(values) is LongNumbers


def check_size(head: TensorHead, size: int, elements: int, field: str, model: str) -> None:
    """The bytes announced must be what shape and datatype need; BYTES only bounds it from below."""
    if head.datatype is Datatype.BYTES:
        if size >= 4 * elements and (elements or not size):
            return
        needed = f"at least {4 * elements}" if elements else "0"
    elif size == elements * head.datatype.size:
        return
    else:
        needed = str(elements * head.datatype.size)
    whose = f" for model '{model}'" if model else ""
    raise InvalidInput(
        f"input byte size mismatch for input {shorten(head.name)}{whose}. Expected {needed}, got {size};"
        f" the shape is {list(head.shape)}, the datatype {head.datatype.value}",
        field=field,
    )


def _read_name(entry: Any, kind: str) -> str:
    if type(entry) is not dict:
        raise InvalidInput(f"every entry of '{kind}s' must be a JSON object", field=f"{kind}s")
    name = entry.get("name")
    if type(name) is not str or not name:
        raise InvalidInput(f"every entry of '{kind}s' needs a name", field=f"{kind}s.name")
    return name


def _read_shape(dims: Any, name: str, kind: str) -> tuple[tuple[int, ...], int]:
    if type(dims) is not list or len(dims) > MAX_RANK:
        raise _bad_shape(name, kind, f"must be a list of at most {MAX_RANK} integers")
    extent, empty = 1, False
    for dim in dims:
        if type(dim) is not int or dim < 0:
            raise _bad_shape(name, kind, "may hold only integers of 0 or more")
        if dim:
            extent *= dim
        else:
            empty = True
    if extent > MAX_ELEMENTS:  # of an empty tensor too: its other dimensions must be sane
        raise InvalidInput(
            f"invalid shape for {kind} {shorten(name)}: shape {str(dims)[:80].replace(' ', '')}"
            f" causes total element count to exceed maximum size of {MAX_ELEMENTS}",
            field=f"{kind} {shorten(name)}.shape",
        )
    return tuple(dims), 0 if empty else extent


def _bad_shape(name: str, kind: str, complaint: str) -> InvalidInput:
    return wrong(f"{kind} {shorten(name)}.shape", complaint)


def check_unique(names: list[str], kind: str) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            owner = f"{kind} {shorten(name)}"
            raise InvalidInput(f"{owner} already exists in request", field=owner)
        seen.add(name)


def parse_requested(entries: Any) -> Sequence[RequestedOutput]:
    """Returns the outputs that are listed. As in Triton, each says for itself whether it is to be binary: the
    request's `binary_data_output` is for those who list none."""
    if entries is None:
        return ()
    requested = [_parse_output(entry) for entry in read_list({"outputs": entries}, "outputs")]
    if len(requested) > 1:
        check_unique([output.name for output in requested], "output")
    return requested


def _parse_output(entry: Any) -> RequestedOutput:
    name = _read_name(entry, "output")
    owner = f"output {shorten(name)}"
    parameters = read_object(entry.get("parameters"), f"{owner}.parameters")
    binary, classification, shared = False, 0, None
    if "binary_data" in parameters:
        binary = read_bool(parameters["binary_data"], f"{owner}.parameters.binary_data")
    if "classification" in parameters:
        classification = read_uint(parameters["classification"], f"{owner}.parameters.classification")
    if "shared_memory_region" in parameters:
        shared = read_shared_memory(parameters, owner)
    return RequestedOutput(name, binary, classification, shared)


# ---- the `parameters` objects of a request: known keys are checked and typed, unknown ones kept -----------


DEFAULT_OPTIONS = RequestOptions()
MAX_SOURCE_CHARS = 128
_NO_PARAMETERS: dict[str, Any] = {}
RESERVED_PREFIX = "triton_"
_FINAL_RESPONSE = "triton_enable_empty_final_response"


def shorten(text: str) -> str:
    """Quote what a client sent, without letting it fill the error."""
    return f"'{text}'" if len(text) <= 80 else f"'{text[:80]}…'"


def wrong(field: str, complaint: str) -> InvalidInput:
    return InvalidInput(f"{field} {complaint}", field=field)


def read_uint(value: Any, field: str) -> int:
    if type(value) is not int or value < 0:
        raise wrong(field, "must be an integer of 0 or more")
    return value


def read_name(value: Any, field: str) -> int | str:
    if type(value) is str:
        return value
    if read_uint(value, field) >= 2**64:
        raise wrong(field, "must be text, or an integer of at most 2^64 - 1")
    return cast(int, value)


def read_bool(value: Any, field: str) -> bool:
    if type(value) is not bool:
        raise wrong(field, "must be true or false")
    return value


def read_object(value: Any, field: str) -> dict[str, Any]:
    """The `parameters` of one thing; absent or null is empty."""
    if value is None:
        return _NO_PARAMETERS
    if type(value) is not dict:
        raise wrong(field, "must be a JSON object")
    if len(value) > MAX_PARAMETERS:
        raise too_many_parameters(field)
    return value


def too_many_parameters(field: str) -> InvalidInput:
    return wrong(field, f"may hold at most {MAX_PARAMETERS:,} parameters")


def read_source(value: Any, field: str) -> str:
    """Returns who asks: the same rule for the parameter and for the header."""
    if type(value) is not str or len(value) > MAX_SOURCE_CHARS or not value.isprintable():
        raise wrong(field, f"must be printable text of at most {MAX_SOURCE_CHARS} characters")
    return value


_OPTIONS: Mapping[str, Callable[[Any, str], Any]] = {
    "priority": read_uint,
    "timeout": lambda value, field: read_uint(value, field) / 1e6 or None,  # in microseconds; 0 means none
    "source": read_source,
    "latest": read_bool,
    "sequence_id": read_name,
    "sequence_start": read_bool,
    "sequence_end": read_bool,
}


def read_options(parameters: dict[str, Any]) -> tuple[RequestOptions, bool]:
    """Returns the request's options, and whether outputs are binary unless they say otherwise."""
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
    if key.startswith(RESERVED_PREFIX) and key != _FINAL_RESPONSE:
        raise InvalidInput(
            f"parameter keys starting with '{RESERVED_PREFIX}' are reserved for Triton usage"
            f" and should not be specified: {shorten(key)}",
            field=f"parameters.{key[:80]}",
        )
    if key == "headers":
        raise InvalidInput("parameter 'headers' is reserved for Triton usage", field="parameters.headers")
    if key == _FINAL_RESPONSE:
        return read_bool(value, f"parameters.{key}")
    if type(value) not in (bool, int, float, str):
        raise InvalidInput(
            f"parameter {shorten(key)} must be a string, a number or a bool", field=f"parameters.{key[:80]}"
        )
    return cast(Scalar, value)


def write_options(options: RequestOptions) -> dict[str, Scalar]:
    """The same parameters as a client sends them: defaults are left out."""
    document: dict[str, Scalar] = dict(options.custom)
    for key in _OPTIONS:
        value = getattr(options, key)
        if value != getattr(DEFAULT_OPTIONS, key):
            document[key] = round(value * 1e6) if key == "timeout" else value
    return document


def read_shared_memory(parameters: dict[str, Any], owner: str) -> SharedMemory:
    region, field = parameters["shared_memory_region"], f"{owner}.parameters.shared_memory"
    if type(region) is not str or not region:
        raise wrong(f"{field}_region", "must be the name of a region")
    if "shared_memory_byte_size" not in parameters:
        raise wrong(f"{field}_byte_size", "is missing")
    byte_size = read_uint(parameters["shared_memory_byte_size"], f"{field}_byte_size")
    return SharedMemory(
        region, byte_size, read_uint(parameters.get("shared_memory_offset", 0), f"{field}_offset")
    )


def write_shared_memory(place: SharedMemory) -> dict[str, Scalar]:
    return {
        "shared_memory_region": place.region,
        "shared_memory_byte_size": place.byte_size,
        "shared_memory_offset": place.offset,
    }
