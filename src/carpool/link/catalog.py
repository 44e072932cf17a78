"""Defines what front ends know of the models that the engine serves: one catalogue at a time."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

from carpool.memory.client_files import Region
from carpool.types import Signature

ASK = "carpool_ask"
ASSUMED = "carpool_assumed"
"""The parameter, in the settings that clients read, which says what to set before a model takes pictures."""

Json: TypeAlias = Mapping[str, Any]
"""A JSON object."""


@dataclass(frozen=True, slots=True)
class Batching:
    """Describes how the engine forms the batches of a model: its mode, and the latency that it promises."""

    mode: str  # a value of `config.model.Mode`
    slo: float | None = None  # seconds


@dataclass(frozen=True, slots=True)
class Traits:
    """Describes in what a model differs from one that runs in the engine and gives one answer a request."""

    hosted: bool = False  # it runs in a process beside the engine's, which front ends need not know
    fetches: bool = False  # the engine copies inputs in clients' memory itself, into their batch
    decoupled: bool = False  # it gives any number of answers to a request, or none, and then an end
    writes: bool = False  # its answers are pieces of one text, which a request may want as a whole instead

    def in_parts(self, one_answer: str | bool) -> bool:
        """Returns whether its answers come one by one. A request for one answer has all of a text."""
        return self.decoupled and not (self.writes and one_answer)


USUAL_TRAITS = Traits()


@dataclass(frozen=True, slots=True)
class PublishedModel:
    """Holds what clients can read about a model."""

    platform: str = ""
    config: Json = field(default_factory=dict)  # Triton's JSON form
    labels: Mapping[str, Sequence[str]] = field(default_factory=dict)  # by output
    choices: Sequence[str] = ()  # what was chosen for it at loading and why, in words

    @property
    def ask(self) -> str:
        """Returns what to set before a model that was not recognised takes pictures; empty: nothing would
        help."""
        return str(self.config.get("parameters", {}).get(ASK, {}).get("string_value", ""))


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """Describes one version of one model, as the front ends know it."""

    key: int  # its number on the link
    name: str
    version: str
    signature: Signature
    batching: Batching
    traits: Traits = USUAL_TRAITS
    published: PublishedModel = field(default_factory=PublishedModel)
    row: tuple[int, int] = (0, 0)  # its row in the shared counters: number, generation
    vision: Json | None = None  # how it answers pictures; None: it takes only tensors
    extra: Json = field(default_factory=dict)  # by extension: what its front part needs to know

    def due(self, arrived: float, deadline: float) -> float:
        """Returns the client's deadline or the end of the SLO, whichever comes first."""
        slo = self.batching.slo
        return deadline if slo is None else min(deadline, arrived + slo)


class IndexEntry(NamedTuple):
    """Describes a line of the repository index: also models that are not ready, with the reason."""

    name: str
    version: str = ""
    state: str = ""  # READY, LOADING, UNLOADING, UNAVAILABLE; empty, as its version, if it was never loaded
    reason: str = ""

    @property
    def word(self) -> str:
        """Returns the state as one word of `carpool_model_state`: one that failed differs from one that was
        not requested."""
        if self.state in ("", "UNAVAILABLE"):
            return "failed" if self.reason not in ("", UNLOADED, ON_DEMAND) else "unloaded"
        return self.state.lower()


UNLOADED = "unloaded"
"""The reason of a model that was unloaded by request."""
ON_DEMAND = "it is loaded on demand"
"""The reason of a model that is not in memory now, where that is all that is needed."""


@dataclass(frozen=True, slots=True)
class LoadingStep:
    """Describes what is done for one of those that are loaded together: `number - 1` of them serve, or
    failed."""

    model: str
    step: str
    number: int
    of: int

    def __str__(self) -> str:
        return f"loading {self.number} of {self.of}: {self.model}, {self.step}"


@dataclass(frozen=True, slots=True)
class PublishedServer:
    """Holds what a server reports to its clients about itself, beside its models."""

    name: str = "carpool"  # what the server calls itself
    extensions: Sequence[str] = ()  # of the protocol, besides those that every server has
    logging: Json = field(default_factory=dict)  # v2 log settings, as they are answered
    loading: str = ""  # how far the start is: what is loaded now, in words
    on_demand: Mapping[str, str] = field(default_factory=dict)
    """By name, the models that are loaded when a request names them, and the task of their settings."""


@dataclass(frozen=True, slots=True)
class Catalog:
    """Lists everything that is served now. Replaced as a whole, with the next number.

    What every front end must agree on travels with it: a question that changed it is answered only when all
    of them have it.
    """

    number: int = 0
    ready: bool = False
    entries: Mapping[tuple[str, str], ModelEntry] = field(default_factory=dict)  # by (name, version)
    newest: Mapping[str, ModelEntry] = field(default_factory=dict)  # by name: what serves without a version
    index: Sequence[IndexEntry] = ()
    leaving: Sequence[ModelEntry] = ()  # replaced or unloaded, but front ends may still send to them
    down: Collection[int] = ()  # keys of those without an instance that could run anything now
    regions: Mapping[str, Region] = field(default_factory=dict)  # by name
    server: PublishedServer = field(default_factory=PublishedServer)
    extra: Json = field(default_factory=dict)  # by extension: what its engine part publishes

    @property
    def able(self) -> bool:
        """Some model can run, or there is none that should: else nothing can be asked of this server."""
        return not self.entries or any(entry.key not in self.down for entry in self.entries.values())
