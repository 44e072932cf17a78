"""Requests over HTTP with one head, for one model: who serves them, and what is done before their bodies."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from itertools import pairwise
from time import monotonic
from typing import Generic, Protocol, TypeVar

from carpool.errors import CarpoolError
from carpool.extensions import choice_fields
from carpool.frontend.access.guard import check_model
from carpool.frontend.calls.lane import Choice
from carpool.frontend.calls.packing import AT_ONCE
from carpool.frontend.calls.request import ModelLane
from carpool.frontend.calls.trace_context import RequestOrigin
from carpool.frontend.demands import NotLoaded
from carpool.frontend.front_service import not_serving
from carpool.frontend.http.exchange import (
    BodyPlan,
    Collect,
    Exchange,
    HttpHead,
    answer_error,
    hand_over,
    status_of,
)
from carpool.frontend.http.http_service import HttpService
from carpool.link.catalog import Catalog, ModelEntry
from carpool.link.senders import Sender
from carpool.observe.counters import count_failure

_MOST_SENDERS = 256
_NAMED = {"models": "{model}", "predictions": "{model}", "versions": "{version}"}


def origin_of(exchange: Exchange, error: CarpoolError | None, gate_status: int) -> RequestOrigin:
    """With the route, in which what varies has no name: spans are counted by it."""
    head = exchange.head
    parts = [""]
    for before, part in pairwise(head.path.split("/")):
        parts.append(_NAMED.get(before) or ("{version}" if part.isdigit() else part))
    route = "/".join(parts)
    return RequestOrigin(
        f"{head.method} {route}",
        {
            "http.request.method": head.method,
            "http.route": route,
            "url.path": head.path,
            "network.protocol.version": f"1.{head.http_minor}",
            "client.address": exchange.peer,
            "http.response.status_code": 200 if error is None else status_of(error, gate_status),
        },
    )


class AtHead:
    """Implements `Caller`: a request that was refused before its body was read."""

    __slots__ = ("_exchange", "_gate_status")

    siblings = b""

    def __init__(self, exchange: Exchange, gate_status: int) -> None:
        self._exchange = exchange
        self._gate_status = gate_status

    @property
    def sent_fields(self) -> Mapping[bytes, bytes]:
        return self._exchange.head.headers

    def origin(self, error: CarpoolError | None) -> RequestOrigin:
        return origin_of(self._exchange, error, self._gate_status)


class ServedModel(Protocol):
    """Describes what serves a request."""

    @property
    def lane(self) -> ModelLane: ...


Target = TypeVar("Target", bound=ServedModel)


class ModelRoute(Generic[Target]):
    """Requests with one head, for one model. Their target is worked out once for each catalogue.

    Requests that name no version may have a choice of several, and each request has one of them.
    """

    _tensors = True  # as the model takes them

    def __init__(
        self, service: HttpService, sender: Sender, budget: float, head: HttpHead, *, named: bool
    ) -> None:
        """`named`: the head says which version it wants."""
        self.service = service
        self._sender = sender
        self._senders: dict[str, Sender] = {}  # by who pays: many clients send the same head
        self._budget = budget  # seconds from a head to the client's deadline
        self._named = named
        self._headers = head.headers
        self._asks_for_choice = not choice_fields().keys().isdisjoint(head.headers)
        self._catalog: Catalog | None = None
        self._target: Target | None = None
        self._targets: dict[int, Target] = {}  # by the entry's key, of the versions that are chosen from
        self._found: ModelEntry | None = None  # the model, also where its options are wrong
        self.choice: Choice | None = None  # who answers which request, where that is a question

    def begin(self, exchange: Exchange) -> BodyPlan:
        """Refuse before the body what can be refused, else say where it goes."""
        service, sender = self.service, self._senders.get(exchange.payer)
        if sender is None:
            sender = self._sender_from(exchange.payer)
        exchange.sender = sender
        target: Target | None = None
        try:
            if not service.engine.serving:
                with contextlib.suppress(CarpoolError):
                    self._found = self._find(service.engine.catalog)  # of the last engine: counted there
                raise not_serving()
            target = self.current(exchange.head_at)
            advised = self._advised(exchange, target)
            if advised is not None and self.choice is not None:
                advised = self._advised_instead(exchange, self.choice.instead(target.lane.entry), advised)
            refusal = service.fair.judge(target.lane.entry, exchange, sender, advised)
            if refusal is None:
                return self._plan(exchange, target)
        except NotLoaded as missing:
            return self._wait_for(missing.model, exchange)
        except CarpoolError as error:
            refusal = error
        known = target or self._target
        if self.choice is not None and known is not None:
            self.choice.rejected(known.lane.entry, refusal)
        entry = self._found if known is None else known.lane.entry
        service.fair.tell(exchange, refusal, entry, sender.source)
        for sees in service.parts.see_refused:
            sees(AtHead(exchange, service.fair.gate_status), entry, refusal, exchange.head_at)
        if entry is not None:  # else it is no model's failure
            count_failure(service.row(entry), refusal, 0.0, unheard=0 if sender.again else 1)
            service.engine.rejected_here(entry, refusal, exchange.head_at, source=sender.source)
        return None

    def _advised_instead(
        self, exchange: Exchange, other: ModelEntry | None, advised: CarpoolError
    ) -> CarpoolError | None:
        """Returns what the engine would say to the version that is asked instead, if there is one."""
        return advised if other is None else self._advised(exchange, self._targets[other.key])

    def _sender_from(self, payer: str) -> Sender:
        if len(self._senders) >= _MOST_SENDERS:
            self._senders.clear()
        sender = self._senders[payer] = self._sender.paid_by(payer)
        return sender

    def _wait_for(self, model: str, exchange: Exchange) -> BodyPlan:
        """It is loaded when the body is here and is a request, whatever the model takes; the body waits for
        that. Then the promise begins; the client's own deadline runs on."""
        service = self.service
        check_model(exchange.who, model)

        async def wait(body: bytes | bytearray) -> None:
            try:
                check = self._checked_unloaded(body)
                if check is not None and len(body) <= AT_ONCE:
                    check()
                elif check is not None:
                    await service.fair_threads.begin(exchange.payer, lambda _: check()).done
                await service.demands.loaded(model, exchange.head_at + self._budget, len(body))
                if exchange.pending:
                    exchange.on_disconnect = None
                    hand_over(self._plan(exchange, self.current(exchange.head_at)), body, monotonic())
            except CarpoolError as error:
                service.fair.tell(exchange, error, source=self._sender.source)
            except Exception as fault:
                service.log.exception("request-failed", model=model)
                answer_error(exchange, CarpoolError(f"the server failed on this request: {fault}"))

        def received(body: bytes | bytearray, _at: float) -> None:
            task = service.later(wait(body))

            def left() -> None:
                task.cancel()

            exchange.on_disconnect = left

        return Collect(service.max_body_bytes, received)

    def current(self, at: float) -> Target:
        """Returns what serves these requests now: a change of the catalogue holds from the next look on. `at`
        is when the request's head was here, which distinguishes it from other requests."""
        catalog = self.service.engine.catalog
        if catalog is not self._catalog or self._target is None:
            self._target = self.choice = self._found = None
            self._found = self._find(catalog)
            self._target = self._made(self._found)
            if not self._named and (self._target.lane.divided or self._asks_for_choice):
                self._choose_from(self.service.choose(self._found, self._headers, self._tensors))
            self._catalog = catalog
        return self._target if self.choice is None else self.for_sender(self._sender, at)

    def _choose_from(self, choice: Choice | None) -> None:
        """Works out the target of each version, if there are several for requests that name none."""
        if choice is not None:
            self._targets = {entry.key: self._made(entry) for entry in choice.entries}
            self._target = self._targets[choice.entries[0].key]
        self.choice = choice

    def for_sender(self, sender: Sender, at: float) -> Target:
        """Returns the target of the version that is chosen for a request of this sender."""
        assert self.choice is not None
        return self._targets[self.choice.choose(sender, at).key]

    def _find(self, catalog: Catalog) -> ModelEntry:
        raise NotImplementedError

    def _made(self, entry: ModelEntry) -> Target:
        raise NotImplementedError

    def _advised(self, exchange: Exchange, target: Target) -> CarpoolError | None:
        """Returns what the engine would say to it now."""
        raise NotImplementedError

    def _plan(self, exchange: Exchange, target: Target) -> BodyPlan:
        raise NotImplementedError

    def _checked_unloaded(self, body: bytes | bytearray) -> Callable[[], object] | None:
        """Returns what raises when the body is wrong for any model, in any thread, if there is something to
        check: no model is loaded for such a body."""
        raise NotImplementedError
