"""Compiles one model for the runner in a process, batch size by batch size, while the runner serves it.

Compiling takes tens of seconds of Python for each size: in the runner, batches would wait for its interpreter
lock. What is made here lies in the compiler's cache folder, where the runner finds it within seconds."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, cast

from carpool.backends.backend import CompiledSize, Compiles
from carpool.backends.device_memory import limit_device_memory
from carpool.engine.loading.loading import Loading
from carpool.engine.profile.model_profile import key_text
from carpool.engine.profile.whole_file import write_whole
from carpool.errors import CarpoolError, ModelError
from carpool.extensions.torch.compiled_file import compiled_key, saved_artifacts
from carpool.extensions.torch.runner_messages import (
    CompiledInstances,
    Opening,
    RunnerFailure,
    SavedArtifacts,
)
from carpool.link.child_process import Control, Message
from carpool.link.link_failures import write_failure
from carpool.link.typed_json import as_file, from_file
from carpool.observe.logs import configure, logger

_log = logger("compiler")
_NICER = 10
_WORKERS = 4  # processes of the compiler's own


class CompilerProcess:
    def __init__(self, control: Control, settings: dict[str, Any]) -> None:
        self._control = control
        self._cache_dir: str | None = settings["cache_dir"]
        limit_device_memory(settings["device_memory_gb"])
        self._loading: Loading | None = None
        self._backend: Compiles | None = None

    async def run(self) -> None:
        while (message := await self._control.receive()) is not None:
            self._answer(message)

    def _answer(self, message: Message) -> None:
        """Answers in this thread: nothing else is waiting, and the parent ends this process by a signal."""
        try:
            opening: Opening = from_file(Opening, message.files[0])
            word = "answer"
            document = self._compile(opening, message) if message.word == "compile" else self._save(opening)
        except CarpoolError as error:
            word, document = "failure", _failure(error)
        except BaseException as error:  # a model's code may raise anything, and the caller waits
            _log.exception("compile-failed")
            word, document = "failure", _failure(ModelError(f"{type(error).__name__}: {error}"))
        with as_file(document) as file:
            self._control.send(word, [file], ask=message.body["ask"])

    def _compile(self, opening: Opening, message: Message) -> object:
        if self._backend is None:
            self._loading = loading = Loading(opening.asked.config, opening.asked.version, behind=True)
            loading.resume(opening.ready.config, opening.threads)
            self._backend = cast(Compiles, loading.backend(0, 1, hurry=True))
        found: CompiledSize = self._backend.compile(message.body["size"])
        return CompiledInstances([found])

    def _save(self, opening: Opening) -> object:
        """Saves everything that was compiled here, as one file of the compiler's own."""
        config, version = opening.ready.config, opening.asked.version
        data = saved_artifacts()
        key = compiled_key(config, version)
        if data is None or key is None or self._cache_dir is None:
            return SavedArtifacts("", "")
        folder = Path(self._cache_dir) / "compiled"
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        path = folder / f"{os.getpid()}.part"
        write_whole(path, (data,))
        return SavedArtifacts(str(path), key_text(key))


def _failure(error: CarpoolError) -> RunnerFailure:
    status, payload = write_failure(error)
    return RunnerFailure(status, payload.decode())


async def live(control: Control, stream: int) -> int:
    first = await control.receive()
    if first is None:
        return 0
    configure(first.body["log_format"], first.body["log_level"], stream)
    os.nice(_NICER)
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(_WORKERS))
    await CompilerProcess(control, first.body).run()
    return 0
