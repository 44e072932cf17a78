"""Defines the hook: how a feature that the server does not know becomes part of it.

An extension is a folder, `carpool.extensions.NAME` or a package of its own, with a manifest that holds only
strings and numbers. Each process imports the part that it needs, and only when a model's settings, a file in
a model's folder or an option of the server asks for it. What an extension leaves out costs nothing: no
import and no call.

    settings.py   dataclasses of its tables in model.toml and of its server options
    front.py      `front(server) -> FrontPart` (frontend/calls/front_part.py), in each front end
    engine.py     `engine(server) -> EnginePart` (engine/engine_parts.py), and a `ServingPart`
                  (engine/models/serving_part.py), in the engine
    instance.py   what wraps a backend where instances run
    process.py    a process of its own
    command.py    the verbs of the command line
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

GROUP = "carpool.extensions"
"""Entry points of packages with extensions; each leads to an `Extension` of the entry point's name."""


@dataclass(frozen=True, slots=True)
class HttpRoute:
    """Describes one route over HTTP.

    In `pattern`, `{name}` is any one segment, and what stands in brackets may be absent. `start` is the place
    of a function `(service, head, variables) -> start`, called once for all requests with the same head; its
    module is imported for the first of them.
    """

    method: str
    pattern: str
    start: str
    kind: str = "inference"  # who may use it: anyone for health and page, else keys for inference or control
    changes: bool = False  # whether using it changes something for others
    api: str = "inference"  # the name under which --http-restricted-api restricts it
    events: bool = False  # True: a route for pictures whose other clients the server's own route answers


@dataclass(frozen=True, slots=True, kw_only=True)
class Routes:
    """Describes the routes of one protocol, and what all of them have in common.

    The places are of functions: `words(status, error) -> (status, document)` writes an error of the server,
    an object with `error`, `reason` and perhaps `field`, as clients of the protocol read it; `key_of(head)`
    and `key_in(body)` find the key of a request that has none in the usual fields; `paths(catalog)` describes
    the routes for /openapi.json.
    """

    table: tuple[HttpRoute, ...]
    prefix: str = ""  # paths below it answer all errors in these words: also no such path, and a wrong key
    words: str = ""
    key_of: str = ""
    key_in: str = ""
    paths: str = ""


SERVE, PREPARE, USE = "Serve models", "Prepare a model", "Use a running server"
CAPACITY, CHECK = "Choose an SLO and plan capacity", "Check the results"
PANELS = (SERVE, PREPARE, USE, CAPACITY, CHECK)
"""Of `carpool --help`, in its order; a panel that only an extension has follows them."""


@dataclass(frozen=True, slots=True)
class Verb:
    """Describes a verb of the command line, so that it can be listed without importing it."""

    place: str  # `module:class`; the class is a frozen dataclass, whose fields are the options
    panel: str  # one of PANELS, or another
    sentence: str  # what it does: the first of its own help


class Columns(NamedTuple):
    """Describes what an extension counts in each row of the shared counters: a number, one for each word, or
    a histogram with these bounds.

    The numbers of several processes add up, as do those of a `gauge`, which end with their process; of
    `largest` the largest counts. A `state` is in no row: `Catalog.extra` has one of the words under this
    name, by model and source.
    """

    name: str
    kind: Literal["counter", "gauge", "largest", "histogram", "state"] = "counter"
    words: tuple[str, ...] = ()
    bounds: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Extension:
    """Describes one extension as data, so that it can be known without importing its folder.

    A place in its code is written `module:name`, relative to `home`.
    """

    name: str  # of its folder, its label in metrics and its key in every `extra`
    home: str = ""  # the package with its modules; empty: carpool.extensions.NAME
    api: str = ""
    """Of a protocol of other tools: the address that is typed into the tool, as "{url}/roboflow". It is off,
    with its routes, unless the server's setting `api` names the extension."""
    needs: tuple[str, ...] = ()  # other extensions that are switched on with it
    owns: tuple[str, ...] = ()  # keys at the top of model.toml, tables and values
    triton: tuple[str, ...] = ()  # fields of Triton's config.pbtxt, and platforms, as "platform=ensemble"
    archives: Mapping[str, str] = field(default_factory=dict)
    """By a file's ending, as ".zip", the place of `unpacked(file) -> folder`, for files that hold a model's
    folder."""
    file: str = ""  # in a model's folder, in place of model.toml
    beside: str = ""  # a file beside config.pbtxt, with settings for which Triton has no field
    settings: str = ""  # a `SettingsPart` (config/settings_part.py), which reads all of these
    meets: Mapping[str, str] = field(default_factory=dict)
    """What else its models cannot ask for, with the sentence that says why: another extension, as "registry",
    or one of its settings, as "registry.candidate". What is not listed works together. `{key}` stands for the
    other's key."""
    fields: tuple[str, ...] = ()  # of `ModelConfig`, which ask for it where they are set
    known_inputs: tuple[str, ...] = ()  # names of inputs; a model file that has one of them asks for it
    serving: str = ""  # place of a `ServingPart` (engine/models/serving_part.py)
    model_process: str = ""
    """Place of `make(settings, restarted, stall_changed, zygote) -> ModelProcess` (engine/models/runtime.py):
    the process beside the engine, of which a server has one."""
    compiled: str = ""
    """Place of `find(config, version, kept_as, profiles) -> Compiled | None` (engine/loading/loading.py)."""
    instance: str = ""
    """Place of `wrap(backend, config) -> backend`, called where an instance runs, as soon as it is loaded."""
    verbs: Mapping[str, Verb] = field(default_factory=dict)  # of the command line, by name
    routes: tuple[Routes, ...] = ()  # over HTTP; no other module of the extension is imported to list them
    columns: tuple[Columns, ...] = ()
    """What it counts. Every process lays out those of all installed extensions, on or off."""
    metrics: str = ""
    """Lines of the metrics page, in the form of the table in observe/prometheus.py. A source is one of its
    columns, or one of the server's in capitals."""
    starts: tuple[str, ...] = ()
    """Options of the server, and in capitals variables of the environment. Where one of them is set, or the
    setting `api` names the extension, both parts are loaded when the server starts, whatever its models ask
    for."""
    begin: str = ""
    """Place of `begin(settings) -> (settings, warning)`, called by `carpool serve` before it starts processes
    where the extension is started: it checks the options, and returns those that processes get."""
    doctor: str = ""
    """Place of `findings(settings, environ) -> list[Finding]` of lab/machine_check.py: `carpool doctor`."""
    front: str = ""  # place of `front(server) -> FrontPart` (frontend/calls/front_part.py)
    engine: str = ""  # place of `engine(server) -> EnginePart` (engine/engine_parts.py)

    def part(self, place: str) -> Any:
        """Returns the object at `module:name`, whose module is imported now."""
        module, _, name = place.partition(":")
        return getattr(importlib.import_module(f"{self.home or f'{GROUP}.{self.name}'}.{module}"), name)
