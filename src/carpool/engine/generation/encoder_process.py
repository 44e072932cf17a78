"""An encoder in a process of its own, as its pool sees it: a stand-in that sends pictures and gets rows.

Its preprocessing and its launches share no interpreter lock with the decoders' steps, and when it crashes
they go on. A thread keeps the process: starts it, waits for its end, starts it again. Pictures go over in
memory that both map, rows come back in pieces of memory that belongs to this process (memory/host_rows.py):
each is lent to whoever has the rows, and comes back to `_free` when nobody has them any more, be it that a
decoder took them, that their rider left, or that the encoding failed.

Who shares what: the process is used by one thread at a time, which holds `_using`; the keeper closes its
files only under the same lock. `_changed` guards which process there is and whether it is up. `_free` is a
SimpleQueue, since pieces come back from finalizers, in the midst of anything, where no lock may be taken.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from queue import Empty, SimpleQueue
from time import monotonic
from typing import Any

import numpy as np

from carpool.backends.backend import aborted
from carpool.backends.python.python_backend import SETUP_TIMEOUT
from carpool.backends.python.worker_process import WorkerDied, WorkerProcess, WorkerTimeout
from carpool.backends.stepper import Encoder, EncoderOrder, RowMemory, TextHome
from carpool.errors import CarpoolError, DeadlineExceeded, ModelError, Unavailable
from carpool.link.typed_json import from_json, write_document
from carpool.memory.host_rows import RowForm, create_rows
from carpool.observe.logs import logger
from carpool.types import Array

_log = logger("engine")
_WORKER = "carpool.runner.encoder_worker"
_AT_ONCE = 32  # pictures that go over together
_PIECES = 2 * _AT_ONCE  # those of one encoding are filled while decoders take those of the one before
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 60.0  # before it is started again
_STABLE_S = 60.0  # who lived so long is started again as if it were the first time
_PATIENCE_S, _BEAT_S = 30.0, 1.0  # how long riders wait for one that is being started again
# Sooner than the engine gives up the whole instance (text_model.py): here one encoding is lost, not all.
_HANGS_S, _TIMES_AS_LONG, _SOONER = 8.0, 80.0, 0.8


class EncoderDied(ModelError):
    """In the midst of an encoding."""

    reason = "model-died"


class EncoderProcess:
    """Implements `Encoder`. `encode` may be called from several threads: others of the pool ask it to help
    while their own process is down."""

    device, broken = "", False
    notes: Sequence[str] = ("Each encoder has a process of its own.",)

    def __init__(
        self, order: EncoderOrder, home: TextHome, changed: Callable[[], None], *, near: bool = False
    ) -> None:
        """It is being loaded when this returns: `loaded` waits for that. `near`: decoders are on its GPU."""
        self._order, self._home, self._near = order, home, near
        self._model = order.config.name
        self._tell = changed
        self.pool: Sequence[EncoderProcess] = (self,)
        self._pictures: Encoder | None = None  # who reads them here
        self._file = create_rows()
        self._form: RowForm | None = None
        self._rows: RowMemory | None = None
        self._free: SimpleQueue[int] = SimpleQueue()
        for piece in range(_PIECES):
            self._free.put(piece)
        self._slowest = 0.0
        self._using = threading.Lock()
        self._changed = threading.Condition()
        self._process: WorkerProcess | None = None
        self._failed: CarpoolError | None = None  # it never came up
        self._up = self._closed = False
        self._keeper = threading.Thread(target=self._keep, name=f"{self._model}-encoder", daemon=True)
        self._keeper.start()

    def loaded(self, pictures: Encoder) -> None:
        """Raises what its process said where that could not load it. `pictures` knows how to read them."""
        self._pictures = pictures
        with self._changed:
            self._changed.wait_for(lambda: self._up or self._closed or self._failed is not None)
            if self._failed is not None:
                raise self._failed

    @property
    def up(self) -> bool:
        return self._up

    def read(self, inputs: Mapping[str, Array]) -> Array:
        assert self._pictures is not None
        return self._pictures.read(inputs)

    def sample(self) -> Array:
        assert self._pictures is not None
        return self._pictures.sample()

    def encode(self, pictures: Sequence[Array]) -> Sequence[Any]:
        """One that is alone is tried twice: whatever killed the process may not have been this picture."""
        for again in (len(pictures) == 1, False):
            try:
                return self._working()._encode(pictures)
            except EncoderDied:
                if not again:
                    raise
        raise AssertionError("unreachable")

    def _working(self) -> EncoderProcess:
        """This one, or another one of its pool while it is down."""
        end = monotonic() + _PATIENCE_S
        while True:
            for one in (self, *self.pool):
                if one.up:
                    return one
            with self._changed:
                if self._closed:
                    raise aborted(self._model)
                self._changed.wait_for(lambda: self._up or self._closed, _BEAT_S)
            if monotonic() > end:
                raise Unavailable(f"{self._model}: its encoder is being restarted", reason="restarting")
            self._tell()  # its riders wait, and nobody must think that it hangs

    def _encode(self, pictures: Sequence[Array]) -> Sequence[Any]:
        found: list[Any] = []
        for first in range(0, len(pictures), _AT_ONCE):
            found += self._encode_some(pictures[first : first + _AT_ONCE])
        return found

    def _encode_some(self, pictures: Sequence[Array]) -> Sequence[Any]:
        pieces: list[int] = []
        try:
            while len(pieces) < len(pictures):
                pieces.append(self._free.get(timeout=_PATIENCE_S))
            counts = self._ask_for_rows(pictures, pieces)
        except BaseException as error:
            # The process has answered, or is dead, or was never asked: it writes to none of them any more.
            for piece in pieces:
                self._free.put(piece)
            if isinstance(error, Empty):
                raise ModelError(f"{self._model}: its decoders do not take what was encoded") from None
            raise
        assert self._rows is not None
        return [
            self._rows.rows(piece, count, partial(self._free.put, piece))
            for piece, count in zip(pieces, counts, strict=True)
        ]

    def _ask_for_rows(self, pictures: Sequence[Array], pieces: Sequence[int]) -> Sequence[int]:
        with self._using:
            process, form = self._process, self._form
            if not self._up or process is None or form is None:
                raise EncoderDied(f"{self._model}: its encoder is gone")
            began = monotonic()
            limit = self._limit()
            process.deadline = None if limit is None else began + limit
            inputs = process.inputs.write({str(place): one for place, one in enumerate(pictures)})
            try:
                answer = self._ask(process, {"inputs": inputs, "pieces": list(pieces)})
            except WorkerTimeout:
                self._lost(process)
                late = f"{self._model}: its encoder did not answer within {limit or 0:.0f} s"
                raise DeadlineExceeded(late, reason="execution-timeout") from None
            self._slowest = max(self._slowest, monotonic() - began)
            if "error" in answer:
                raise self._failure(answer)
            try:
                counts: Sequence[int] = from_json(list[int], answer["rows"])
                if len(counts) != len(pieces) or not all(0 < count <= form.most for count in counts):
                    raise ValueError(f"{counts} rows for {len(pieces)} pictures of up to {form.most} each")
            except (KeyError, TypeError, ValueError) as error:
                raise self._nonsense(process, error) from None
            return counts

    def _limit(self) -> float | None:
        """Seconds for one encoding; None: any."""
        told = self._order.config.execution_timeout
        if told is not None:
            return _SOONER * told or None
        if not self._slowest:
            return SETUP_TIMEOUT
        return max(_HANGS_S, _TIMES_AS_LONG * self._slowest)

    def _ask(self, process: WorkerProcess, message: Mapping[str, Any]) -> dict[str, Any]:
        try:
            process.channel.send(message)
            return process.channel.receive()
        except (WorkerDied, EOFError, OSError):
            how = self._lost(process)
        except (ValueError, RecursionError) as error:
            raise self._nonsense(process, error) from None
        if self._closed:
            raise aborted(self._model)
        raise EncoderDied(f"{self._model}: the encoder's process died ({how})")

    def _lost(self, process: WorkerProcess) -> str:
        """It is not asked again before the keeper has seen its end, and another is up."""
        with self._changed:
            self._up = False
        return process.end()

    def _nonsense(self, process: WorkerProcess, error: Exception) -> ModelError:
        self._lost(process)
        return ModelError(f"{self._model}: the encoder's process sent a broken answer: {error}")

    def _failure(self, answer: Mapping[str, Any]) -> ModelError:
        return ModelError(f"{self._model}: {str(answer['error']).removeprefix(f'{self._model}: ')}")

    def abort(self) -> None:
        with self._changed:
            self._closed = True
            process = self._process
            self._changed.notify_all()
        if process is not None:
            process.kill()

    def close(self) -> None:
        """Its process is gone then. What it handed over can still be read."""
        self.abort()
        self._keeper.join()

    # ---- the thread that keeps it -----------------------------------------------------------------------

    def _keep(self) -> None:
        pause = _FIRST_PAUSE_S
        while not self._closed:
            began = monotonic()
            try:
                process = self._start()
            except Exception as error:
                if not self._is_kept(error, pause):
                    break
                pause = min(_LONGEST_PAUSE_S, 2 * pause)
                continue
            self._turn(up=True)
            process.wait()
            how = self._end(process)
            if self._closed:
                break
            pause = _FIRST_PAUSE_S if monotonic() - began >= _STABLE_S else pause
            _log.error("encoder-died", **self._fields, ending=how, restart_in_s=pause)
            self._turn(up=False)
            self._rest(pause)
            pause = min(_LONGEST_PAUSE_S, 2 * pause)
        self._turn(up=False)
        os.close(self._file)

    @property
    def _fields(self) -> dict[str, Any]:
        return {"model": self._model, "encoder": self._order.instance}

    def _start(self) -> WorkerProcess:
        order = self._order
        process = WorkerProcess(order.threads, _WORKER, (self._file,))
        with self._changed:
            self._process = process
            if self._closed:
                process.kill()
        try:
            process.deadline = monotonic() + SETUP_TIMEOUT
            written = np.frombuffer(write_document(order), np.uint8)
            places = process.inputs.write({"order": written})
            form = self._form_of(process, {"file": str(order.version.file), "order": places})
            if self._rows is None or self._form is None:
                gpu = order.gpu if self._near else None
                self._rows, self._form = self._home.make_rows(form, self._file, _PIECES, gpu), form
            elif form != self._form:
                raise ModelError(f"{self._model}: its encoder has changed, and its decoders have not")
            answer = self._ask(process, {"rows": dict(self._rows.told)})
            if "error" in answer:
                raise self._failure(answer)
        except BaseException as error:
            process.kill()
            self._end(process)
            if isinstance(error, WorkerTimeout):
                raise ModelError(f"{self._model}: its encoder was not ready in {SETUP_TIMEOUT:g} s") from None
            raise
        return process

    def _form_of(self, process: WorkerProcess, settings: Mapping[str, Any]) -> RowForm:
        answer = self._ask(process, settings)
        if "error" in answer:
            raise self._failure(answer)
        try:
            form: RowForm = from_json(RowForm, answer["form"])
        except (KeyError, TypeError, ValueError) as error:
            raise self._nonsense(process, error) from None
        return form

    def _is_kept(self, error: Exception, pause: float) -> bool:
        """It could not be started. False: it never could, and whoever loads it hears why."""
        if self._closed:
            return False
        if self._rows is not None:
            _log.error("encoder-not-restarted", **self._fields, error=str(error), restart_in_s=pause)
            self._rest(pause)
            return True
        if not isinstance(error, CarpoolError):
            error = ModelError(f"{self._model}: {type(error).__name__}: {error}")
        with self._changed:
            self._failed = error
            self._changed.notify_all()
        return False

    def _rest(self, pause: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._closed, pause)

    def _end(self, process: WorkerProcess) -> str:
        """It is not asked any more, and whoever asked it has heard: then its files are closed."""
        how = self._lost(process)
        with self._using:
            process.close()
            self._process = None
        return how

    def _turn(self, *, up: bool) -> None:
        with self._changed:
            self._up = up and not self._closed
            self._changed.notify_all()
        self._tell()
