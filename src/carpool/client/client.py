"""`carpool.Client`: a server asked from a program, over connections that are kept."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from select import POLLIN, poll
from time import monotonic, sleep
from types import TracebackType
from typing import Literal, TypeVar, overload

from carpool.client import questions
from carpool.client.live_frames import Frame, LiveFrames
from carpool.client.questions import Asked, Patience, Question, Server, Value
from carpool.client.text_stream import TextStream
from carpool.errors import CarpoolError
from carpool.types import Array, RequestOptions
from carpool.vision.python_pictures import (
    Answer,
    Classes,
    Detections,
    Embedding,
    Masks,
    Picture,
    Poses,
    Reading,
    RotatedBoxes,
)
from carpool.wire.http_reply import Reply

Item = TypeVar("Item")


class Client:
    """Asks a server. Every thread may use it.

        with Client("http://localhost:8000") as client:
            found = client.detect("street.jpg", score=0.5)
            print(found.labels, found.boxes)

    A picture is a file's bytes or path, an image of Pillow, pixels as an array, or the https:// address of
    one that the server may fetch. What the server refuses and wants later is asked again, for up to
    `patience_s`; nothing else is asked twice. `timeout_s` is for each answer.
    """

    def __init__(
        self,
        url: str = "http://localhost:8000",
        *,
        api_key: str = "",
        ca: str = "",
        certificate: str = "",
        private_key: str = "",
        insecure: bool = False,
        timeout_s: float = 60.0,
        patience_s: float = 30.0,
        connections: int = 16,
    ) -> None:
        self._server = questions.find_server(
            url, api_key=api_key, ca=ca, certificate=certificate, private_key=private_key, insecure=insecure
        )
        self._connections = Connections(self._server, timeout_s, connections)
        self._patience_s = patience_s
        self._first_model = ""

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """The connections. A client that is used again opens new ones."""
        self._connections.close()

    # ---- one picture

    def predict(
        self,
        picture: Picture,
        *,
        task: str = "",
        model: str = "",
        version: str = "",
        deadline_ms: float | None = None,
        source: str = "",
        **options: object,
    ) -> Answer:
        """What the model does, or this task; without either, what the first model does that was configured.
        Options are those of the task, such as score and top_k."""
        asked = Asked(task, model if task else model or self._first(), version, deadline_ms, source)
        return self._ask(questions.ask_picture(picture, asked, options, Answer))

    def detect(
        self,
        picture: Picture,
        *,
        model: str = "",
        version: str = "",
        deadline_ms: float | None = None,
        source: str = "",
        **options: object,
    ) -> Detections:
        asked = Asked("detect", model, version, deadline_ms, source)
        return self._ask(questions.ask_picture(picture, asked, options, Detections))

    def classify(
        self,
        picture: Picture,
        *,
        model: str = "",
        version: str = "",
        deadline_ms: float | None = None,
        source: str = "",
        **options: object,
    ) -> Classes:
        asked = Asked("classify", model, version, deadline_ms, source)
        return self._ask(questions.ask_picture(picture, asked, options, Classes))

    def segment(
        self,
        picture: Picture,
        *,
        model: str = "",
        version: str = "",
        deadline_ms: float | None = None,
        source: str = "",
        **options: object,
    ) -> Masks:
        asked = Asked("segment", model, version, deadline_ms, source)
        return self._ask(questions.ask_picture(picture, asked, options, Masks))

    def pose(
        self,
        picture: Picture,
        *,
        model: str = "",
        version: str = "",
        deadline_ms: float | None = None,
        source: str = "",
        **options: object,
    ) -> Poses:
        asked = Asked("pose", model, version, deadline_ms, source)
        return self._ask(questions.ask_picture(picture, asked, options, Poses))

    def obb(
        self,
        picture: Picture,
        *,
        model: str = "",
        version: str = "",
        deadline_ms: float | None = None,
        source: str = "",
        **options: object,
    ) -> RotatedBoxes:
        asked = Asked("obb", model, version, deadline_ms, source)
        return self._ask(questions.ask_picture(picture, asked, options, RotatedBoxes))

    def embed(
        self,
        picture: Picture,
        *,
        model: str = "",
        version: str = "",
        deadline_ms: float | None = None,
        source: str = "",
        **options: object,
    ) -> Embedding:
        asked = Asked("embed", model, version, deadline_ms, source)
        return self._ask(questions.ask_picture(picture, asked, options, Embedding))

    def read(
        self,
        picture: Picture,
        *,
        model: str = "",
        version: str = "",
        deadline_ms: float | None = None,
        source: str = "",
        **options: object,
    ) -> Reading:
        asked = Asked("read", model, version, deadline_ms, source)
        return self._ask(questions.ask_picture(picture, asked, options, Reading))

    def caption(
        self,
        picture: Picture,
        *,
        model: str = "",
        version: str = "",
        deadline_ms: float | None = None,
        source: str = "",
        **options: object,
    ) -> Reading:
        asked = Asked("caption", model, version, deadline_ms, source)
        return self._ask(questions.ask_picture(picture, asked, options, Reading))

    def stream_text(
        self,
        picture: Picture,
        *,
        task: str = "read",
        model: str = "",
        version: str = "",
        deadline_ms: float | None = None,
        source: str = "",
        **options: object,
    ) -> TextStream:
        """What `read` or `caption` answers, piece by piece while the model writes it. `timeout_s` is for each
        piece. Not all models write: those that answer at once give one piece."""
        asked = Asked(task, model, version, deadline_ms, source)
        question = questions.ask_events(picture, asked, options)
        connections = self._connections
        connection, response = self._patiently(lambda: connections.begin(question))
        return TextStream(self._server, connection, response, connections.give_back)

    def draw(
        self,
        picture: Picture,
        *,
        task: str = "",
        model: str = "",
        file_format: str = "jpeg",
        **options: object,
    ) -> bytes:
        """The picture's file with the answer drawn in: jpeg, png or webp."""
        asked = Asked(task, model if task else model or self._first())
        return self._ask(questions.ask_drawing(picture, asked, options, file_format))

    # ---- tensors

    def infer(
        self,
        model: str,
        inputs: Mapping[str, Array],
        *,
        version: str = "",
        outputs: Sequence[str] = (),
        deadline_ms: float | None = None,
        priority: int = 0,
        source: str = "",
        sequence_id: int | str = 0,
        sequence_start: bool = False,
        sequence_end: bool = False,
    ) -> dict[str, Array]:
        """Arrays by name, with the batch dimension where the model has one; no `outputs` are all of them."""
        options = RequestOptions(
            priority=priority,
            source=source,
            sequence_id=sequence_id,
            sequence_start=sequence_start,
            sequence_end=sequence_end,
        )
        return self._ask(questions.ask_infer(model, inputs, version, outputs, options, deadline_ms))

    # ---- many pictures

    @overload
    def map(
        self,
        pictures: Iterable[Picture],
        *,
        task: str = "",
        model: str = "",
        at_once: int = 8,
        errors: Literal["raise"] = "raise",
        **options: object,
    ) -> Iterator[Answer]: ...

    @overload
    def map(
        self,
        pictures: Iterable[Picture],
        *,
        task: str = "",
        model: str = "",
        at_once: int = 8,
        errors: Literal["return"],
        **options: object,
    ) -> Iterator[Answer | CarpoolError]: ...

    def map(
        self,
        pictures: Iterable[Picture],
        *,
        task: str = "",
        model: str = "",
        at_once: int = 8,
        errors: Literal["raise", "return"] = "raise",
        **options: object,
    ) -> Iterator[Answer | CarpoolError]:
        """The answers in the order of the pictures, which are taken as they are needed, `at_once` under way.

        With `errors="return"`, what a picture failed with stands in its place, and the others go on.
        """
        asked = Asked(task, model if task else model or self._first())

        def ask(picture: Picture) -> Answer | CarpoolError:
            try:
                return self._ask(questions.ask_picture(picture, asked, options, Answer))
            except CarpoolError as error:
                if errors == "raise":
                    raise
                return error

        return in_order(ask, pictures, at_once)

    def stream(
        self,
        frames: Iterable[Picture],
        *,
        task: str = "",
        model: str = "",
        source: str = "stream",
        at_once: int = 2,
        deadline_ms: float | None = None,
        **options: object,
    ) -> Iterator[Frame]:
        """Answers to a live source, the newest frame first: what is older when its turn comes is dropped.

        `frames` is read in a thread as fast as it gives them. Frames that the server refuses are dropped.
        """
        asked = Asked(task, model if task else model or self._first(), "", deadline_ms, source, latest=True)

        def ask(picture: Picture) -> Answer:
            question = questions.ask_picture(picture, asked, options, Answer)
            return question.read(self._connections.ask(question))

        return LiveFrames(ask, at_once).answers(frames)

    # ---- asking

    def _ask(self, question: Question[Value]) -> Value:
        return self._patiently(lambda: question.read(self._connections.ask(question)))

    def _patiently(self, ask: Callable[[], Value]) -> Value:
        patience = Patience(self._patience_s, monotonic())
        while True:
            try:
                return ask()
            except CarpoolError as error:
                wait = patience.wait(error, monotonic())
                if wait is None:
                    raise
            sleep(wait)

    def _first(self) -> str:
        if not self._first_model:
            self._first_model = self._ask(questions.ask_first_model())
        return self._first_model


