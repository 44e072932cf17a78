"""Records when the pieces of a streamed answer came, and whether it is whole: of `/read` and `/caption`, of
Triton's `generate_stream`, and of OpenAI's chat. Callers pass the time."""

from __future__ import annotations

from typing import Any, NamedTuple

import orjson

from carpool.wire.event_lines import EventReader, NoEvents

_MOST_TIMES = 100_000  # of one answer


class Streamed(NamedTuple):
    """`times` are those of its pieces, in seconds from the start of the run."""

    times: tuple[float, ...] = ()
    fault: str = ""  # a word for what is wrong with it
    refused: bool = False  # the server said no in the middle


class TokenTimes:
    """Records the times of one answer, as its bytes come."""

    def __init__(self) -> None:
        self._events = EventReader()
        self._times: list[float] = []
        self._text: list[str] = []
        self._ended = False
        self._fault = ""
        self._refused = False

    def feed(self, data: bytes, now: float) -> None:
        try:
            for event in self._events.feed(data):
                self._take(event, now)
        except NoEvents:
            self._fault = self._fault or "malformed"

    def end(self) -> Streamed:
        """The answer is over. One that says nowhere that it is complete has been cut off."""
        fault = self._fault or ("" if self._ended and not self._events.inside else "incomplete")
        return Streamed(tuple(self._times), fault, self._refused)

    def _take(self, event: bytes, now: float) -> None:
        if self._ended and event != b"[DONE]":
            self._fault = self._fault or "after-the-end"
        elif event == b"[DONE]":
            self._ended = True
        else:
            try:
                document = orjson.loads(event)
            except orjson.JSONDecodeError:
                document = None
            if isinstance(document, dict):
                self._read(document, now)
            else:
                self._fault = self._fault or "malformed"

    def _read(self, document: dict[str, Any], now: float) -> None:
        if "error" in document:
            error = document["error"]
            reason = error.get("code") if isinstance(error, dict) else document.get("reason")
            self._fault = self._fault or (reason if isinstance(reason, str) and reason else "error")
            self._refused = document.get("status") in (429, 503, 504)
            self._ended = True
        elif document.get("done") is True:
            self._ended = True
            if document.get("text") != "".join(self._text):
                self._fault = self._fault or "wrong-text"
        elif "choices" in document:
            self._read_chunk(document["choices"], now)
        else:
            if document.get("index", len(self._times)) != len(self._times):
                self._fault = self._fault or "out-of-order"
            said = document.get("text", document.get("text_output", ""))
            self._add(str(said[0] if isinstance(said, list) and said else said), now)
            if document.get("finish_reason") or document.get("triton_final_response"):
                self._ended = True

    def _read_chunk(self, choices: Any, now: float) -> None:
        for choice in choices if isinstance(choices, list) else ():
            delta = choice.get("delta") if isinstance(choice, dict) else None
            said = delta.get("content") if isinstance(delta, dict) else None
            self._add(said if isinstance(said, str) else "", now)

    def _add(self, text: str, now: float) -> None:
        if text and len(self._times) < _MOST_TIMES:
            self._times.append(now)
            self._text.append(text)
