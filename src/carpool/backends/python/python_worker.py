"""The process in which one Python model lives; the server starts it and talks to it (python_backend.py)."""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import importlib.machinery as machinery
import importlib.util
import inspect
import json
import os
import select
import signal
import socket
import struct
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping
from pathlib import Path
from types import CodeType, ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from carpool.errors import ModelError
from carpool.memory.batch_region import BatchRegion, WrittenTensor
from carpool.observe.output import Printed
from carpool.types import DATATYPES, Array, Datatype

if TYPE_CHECKING:
    from importlib.abc import PathEntryFinder

# ---- small messages between the server and a model's process: JSON behind its length, on a Unix socket

MAX_MESSAGE = 1 << 20
_LENGTH = struct.Struct("<I")
_LOOK_S = 0.01


class Channel:
    """`wait` is called before every read; it may raise to give up on the other side."""

    def __init__(self, sock: socket.socket, wait: Callable[[], None] = lambda: None) -> None:
        self._socket = sock
        self._wait = wait

    def send(self, message: Mapping[str, Any], file: int | None = None) -> None:
        """With `file`, the other side gets it as a descriptor of its own."""
        data = json.dumps(message, separators=(",", ":")).encode()
        if len(data) > MAX_MESSAGE:
            raise ValueError(f"a message of {len(data)} bytes is longer than {MAX_MESSAGE}")
        length = _LENGTH.pack(len(data))
        if file is not None:
            socket.send_fds(self._socket, [length], [file])  # four bytes: all of them, or an error
            length = b""
        self._socket.sendall(length + data)

    def receive(self) -> dict[str, Any]:
        """Returns the next message; EOFError when the other side is gone, ValueError when it sends
        nonsense."""
        return self._message(self._read(_LENGTH.size))

    def receive_with_file(self) -> tuple[dict[str, Any], int | None]:
        """Returns the same, with the descriptor that came along, which is the caller's."""
        data, files, _flags, _address = socket.recv_fds(self._socket, _LENGTH.size, 1)
        file = files[0] if files else None
        try:
            return self._message(data + self._read(_LENGTH.size - len(data)) if data else b""), file
        except BaseException:
            if file is not None:
                os.close(file)
            raise

    def _message(self, head: bytes) -> dict[str, Any]:
        if not head:
            raise EOFError
        (length,) = _LENGTH.unpack(head)
        if length > MAX_MESSAGE:
            raise ValueError(f"a message of {length} bytes is longer than {MAX_MESSAGE}")
        message = json.loads(self._read(length))
        if not isinstance(message, dict):
            raise ValueError("a message must be an object")
        return message

    def close(self) -> None:
        self._socket.close()

    def _read(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            self._wait()
            part = self._socket.recv(size - len(data))
            if not part:
                raise EOFError
            data += part
        return data


# ---- the user's file: what to call, how inputs are handed over, arrays of the answer

_MODULE = "carpool_model"
_SHOWN = 500  # characters of an exception's message that an error repeats

# Plain Python numbers carry no datatype: each kind takes the declared one if that loses nothing by nature.
_FITS = {"b": "b", "i": "iuf", "u": "iuf", "f": "f"}


class UserModel:
    """Wraps the user's model. `settings` is what `setup` gets; its tensors give the names of inputs and the
    datatypes of outputs."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._batched = settings["max_batch"] != 0
        self._outputs = {tensor["name"]: DATATYPES[tensor["datatype"]] for tensor in settings["outputs"]}
        code = settings["code"]  # the server's own, for a file that is no Python file
        module = importlib.import_module(code) if code else import_model(Path(settings["file"]))
        # Both of the class Model, or else of the file itself.
        home = module.Model() if hasattr(module, "Model") else module
        predict, setup = getattr(home, "predict", None), getattr(home, "setup", None)
        if not callable(predict):
            raise ModelError("it has neither a class Model with a method predict nor a function predict")
        self._predict: Callable[..., Any] = predict
        self._spread = not code and _spreads(
            self._predict, {tensor["name"]: tensor["optional"] for tensor in settings["inputs"]}
        )
        if setup is not None:
            setup(dict(settings))
        self.tensors = _plain(home.tensors) if code else None

    def run(self, inputs: Mapping[str, Array], wanted: Collection[str]) -> dict[str, Array]:
        answer = self._predict(**inputs) if self._spread else self._predict(dict(inputs))
        if inspect.isgenerator(answer):
            raise ModelError("predict yields its responses, but the settings do not have decoupled = true")
        outputs = self._named(answer, self._rows(inputs))
        missing = [name for name in wanted if name not in outputs]
        if missing:
            names = ", ".join(outputs) or "none"
            raise ModelError(f"the result has no output {missing[0]!r}; it has {names}")
        return {name: self._array(name, outputs[name]) for name in wanted or outputs}

    def answers(
        self, inputs: Mapping[str, Array], wanted: Collection[str]
    ) -> Generator[dict[str, Array], None, None]:
        """One after the other, as predict yields them. What it returns instead is its one answer."""
        answered = self._predict(**inputs) if self._spread else self._predict(dict(inputs))
        several = answered if isinstance(answered, Iterator) else () if answered is None else (answered,)
        try:
            for answer in several:
                outputs = self._named(answer, self._rows(inputs))
                yield {name: self._array(name, one) for name, one in outputs.items() if name in wanted}
        finally:
            if inspect.isgenerator(several):
                several.close()  # it may hold something that it gives back then

    def _rows(self, inputs: Mapping[str, Array]) -> int | None:
        return len(next(iter(inputs.values()))) if self._batched and inputs else None

    def _named(self, answer: Any, rows: int | None) -> Mapping[str, Any]:
        if isinstance(answer, list) and rows is not None:
            if len(answer) != rows:
                raise ModelError(f"predict returned {len(answer)} results for a batch of {rows}")
            if answer and all(isinstance(item, Mapping) for item in answer):
                return {name: [item[name] for item in answer] for name in answer[0]}
        if isinstance(answer, Mapping):
            return answer
        if len(self._outputs) != 1:
            names = ", ".join(self._outputs) or "none are declared"
            kind = type(answer).__name__
            raise ModelError(f"predict returned a {kind}; return a dict with the outputs' names ({names})")
        return dict.fromkeys(self._outputs, answer)

    def _array(self, name: str, value: Any) -> Array:
        """Whatever has a dtype goes out as it is: the engine says what does not fit what was declared."""
        declared = self._outputs.get(name)
        if declared is Datatype.BYTES:
            return np.asarray(value, dtype=object)
        array = np.asarray(value)
        if declared is None or declared is Datatype.BF16 or _has_dtype(value):
            return array
        if array.dtype.kind in _FITS and declared.dtype.kind in _FITS[array.dtype.kind]:
            return np.asarray(value, dtype=declared.dtype)
        return array


def _plain(tensors: Any) -> list[list[list[Any]]]:
    """Returns it as JSON can say it."""
    return [
        [[name, datatype, [int(dim) for dim in shape]] for name, datatype, shape in side] for side in tensors
    ]


def _has_dtype(value: Any) -> bool:
    """True for arrays and tensors of any library, and for lists of them; a scalar is as good as a number."""
    if isinstance(value, list | tuple):
        return len(value) > 0 and _has_dtype(value[0])
    return hasattr(value, "dtype") and not isinstance(value, np.generic)


class _FromSource(machinery.SourceFileLoader):
    """Compiles the file's current source. Python takes cached bytecode as fresh when the source's length and
    modification time in seconds match; a model that is edited and loaded again may differ in neither."""

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        return self.source_to_code(self.get_data(path), path)


def import_model(file: Path) -> ModuleType:
    """Returns the file as a module that finds its neighbours, and that pickle and dataclasses find in
    turn."""
    folder = file.parent
    sys.path.insert(0, str(folder))
    sys.path_hooks.insert(0, _finder_in(folder))
    sys.path_importer_cache.pop(str(folder), None)
    loader = _FromSource(_MODULE, str(file)) if file.suffix == ".py" else None
    spec = importlib.util.spec_from_file_location(_MODULE, file, loader=loader)
    if spec is None or spec.loader is None:
        raise ModelError("it is not a Python file: its name must end with .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[_MODULE] = module
    spec.loader.exec_module(module)
    return module


def _finder_in(folder: Path) -> Callable[[str], PathEntryFinder]:
    """Returns one for `sys.path_hooks`: all that lies in the folder is compiled from its source, packages
    too."""
    find = machinery.FileFinder.path_hook(
        (machinery.ExtensionFileLoader, machinery.EXTENSION_SUFFIXES),
        (_FromSource, machinery.SOURCE_SUFFIXES),
        (machinery.SourcelessFileLoader, machinery.BYTECODE_SUFFIXES),
    )

    def finder(path: str) -> PathEntryFinder:
        if not Path(path).is_relative_to(folder):
            raise ImportError(f"{path} is not in the model's folder")
        return find(path)

    return finder


def _spreads(predict: Callable[..., Any], inputs: Mapping[str, bool]) -> bool:
    """Returns True when the parameters are the inputs, False when one parameter takes the dict of all inputs.

    `inputs` says which inputs are optional: a parameter for one of those needs a default.
    """
    parameters = inspect.signature(predict).parameters
    required = [
        name
        for name, parameter in parameters.items()
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    named = [name for name in parameters if name in inputs]
    if named:
        strangers = ", ".join(sorted({*required, *inputs} - {*named}))
        if strangers:
            raise ModelError(f"the parameters of predict and the model's inputs differ in {strangers}")
        for name in (name for name, optional in inputs.items() if optional and name in required):
            raise ModelError(
                f"the input {name!r} is optional: give its parameter of predict a default, like {name}=None"
            )
        return True
    if len(required) > 1 or not parameters:
        raise ModelError("predict must take one argument, the dict of inputs, or one named like each input")
    return False


def explain(error: BaseException, file: Path) -> str:
    """Returns type, message and where in the user's own code, in one line. The code itself is for the log
    only."""
    message = " ".join(str(error).split())[:_SHOWN]
    text = message if isinstance(error, ModelError) else f"{type(error).__name__}: {message}".rstrip(": ")
    own = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(file)]
    if isinstance(error, SyntaxError):
        return f"{text} ({error.filename}:{error.lineno})"
    if not own:
        return text
    return f"{text} ({file.name}:{own[-1].lineno}, in {own[-1].name})"


def main(arguments: list[str]) -> int:
    sys.stdout = Printed()
    channel, inputs, outputs, _ = connect(arguments)

    def make(settings: dict[str, Any]) -> Made:
        model = UserModel(settings)
        parts = AnswerChannel(channel, inputs, outputs)

        def answer(batch: dict[str, Any]) -> dict[str, Any]:
            if settings["decoupled"]:
                return _answer_many(model, batch, parts, Path(settings["file"]))
            return {"outputs": outputs.write(model.run(inputs.read(batch["inputs"]), batch["wanted"]))}

        return {"tensors": model.tensors}, answer

    return serve(channel, make)


class AnswerChannel:
    """The way of answers to the server, which says after each whose client has gone meanwhile, and who has
    come."""

    def __init__(self, channel: Channel, inputs: BatchRegion, outputs: BatchRegion) -> None:
        self._channel = channel
        self._inputs = inputs
        self._outputs = outputs
        self.gone: set[int] = set()  # numbers of requests
        self.newcomers: list[Newcomer] = []  # requests whose processing has not begun
        self._looked = 0.0

    def begin(self, batch: Mapping[str, Any]) -> None:
        """Begins with the first requests, when none were open."""
        self.gone.clear()
        self._hear(batch)

    def write(self, answer: Mapping[str, Array]) -> list[WrittenTensor]:
        """Returns where it lies; ModelError for what cannot be sent."""
        return self._outputs.write(answer)

    def send(self, number: int, places: list[WrittenTensor], *, last: bool = False) -> None:
        """Sends what was written last."""
        self._tell({"part": number, "outputs": places, "last": last})

    def end(self, number: int, error: tuple[int, str] | None) -> None:
        """Nothing more comes for it."""
        self._tell({"ended": number, "error": error})
        self.gone.discard(number)

    def look(self) -> None:
        """Asks which clients have gone and which requests have come, without an answer to send. Most calls do
        nothing, since models call this in a loop."""
        now = time.monotonic()
        if now - self._looked >= _LOOK_S:
            self._looked = now
            self._tell({"look": True})

    def _tell(self, message: Mapping[str, Any]) -> None:
        self._channel.send(message)
        self._hear(self._channel.receive())

    def _hear(self, said: Mapping[str, Any]) -> None:
        self.gone.update(said.get("gone", ()))
        if said.get("wanted"):
            given, details = requests_of(said, self._inputs)
            several = zip(given, said["wanted"], details, strict=True)
            # The next who come are written over the memory of these.
            self.newcomers += [
                Newcomer(number, {name: array.copy() for name, array in one.items()}, wanted, told)
                for number, (one, wanted, told) in enumerate(several, said["first"])
            ]


class Newcomer(NamedTuple):
    number: int
    inputs: dict[str, Array]
    wanted: list[str]
    details: bytes


def requests_of(batch: Mapping[str, Any], inputs: BatchRegion) -> tuple[list[dict[str, Array]], list[bytes]]:
    """Returns what belongs to each request of a batch, and what each says of itself. In the memory that they
    share tensors are named `number of the request/name`."""
    given: list[dict[str, Array]] = [{} for _ in batch["wanted"]]
    found = dict(inputs.read(batch["inputs"]))
    details = list(found.pop("details", [b""] * len(given)))
    for key, array in found.items():
        owner, _, name = key.partition("/")
        given[int(owner)][name] = array
    return given, details


class Rounds:
    """Decides which request is next: in each round, every open request gives one answer. A new request need
    not wait for the end of a round, and yet gets at most every other turn, so that a round does end."""

    def __init__(self) -> None:
        self._old: deque[int] = deque()
        self._new: deque[int] = deque()
        self._was_new = False

    def __bool__(self) -> bool:
        return bool(self._old or self._new)

    def come(self, numbers: Iterable[int]) -> None:
        """Comes in at once: the first ones are a round."""
        (self._new if self._old else self._old).extend(numbers)

    def stays(self, number: int) -> None:
        """Its turn is over."""
        self._old.append(number)

    def next(self) -> int:
        self._was_new = bool(self._new) and not (self._was_new and self._old)
        return (self._new if self._was_new else self._old).popleft()


def _answer_many(
    model: UserModel, batch: Mapping[str, Any], parts: AnswerChannel, file: Path
) -> dict[str, Any]:
    """All requests in turn: none waits for the end of another, also not those that come meanwhile."""
    parts.begin(batch)
    open_now: dict[int, Generator[dict[str, Array], None, None]] = {}
    rounds, shown = Rounds(), ""
    while rounds or parts.newcomers:
        if parts.newcomers:
            open_now |= {one.number: model.answers(one.inputs, one.wanted) for one in parts.newcomers}
            rounds.come(one.number for one in parts.newcomers)
            parts.newcomers.clear()
        number, places, wrong = rounds.next(), None, None
        try:
            if number in parts.gone:
                open_now[number].close()
            elif (answer := next(open_now[number], None)) is not None:
                places = parts.write(answer)
        except BaseException as error:  # a model that calls sys.exit has failed this request
            wrong = explain(error, file)
            if wrong != shown:
                shown = wrong
                traceback.print_exception(error)
        if places is not None:
            rounds.stays(number)
            parts.send(number, places)
        else:
            del open_now[number]
            parts.end(number, None if wrong is None else (0, wrong))
    return {}


def connect(arguments: list[str]) -> tuple[Channel, BatchRegion, BatchRegion, list[int]]:
    """Returns what the server named on the command line: the way to it, memory for inputs and for outputs,
    and further files for some."""
    control, inputs, outputs, lifeline, *more = files = [int(fd) for fd in arguments]
    for fd in files:
        os.set_inheritable(fd, False)
    tie_to_server(lifeline)
    return Channel(socket.socket(fileno=control)), BatchRegion(inputs), BatchRegion(outputs), more


def tie_to_server(lifeline: int) -> None:
    """Has the kernel kill this process group when the pipe's other end closes, which is when the server ends.

    Neither a thread, which a model that never lets go of the interpreter would stop, nor the parent-death
    signal, which follows the thread that started us rather than the server, can promise that.
    """
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)
    if select.select([lifeline], [], [], 0)[0]:  # it closed before we asked for the signal
        os._exit(1)


Made = tuple[dict[str, Any], Callable[[dict[str, Any]], dict[str, Any]]]
"""What is said of a model that is there now, and what answers for it."""


def serve(channel: Channel, make: Callable[[dict[str, Any]], Made]) -> int:
    """Makes the model of the first message, and answers all others with what comes of that, until the server
    closes the instance or is gone."""
    with contextlib.suppress(EOFError, OSError):
        return _serve(channel, make)
    return 0


def _serve(channel: Channel, make: Callable[[dict[str, Any]], Made]) -> int:
    settings = channel.receive()
    file = Path(settings["file"])
    logged = ""

    def report(error: BaseException) -> dict[str, Any]:
        """The cause in one line; the whole traceback goes to the log, once for a row of equal errors."""
        nonlocal logged
        text = explain(error, file)
        if text != logged:
            logged = text
            traceback.print_exception(error)
        return {"error": text}

    try:
        said, answer = make(settings)
    except BaseException as error:
        channel.send(report(error))
        return 1
    channel.send(said)
    while True:
        batch = channel.receive()
        try:
            answered = answer(batch)
        except BaseException as error:  # a model that calls sys.exit has failed this batch, not the server
            answered = report(error)
        channel.send(answered)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