class Connections:
    """Those to one server: as many as are needed at once, and `most` of them are kept for the next time."""

    def __init__(self, server: Server, timeout_s: float, most: int) -> None:
        self._server = server
        self._timeout_s = timeout_s
        self._most = most
        self._idle: list[tuple[float, HTTPConnection]] = []
        self._lock = threading.Lock()  # of the list: threads take and give back

    def ask(self, question: Question[Value]) -> Reply:
        connection, response = self._send(question)
        with self._lost_with(connection), response:
            status, said = response.status, {k.lower(): v for k, v in response.getheaders()}
            body = response.read(questions.MOST_REPLY_BYTES)
            keep = response.isclosed() and not response.will_close
        self.give_back(connection, keep)
        return self._server.read(status, said, body)

    def begin(self, question: Question[Value]) -> tuple[HTTPConnection, HTTPResponse]:
        """The reply's body is still to be read, and the connection to be given back."""
        connection, response = self._send(question)
        if response.status == 200:
            return connection, response
        with self._lost_with(connection), response:
            status, said = response.status, {k.lower(): v for k, v in response.getheaders()}
            body = response.read(questions.MOST_REPLY_BYTES)
        connection.close()
        raise questions.error_of(status, said, body)

    def _send(self, question: Question[Value]) -> tuple[HTTPConnection, HTTPResponse]:
        server = self._server
        connection = self._take()
        fields = {"Host": server.where, **server.fields, **question.fields, **questions.trace_fields()}
        with self._lost_with(connection):
            try:
                connection.request(question.method, server.prefix + question.path, question.body, fields)
            except (BrokenPipeError, ConnectionResetError):
                if connection.sock is None:
                    raise
                # who does not want the whole body may have answered before its end: read that
            return connection, connection.getresponse()

    @contextmanager
    def _lost_with(self, connection: HTTPConnection) -> Iterator[None]:
        """What goes wrong with a connection closes it, and is told in words."""
        server = self._server
        try:
            yield
        except TimeoutError:
            connection.close()
            raise server.too_slow(self._timeout_s) from None
        except OSError as error:
            connection.close()
            raise server.lost(f"no answer: {error.strerror or error}") from None
        except HTTPException as error:  # its words would be those of whatever is there
            connection.close()
            raise server.lost(f"what answers there does not speak HTTP ({type(error).__name__})") from None
        except BaseException:
            connection.close()
            raise

    def _take(self) -> HTTPConnection:
        """One that the server has not closed meanwhile: a request that is lost cannot be sent again."""
        while True:
            with self._lock:
                found = self._idle.pop() if self._idle else None
            if found is None:
                break
            since, connection = found
            if monotonic() - since < questions.IDLE_S and connection.sock is not None:
                look = poll()
                look.register(connection.sock, POLLIN)
                if not look.poll(0):
                    return connection
            connection.close()
        address, timeout, tls = (self._server.host, self._server.port), self._timeout_s, self._server.tls
        if tls is not None:
            return HTTPSConnection(*address, timeout=timeout, context=tls)
        return HTTPConnection(*address, timeout=timeout)

    def give_back(self, connection: HTTPConnection, keep: bool) -> None:
        with self._lock:
            if keep and len(self._idle) < self._most:
                self._idle.append((monotonic(), connection))
                return
        connection.close()

    def close(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        for _, connection in idle:
            connection.close()


def in_order(ask: Callable[[Item], Value], items: Iterable[Item], at_once: int) -> Iterator[Value]:
    """What `ask` gives for each, in order, with so many under way; items are taken when there is room."""
    under_way: deque[Future[Value]] = deque()
    with ThreadPoolExecutor(at_once) as pool:
        try:
            for item in items:
                under_way.append(pool.submit(ask, item))
                if len(under_way) >= 2 * at_once or under_way[0].done():
                    yield under_way.popleft().result()
            while under_way:
                yield under_way.popleft().result()
        finally:
            for future in under_way:
                future.cancel()
