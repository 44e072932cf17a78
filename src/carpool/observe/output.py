"""Catches what a process writes to its standard output and error past the logger: C libraries, prints,
crashes.

The parent process reads it, so that its last lines are logged after its end, and puts each line into
the log as an event: JSON stays JSON, floods are counted, a library is named if its lines give
it away.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import io
import logging
import os
import re
import sys
import threading
from collections.abc import Iterator

from carpool.observe import logs

LEVELS = ("debug", "info", "warning", "error")
_MARK = "\x1e"  # a separator that no program prints
_MARKED = "_CARPOOL_OUTPUT_IS_READ"
_READ = 1 << 16
_PIPE = 1 << 20
_LONGEST = 2000  # bytes of a line; the rest is another one
_LIBRARIES = {
    "libtiff": re.compile(
        r"^(_?TIFF|LZW|ZIP|Deflate|Fax[34]|CCITT|PackBits|Thunder|Next|JPEG|OJPEG|PixarLog|LogL)\w*: |"
        r"^\S+\.tiff?: |^Unknown field with tag"
    ),
    "libpng": re.compile(r"^libpng (warning|error): "),
    "libjpeg": re.compile(
        r"^(Corrupt JPEG data|Premature end of JPEG|Invalid SOS parameters|Unsupported marker type|Bogus |"
        r"Warning: unknown JFIF|Inconsistent progression|Invalid JPEG file structure|Arithmetic table|"
        r"Application transferred too many scanlines|Quantization table)"
    ),
    "opencv": re.compile(r"^\[ *(WARN|ERROR|FATAL|INFO|DEBUG):\d+@|^OpenCV"),
    "onnxruntime": re.compile(r"\[[VIWEF]:onnxruntime:"),
    "grpc": re.compile(r"^[IWEF]\d{4} .*\]|^WARNING: All log messages before absl::InitializeLog"),
    "torch": re.compile(r"^\[[IWEF]\d{3,}.*\.(cpp|cu|h):\d+\]"),
}

log = logs.logger("output")


class ProcessOutput:
    """Reads the lines of one process. To be fed from one thread."""

    def __init__(self, **who: object) -> None:
        self._who = who
        self._rest = b""

    def feed(self, data: bytes) -> None:
        *lines, rest = (self._rest + data).split(b"\n")
        while len(rest) > _LONGEST:
            lines.append(rest[:_LONGEST])
            rest = rest[_LONGEST:]
        self._rest = rest
        for line in lines:
            self._tell(line)

    def close(self) -> None:
        """A last line may have no end."""
        self._tell(self._rest)
        self._rest = b""

    def _tell(self, line: bytes) -> None:
        text = line.decode(errors="backslashreplace").rstrip()
        level, text = _level_of(text)
        library = library_of(text)
        if library:
            log.warning("library-output", **self._who, library=library, text=text)
        elif text:
            getattr(log, level)("output", **self._who, text=text)


def marked(text: str, level: str, plainly: str = "") -> str:
    """Returns the lines of a text, so that the process that reads them knows how serious they are. What is
    not marked counts as a warning. Where no process of Carpool reads them, a person does, and they stay as
    they are, behind `plainly`."""
    if _MARKED not in os.environ:
        return f"{plainly}{text}\n"
    return "".join(f"{_MARK}{level}{_MARK}{line}\n" for line in text.splitlines())


def _level_of(line: str) -> tuple[str, str]:
    if line.startswith(_MARK):
        level, mark, text = line[1:].partition(_MARK)
        if mark and level in LEVELS:
            return level, text
    return "warning", line


class Printed(io.TextIOBase):
    """Replaces the standard output of Python code that is not ours: what a model prints is information."""

    def __init__(self, fd: int = 2) -> None:
        self._fd = fd
        self._rest = ""
        self._lock = threading.Lock()

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._fd

    def write(self, text: str) -> int:
        with self._lock:
            whole, newline, self._rest = (self._rest + text).rpartition("\n")
            if len(self._rest) > _LONGEST:
                whole, newline, self._rest = whole + newline + self._rest, "\n", ""
        if newline:
            _write_all(self._fd, marked(whole, "info").encode(errors="backslashreplace"))
        return len(text)


def _write_all(fd: int, data: bytes) -> None:
    with contextlib.suppress(OSError):  # it is no longer read, or not fast enough
        while data:
            data = data[os.write(fd, data) :]


def library_of(line: str) -> str:
    return next((name for name, pattern in _LIBRARIES.items() if pattern.search(line)), "")


def keep_stream() -> int:
    """Keeps the stream in a process that was started with the log as its standard output and a pipe as its
    standard error.

    Returns a descriptor for the log, which no child of ours gets; what is printed goes into the pipe, too.
    """
    stream = os.dup(1)
    os.dup2(2, 1)
    sys.stdout = Printed()
    os.environ[_MARKED] = "1"  # for the processes of models, too, which write into the same pipe
    faulthandler.enable()  # into the pipe: its reader outlives this process
    logging.captureWarnings(True)  # of Python libraries: these can be logged where they happen
    return stream


@contextlib.contextmanager
def caught(log_format: str, log_level: str) -> Iterator[None]:
    """Reads this process's own standard error in a thread, until the end of the block.

    For a server in one process, whose last lines no parent reads: a crash goes straight to the stream. A
    library may write while it holds the interpreter lock, which the thread needs to read: where the pipe is
    full, what it writes is lost rather than waited for.
    """
    stream = os.dup(2)
    reading, writing = os.pipe()
    with contextlib.suppress(OSError):  # this user's pipes have as much memory as they may
        fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, _PIPE)
    os.set_blocking(writing, False)
    os.dup2(writing, 2)
    os.close(writing)
    os.environ[_MARKED] = "1"
    logs.configure(log_format, log_level, stream)
    faulthandler.enable(stream)
    thread = threading.Thread(target=_pump, args=(reading,), name="output", daemon=True)
    thread.start()
    try:
        yield
    finally:
        os.environ.pop(_MARKED, None)
        os.dup2(stream, 2)  # the pipe has no other writer, unless a model's process still has it
        faulthandler.disable()
        thread.join(1.0)
        logs.finish()
        logs.configure(log_format, log_level)
        os.close(stream)


def _pump(reading: int) -> None:
    output = ProcessOutput()
    try:
        while data := os.read(reading, _READ):
            output.feed(data)
    finally:
        output.close()
        os.close(reading)


def read_some(reading: int) -> bytes | None:
    """Returns what is in a pipe that does not block: nothing at its end, None if it may go on."""
    try:
        return os.read(reading, _READ)
    except BlockingIOError:
        return None
