"""Reports the load of this server with its answers: `endpoint-load-metrics`, which ORCA defines and which
balancers turn into weights.

The weight that Envoy makes of it is images per second over utilization: what the server can answer.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from carpool.frontend.http.exchange import (
    Answerer,
    Before,
    Body,
    Exchange,
    HttpHead,
)
from carpool.observe.columns import CAPACITY, LOAD
from carpool.observe.counters import Table

if TYPE_CHECKING:
    from carpool.frontend.http.long_answer import AnswerReader, LongBody

FORMAT_FIELD = b"endpoint-load-metrics-format"
"""With this a request asks for it, and says how: text or json."""

_LOOK_S = 0.25
_TEXT = b"endpoint-load-metrics: TEXT application_utilization=%.4f,rps_fractional=%.3f\r\n"
_JSON = b'endpoint-load-metrics: JSON {"application_utilization":%.4f,"rps_fractional":%.3f}\r\n'


class LoadReport:
    """Reports the load in answers. The front end reads it from the counters a few times a second."""

    def __init__(self, table: Table, *, always: bool) -> None:
        self._table = table
        self._always = always
        self.text = self.json = b""
        self._look()

    def _look(self) -> None:
        """Adds up the loads of the models of a server, which share its cores, or its devices, more often than
        not."""
        known = [(row.cells[LOAD] - 1.0, row.cells[CAPACITY]) for row in self._table.models()]
        known = [(load, capacity) for load, capacity in known if capacity]
        if known:
            sums = sum(load for load, _ in known), sum(load * capacity for load, capacity in known)
            self.text, self.json = _TEXT % sums, _JSON % sums
        else:
            self.text = self.json = b""
        self._timer = asyncio.get_running_loop().call_later(_LOOK_S, self._look)

    def wanted(self, head: HttpHead) -> bool:
        return self._always or FORMAT_FIELD in head.headers

    def attach(self, exchange: Exchange) -> None:
        """To whatever is answered."""
        as_json = exchange.head.headers.get(FORMAT_FIELD, b"").lower() == b"json"
        exchange.answer_through(lambda connection: _Reporting(connection, self, as_json))

    def close(self) -> None:
        self._timer.cancel()


class _Reporting(Before):
    __slots__ = ("_as_json", "_report")

    def __init__(self, connection: Answerer, report: LoadReport, as_json: bool) -> None:
        super().__init__(connection)
        self._report = report
        self._as_json = as_json

    def answer(self, status: int, fields: bytes, body: Body) -> None:
        self._connection.answer(status, fields + self._field(), body)

    def answer_long(self, exchange: Exchange, body: LongBody, reader: AnswerReader | None = None) -> None:
        body.fields += self._field()
        self._connection.answer_long(exchange, body, reader)

    def _field(self) -> bytes:
        return self._report.json if self._as_json else self._report.text
