"""Loading and unloading models, and the trace and log settings of a running server."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from backends import onnx_models
from conformance.calls_infer import numbers
from conformance.flavours import INVALID, UNAVAILABLE, UNKNOWN, UNSUPPORTED, Session
from conformance.table import Server, case, expect
from waiting import until

_SIZE = {"platform": "onnxruntime_onnx", "max_batch_size": 3}
_INPUT = {"name": "x", "data_type": "TYPE_FP32", "dims": [3]}
_OUTPUT = {"name": "y", "data_type": "TYPE_FP32", "dims": [3]}


@contextlib.contextmanager
def _changing(session: Session) -> Iterator[None]:
    """The model `changing` is as its folder says again afterwards."""
    try:
        yield
    finally:
        session.call("load_model", "changing")


def _state(session: Session, name: str) -> tuple[str, str]:
    found = session.call("get_model_repository_index")
    lines = found if session.flavour.is_http else found["models"]
    (line,) = [line for line in lines if line["name"] == name]
    return line.get("state", ""), line.get("reason", "")


def _max_batch(session: Session, name: str) -> int:
    document = session.call("get_model_config", name)
    config = document if session.flavour.is_http else document["config"]
    return int(config["max_batch_size"])


# ---- models


@case("load_model", "a model that serves", "loaded again; it answers")
def load(session: Session) -> str:
    session.call("load_model", "changing")
    expect(session.infer("changing", numbers(1, 2, 3)).as_numpy("y").tolist(), [[1, 2, 3]])
    return "READY"


@case("load_model", "with a config override", "max_batch_size 3, also for later loads, until it is unloaded")
def load_with_config(session: Session) -> str:
    with _changing(session):
        session.call("load_model", "changing", config=json.dumps(_SIZE))
        expect(_max_batch(session, "changing"), 3)
        session.call("load_model", "changing")
        expect(_max_batch(session, "changing"), 3)
        session.call("unload_model", "changing")
    expect(_max_batch(session, "changing"), 8)
    return "3 and 3, then 8 again"


@case("load_model", "with a config and files", "the model is made of them")
def load_with_files(session: Session) -> str:
    with TemporaryDirectory() as name:
        content = onnx_models.identity(Path(name) / "model.onnx").read_bytes()
    config = _SIZE | {"name": "sent", "input": [_INPUT], "output": [_OUTPUT]}
    files = {"file:4/model.onnx": content}
    session.call("load_model", "sent", config=json.dumps(config), files=files)
    try:
        result = session.infer("sent", numbers(1, 2, 3), model_version="4")
        expect(result.as_numpy("y").tolist(), [[1, 2, 3]])
    finally:
        session.call("unload_model", "sent")
    return f"version 4 from {len(content)} bytes"


@case("load_model", "an unknown model", "refused, 404 / NOT_FOUND")
def load_unknown(session: Session) -> str:
    return session.refused(UNKNOWN, "nothing", "load_model", "nothing")


@case("load_model", "a config that is wrong", "refused, 400; the old one serves on")
def load_wrong(session: Session) -> str:
    wrong = json.dumps(_SIZE | {"max_batch_sise": 3})
    said = session.refused(INVALID, "max_batch_size", "load_model", "changing", config=wrong)
    expect(session.infer("changing", numbers(1, 2, 3)).as_numpy("y").tolist(), [[1, 2, 3]])
    return said


@case("unload_model", "a model that serves", "UNAVAILABLE in the index, and 404 for requests")
def unload(session: Session) -> str:
    with _changing(session):
        session.call("unload_model", "changing")
        until(lambda: _state(session, "changing")[0] == "UNAVAILABLE", "unloaded")
        reason = _state(session, "changing")[1]
        expect(reason, "unloaded")
        expect(session.call("is_model_ready", "changing"), False)
        tensors = [session.tensor("x", numbers(1, 2, 3)["x"])]
        session.refused(UNKNOWN, "changing", "infer", "changing", tensors)
    expect(_state(session, "changing")[0], "READY")
    return f"UNAVAILABLE, reason {reason}"


@case("unload_model", "unload_dependents", "an ensemble goes with its steps; without, they stay")
def unload_dependents(session: Session) -> str:
    try:
        session.call("unload_model", "pair")
        expect(session.call("is_model_ready", "after"), True)
        session.call("load_model", "pair")
        session.call("unload_model", "pair", unload_dependents=True)
        expect([session.call("is_model_ready", name) for name in ("pair", "pretend", "after")], [False] * 3)
    finally:
        session.call("load_model", "pair")  # with its steps
    expect(session.call("is_model_ready", "after"), True)
    return "pair, pretend and after unloaded"


@case("unload_model", "an unknown model", "no error")
def unload_unknown(session: Session) -> str:
    session.call("unload_model", "nothing")
    return "no error"


@case("load_model", "model control none", "refused, 503 / UNAVAILABLE", server=Server.PLAIN)
def load_when_none(session: Session) -> str:
    return session.refused(UNAVAILABLE, "model-control-mode", "load_model", "changing")


@case("unload_model", "model control none", "refused, 503 / UNAVAILABLE", server=Server.PLAIN)
def unload_when_none(session: Session) -> str:
    return session.refused(UNAVAILABLE, "model-control-mode", "unload_model", "changing")


# ---- traces


def _trace(session: Session, document: Any) -> dict[str, list[str]]:
    """The settings by name, as lists of texts."""
    if session.flavour.is_http:
        return {name: value if isinstance(value, list) else [str(value)] for name, value in document.items()}
    return {name: entry.get("value", []) for name, entry in document["settings"].items()}


@case("get_trace_settings", "of the server, of a model", "level OFF and the rest")
def trace_settings(session: Session) -> str:
    of_all = _trace(session, session.call("get_trace_settings"))
    of_one = _trace(session, session.call("get_trace_settings", "vision"))
    assert of_all.keys() >= {"trace_level", "trace_rate", "trace_count", "log_frequency"}
    assert of_all["trace_level"] == of_one["trace_level"] == ["OFF"]
    return f"OFF, rate {of_all['trace_rate'][0]}"


@case("update_trace_settings", "TIMESTAMPS for one model, then cleared", "a line in the trace file")
def trace_one(session: Session) -> str:
    settings = {"trace_level": ["TIMESTAMPS"], "trace_rate": "1", "trace_count": "-1"}
    name = f"traced-{session.flavour.value}"
    found = _trace(session, session.call("update_trace_settings", model_name="vision", settings=settings))
    expect(found["trace_level"], ["TIMESTAMPS"])
    file = Path(found["trace_file"][0])
    try:
        session.infer("vision", session.ones(), request_id=name)
        until(lambda: file.exists() and name in file.read_text(), "a line in the trace file")
    finally:
        cleared = dict.fromkeys(settings)
        after = _trace(session, session.call("update_trace_settings", model_name="vision", settings=cleared))
    expect(after["trace_level"], ["OFF"])
    return "one line, then OFF again"


@case("update_trace_settings", "trace_file", "refused, 501 / UNIMPLEMENTED")
def trace_file(session: Session) -> str:
    settings = {"trace_file": "/tmp/elsewhere"}
    return session.refused(UNSUPPORTED, "trace_file", "update_trace_settings", settings=settings)


# ---- logs


def _log(session: Session, document: Any) -> dict[str, Any]:
    if session.flavour.is_http:
        return dict(document)
    return {name: next(iter(entry.values())) for name, entry in document["settings"].items()}


@case("get_log_settings", "", "what is logged")
def log_settings(session: Session) -> str:
    found = _log(session, session.call("get_log_settings"))
    expect(found["log_info"], True)
    assert found.keys() >= {"log_file", "log_warning", "log_error", "log_verbose_level", "log_format"}
    return f"info {found['log_info']}, verbose {found['log_verbose_level']}"


@case("update_log_settings", "log_info off and on, verbose 1 and 0", "the settings in force")
def log_less(session: Session) -> str:
    settings: dict[str, Any] = {"log_info": False, "log_verbose_level": 1}
    try:
        found = _log(session, session.call("update_log_settings", settings))
        expect((found["log_info"], found["log_verbose_level"]), (False, 1))
    finally:
        again = _log(session, session.call("update_log_settings", {"log_info": True, "log_verbose_level": 0}))
    expect((again["log_info"], again["log_verbose_level"]), (True, 0))
    return "off and on again"


@case("update_log_settings", "log_format ISO8601 and default", "the settings in force")
def log_format(session: Session) -> str:
    for form in ("ISO8601", "default"):
        found = _log(session, session.call("update_log_settings", {"log_format": form}))
        expect(found["log_format"], form)
    return "ISO8601, then default again"


@case("update_log_settings", "log_file", "refused, 501 / UNIMPLEMENTED")
def log_file(session: Session) -> str:
    return session.refused(UNSUPPORTED, "log file", "update_log_settings", {"log_file": "/tmp/elsewhere"})
