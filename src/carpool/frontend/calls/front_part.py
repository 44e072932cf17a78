"""Defines what an extension does in a front end. It is not beside the manifest, so that code that reads
manifests does not import the types of requests."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from carpool.config.server import ServerSettings
from carpool.errors import CarpoolError
from carpool.frontend.calls.lane import Choice, LooksEarly
from carpool.frontend.calls.request import Infer, Request
from carpool.frontend.calls.request_facts import Observer, RequestReply, SeesPictures
from carpool.frontend.calls.trace_context import Caller
from carpool.link.catalog import Catalog, ModelEntry
from carpool.link.engine_client import EngineClient
from carpool.link.senders import NOBODY, Sender
from carpool.observe.counters import Cells, Row
from carpool.observe.exemplars import EXEMPLAR_BYTES, Exemplars
from carpool.types import Array

if TYPE_CHECKING:
    from carpool.frontend.pictures.picture_service import PictureService
    from carpool.frontend.pictures.sent_pictures import PictureModel
    from carpool.frontend.pictures.workers import Workers

SeesRefused: TypeAlias = Callable[[Caller, ModelEntry | None, CarpoolError, float], None]
"""Sees a request that is rejected at its head, with the time of that, before it is one of the model."""


@dataclass(frozen=True, slots=True)
class StartedWith:
    """Describes how the front end was started."""

    settings: ServerSettings = field(default_factory=ServerSettings)
    exemplars: Exemplars = field(default_factory=lambda: Exemplars(memoryview(bytearray(EXEMPLAR_BYTES))))
    began: float = 0.0  # when the server was, by `time.monotonic()`


class FrontServer(Protocol):
    """Defines what a front part has of its server. Everything is called in the loop's thread."""

    @property
    def threads(self) -> Workers:
        """Returns the threads that decode pictures; `Workers.idle` is for what no client waits for."""

    @property
    def pictures(self) -> PictureService: ...

    @property
    def settings(self) -> ServerSettings: ...

    @property
    def server_row(self) -> Row:
        """Returns this process's counters that belong to no model."""

    @property
    def exemplars(self) -> Exemplars: ...

    @property
    def began(self) -> float:
        """Returns when the server was started, by `time.monotonic()`."""

    def row(self, entry: ModelEntry) -> Row:
        """Returns this process's counters of a version, for `add` with a column of the extension
        (`observe.columns.single` and `by_word`); they are those of the present catalogue."""

    def send(
        self,
        entry: ModelEntry,
        inputs: Mapping[str, Array],
        reply: RequestReply,
        sender: Sender = NOBODY,
        deadline: float = inf,
    ) -> Request:
        """Sends a request of the extension's own: tensors, batch dimension included, to this version. It
        passes what clients' requests pass; `reply` gets what comes of it, perhaps before this returns. Its
        `leave` ends it."""

    async def ask(self, question: str, arguments: Mapping[str, Any]) -> Any:
        """Asks an engine part a question by its full name, NAME/what."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontPart:
    """Lists what an extension does in a front end, on the loop's thread."""

    around: Callable[[Infer, ModelEntry], Infer] | None = None
    """Wraps what serves a version; returns `inner` itself where the extension is off for it. Called once for
    each version of each catalogue, so state that lasts longer belongs to the extension."""
    holds_back: Callable[[ModelEntry], Callable[[], bool] | None] | None = None
    """Returns what says whether a request for this version that the gate rejects at its head is read all the
    same, because the extension may answer it; None where the extension is off."""
    early: Callable[[ModelEntry], LooksEarly | None] | None = None
    """Returns what may answer a request on a picture route before its picture is read; None where the
    extension is off. It is asked only where this extension's wrapper is the outermost, no version is chosen
    and nothing is observed: else the request itself has to come to the wrappers."""
    engine: Callable[[EngineClient], EngineClient] | None = (
        None  # wraps the way to the engine, if a server option starts it
    )
    follow: Callable[[Catalog], None] | None = None  # is called with each new catalogue
    observe: Callable[[], Observer | None] | None = None  # is asked after `follow`; None: nothing is observed
    picture: SeesPictures | None = None  # sees requests with pictures, while there is an observer
    refused: SeesRefused | None = None  # sees what was rejected at its head, while there is an observer
    shows: Callable[[ModelEntry], Any] | None = None
    """Returns what the console says of a version, as JSON under the extension's name; None: nothing."""
    counts: Callable[[Cells], Any] | None = None
    """Returns the same of what is counted of a version that the extension is on for."""
    close: Callable[[], None] | None = None
    state: object = None  # what the extension's routes read (`FrontParts.state_of`)
    picture_model: Callable[[ModelEntry], PictureModel | None] | None = None
    """Returns what takes the pictures of a version that is made of several models; None where the extension
    is off. The outermost that returns one counts. It raises `Unavailable` while other models are missing."""
    picture_model_for: Callable[[ModelEntry, Mapping[str, str]], PictureModel | None] | None = None
    """Returns what takes the pictures of requests with these options on picture routes; None: what takes all
    others. The outermost that returns one counts. Called once for each head and catalogue."""
    choose: Callable[[ModelEntry, Mapping[bytes, bytes], bool], Choice | None] | None = None
    """Returns what chooses between versions, given the newest one, the fields of a head and whether tensors
    come; None where all such requests are for the one version. Without fields, it says whether requests are
    divided at all. Called once for each head and catalogue over HTTP, and for each such call over gRPC."""
