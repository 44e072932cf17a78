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
import importlib.util
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

GROUP = "carpool.extensions"
"""Entry points of packages with extensions; each leads to an `Extension` of the entry point's name."""


class ServerOption(NamedTuple):
    """Describes a setting of the server: a variable of the environment, CARPOOL_ before the name in capitals,
    and with `words` an option of `carpool serve`.

    `ServerSettings.option` returns its value, which has the type of the default.
    """

    name: str
    default: bool | str | float | None  # None: a number, and there is none
    within: tuple[float, float] | None = None
    secret: bool = False  # not shown
    words: str = ""  # its help
    metavar: str = ""
    after: str = ""  # the setting behind which it stands in the help


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


@dataclass(frozen=True, slots=True)
class Process:
    """Describes a process of its own, which `carpool serve` starts where one of `starts` is set.

    It has a link to the engine, counters and memory as a front end has, and so it can send requests. The
    server serves without it: one that dies, also at its start, is started again after a pause.
    """

    name: str  # in the log and the metrics
    start: str  # place of a `StartFrontend` (process/children.py)
    ports: Mapping[str, int] = field(default_factory=dict)  # by name; 0 takes a free one


class Columns(NamedTuple):
    """Describes what an extension counts in each row of the shared counters: a number, one for each word, or
    a histogram with these bounds, or with the server's own for seconds or for images of a batch.

    The numbers of several processes add up, as do those of a `gauge`, which end with their process; of
    `largest` the largest counts. A `state` is in no row: `Catalog.extra` has one of the words under this
    name, by model and source.
    """

    name: str
    kind: Literal["counter", "gauge", "largest", "histogram", "state"] = "counter"
    words: tuple[str, ...] = ()
    bounds: tuple[float, ...] | Literal["seconds", "images"] = ()


@cache
def importable(module: str) -> bool:
    """Returns whether a module is installed. The answer is cached: each folder of a repository asks, and each
    entry of sys.path is looked at."""
    return importlib.util.find_spec(module) is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendKind:
    """Represents one backend.

    `home` is a module with `load(config, version, placement)`, which makes an instance, and
    `read_signature(config, version)`. It may have `describe`, `devices` and `device_names` as well, for what
    the runtime settles itself (carpool.backends.backend). Empty: the name is known, but nothing runs it.
    """

    name: str
    home: str
    suffixes: tuple[str, ...] = ()  # of the files that it can run
    after: str = ""  # of an extension's: the backend behind which it is looked for; empty: last
    at_home: tuple[str, ...] = ()  # those of them that are its own when the settings name no backend
    inside: str = ""  # the file to open where a model is a folder; else it has the folder's own name
    beside: str = ""  # beside this file, `model` with one of the suffixes is a whole model
    gives_way: bool = False  # not installed: files of other backends are taken, as if these were not there
    needs_file: bool = True
    platforms: tuple[str, ...] = ()  # Triton's names for it; clients are sent the first
    package: str = ""  # that has to be installed; profiles belong to one version of it
    imports: str = ""  # what is imported of it: looked for, without importing it, before anything else
    extra: str = ""  # of Carpool, with which pip installs it
    process: Literal["engine", "worker", "runner"] = "engine"
    """Where its instances run: in the engine, each in a worker process, or all in the runner of the GPUs."""
    program: str = ""
    """The module that a worker process of it runs (carpool.backends.hosted). Empty: the home knows it."""
    on_gpus: bool = False  # runs on nothing else
    threaded: bool = False  # runs on as many threads as it is given
    in_pieces: bool = True  # False: is called with every batch as it was formed, also where less is faster
    reshapes: bool = True  # False: it looks at no shapes, or takes no `reshape`
    gives_defaults: bool = False  # an optional input needs a default in the model file
    values_on_device: bool = False
    """It can make values of a picture's bytes, and boxes of outputs, on its device: `home` has
    `fill_pictures`, `decodes_pictures` and `kept_boxes` (extensions/torch/pytorch.py)."""
    pictures_on_device: bool = False  # can take encoded pictures
    asks_models: bool = True  # False: no model of it can ask others (`Placement.calls`)
    parameters: tuple[str, ...] | None = None  # of the settings that have an effect; None: any may
    table: bool = False  # its table in model.toml says that the model is for it
    extension: str = ""  # the name of the extension that it asks for, if any

    def missing(self) -> str:
        """Returns a sentence where its package is not installed, else nothing. This is cheap: nothing is
        imported."""
        if not self.imports or importable(self.imports):
            return ""
        told = f"'carpool[{self.extra}]'" if self.extra else self.package
        return f'the backend "{self.name}" needs {self.package}, which is not installed: pip install {told}'


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
    no_step: str = ""  # why its models are no step of a model that is made of several, in words
    no_batches: str = ""
    """What its models do in place of batches, in words: each of their answers comes part by part."""
    fields: tuple[str, ...] = ()  # of `ModelConfig`, which ask for it where they are set
    known_inputs: tuple[str, ...] = ()  # names of inputs; a model file that has one of them asks for it
    serving: str = ""  # place of a `ServingPart` (engine/models/serving_part.py)
    kinds: tuple[BackendKind, ...] = ()
    """The backends that it brings. Where it is not installed, no model names them."""
    homes: Mapping[str, str] = field(default_factory=dict)
    """By a backend's name, the module that runs models which ask for this extension, in place of that of the
    backend."""
    model_process: str = ""
    """Place of `make(settings, restarted, stall_changed, zygote) -> ModelProcess` (engine/models/runtime.py):
    the process beside the engine, of which a server has one."""
    zygote: str = ""
    """Place of `begin(settings) -> Child | None`: what the engine starts before it imports anything else,
    where a model is loaded at the start that runs in that process. `make` gets it."""
    hosted: str = ""
    """Place of what loads and runs its models in that process: `HOSTED`, in the form that the extension with
    the process defines."""
    compiled: str = ""
    """Place of `find(config, version, kept_as, profiles) -> Compiled | None` (engine/loading/loading.py)."""
    instance: str = ""
    """Place of `wrap(backend, config) -> backend`, called where an instance runs, as soon as it is loaded."""
    verbs: Mapping[str, Verb] = field(default_factory=dict)  # of the command line, by name
    more_of_verbs: Mapping[str, str] = field(default_factory=dict)
    """By another's verb, the place of a dataclass made from that verb's: its fields are more options, its
    docstring has more examples, and what it does not answer itself, it leaves to `super`."""
    routes: tuple[Routes, ...] = ()  # over HTTP; no other module of the extension is imported to list them
    pictures: str = ""
    """Place of a `MoreOfPictures` (frontend/http/openapi.py): what /openapi.json says besides of the routes
    for pictures, where a model asks for the extension."""
    columns: tuple[Columns, ...] = ()
    """What it counts. Every process lays out those of all installed extensions, on or off."""
    metrics: str = ""
    """Lines of the metrics page, in the form of the table in observe/prometheus.py. A source is one of its
    columns, or one of the server's in capitals."""
    history: Mapping[str, str | tuple[str, ...]] = field(default_factory=dict)
    """What each second of the history has of a version, by name: what a histogram or a counter of `columns`
    grew by, or several gauges, which are there while the first is not 0. The sum of some of a column's words
    is `name=word+word`."""
    statistics: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """Fields of Triton's statistics of a model, each with the sources of its count and of its seconds: one of
    the columns, or as `name=word+word` the sum of some of its words."""
    options: tuple[ServerOption, ...] = ()  # of the server
    starts: tuple[str, ...] = ()
    """Options of the server, and in capitals variables of the environment. Where one of them is set, or the
    setting `api` names the extension, both parts are loaded when the server starts, whatever its models ask
    for."""
    processes: tuple[Process, ...] = ()
    kept: str = ""
    """Pattern of its files in the server's state folder, as "rollouts/*.json". Where there is such a file,
    the extension is started too: what it remembers goes on."""
    choice_fields: tuple[str, ...] = ()
    """Fields of a request's head, in small letters and beginning with x-carpool-, which ask for one of
    several versions: the front part is loaded with the first, and its `choose` is called wherever one is."""
    picture_options: tuple[str, ...] = ()
    """Options of a request on a picture route which ask for it: the front part is loaded with the first, and
    its `picture_model_for` says who takes the pictures."""
    addresses: str = ""
    """Pattern of what may be named in the place of a model's path, as "models:/.+". Where one is, the
    extension is started."""
    fetch: str = ""
    """Place of `fetched(paths, settings, tell) -> paths`, called by `carpool serve` before it reads models,
    where one of `addresses` is named or a model's folder asks for the extension: it brings what is not on
    this machine, puts a folder in the place of each address, and reports its steps."""
    begin: str = ""
    """Place of `begin(settings) -> (settings, warning)`, called by `carpool serve` before it starts processes
    where the extension is started: it checks the options, and returns those that processes get."""
    doctor: str = ""
    """Place of `findings(settings, environ) -> list[Finding]` of lab/machine_check.py: `carpool doctor`."""
    front: str = ""  # place of `front(server) -> FrontPart` (frontend/calls/front_part.py)
    engine: str = ""  # place of `engine(server) -> EnginePart` (engine/engine_parts.py)

    def fetches(self, path: Path | str) -> bool:
        """Returns whether it is one of the extension's addresses."""
        return bool(self.addresses) and re.fullmatch(self.addresses, str(path)) is not None

    def part(self, place: str) -> Any:
        """Returns the object at `module:name`, whose module is imported now."""
        module, _, name = self.whole(place).partition(":")
        return getattr(importlib.import_module(module), name)

    def whole(self, place: str) -> str:
        """Returns the place with the whole name of its module, for a process that does not know manifests."""
        return f"{self.home or f'{GROUP}.{self.name}'}.{place}"
