"""Triton's four Python clients behind one face, so that a call is written down once for all of them."""

from __future__ import annotations

import asyncio
import enum
import inspect
from collections.abc import Coroutine, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import tritonclient.grpc
import tritonclient.grpc.aio
import tritonclient.http
import tritonclient.http.aio
from numpy.typing import NDArray
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

PATIENCE_S = 30.0

Array = NDArray[Any]


class Flavour(enum.Enum):
    HTTP = "http"
    HTTP_AIO = "http.aio"
    GRPC = "grpc"
    GRPC_AIO = "grpc.aio"

    @property
    def module(self) -> ModuleType:
        return _MODULES[self]

    @property
    def is_http(self) -> bool:
        return self in (Flavour.HTTP, Flavour.HTTP_AIO)

    @property
    def is_aio(self) -> bool:
        return self in (Flavour.HTTP_AIO, Flavour.GRPC_AIO)

    def methods(self) -> set[str]:
        """Every public method of this flavour's client, as installed here."""
        members = inspect.getmembers(self.module.InferenceServerClient, callable)
        return {name for name, _ in members if not name.startswith("_")}


_MODULES: dict[Flavour, ModuleType] = {
    Flavour.HTTP: tritonclient.http,
    Flavour.HTTP_AIO: tritonclient.http.aio,
    Flavour.GRPC: tritonclient.grpc,
    Flavour.GRPC_AIO: tritonclient.grpc.aio,
}
ALL = frozenset(Flavour)
HTTP = frozenset({Flavour.HTTP, Flavour.HTTP_AIO})
GRPC = frozenset({Flavour.GRPC, Flavour.GRPC_AIO})


@dataclass(frozen=True)
class Status:
    """One kind of refusal as both protocols tell it."""

    http: str
    grpc: str

    def of(self, flavour: Flavour) -> str:
        return self.http if flavour.is_http else f"StatusCode.{self.grpc}"


INVALID = Status("400", "INVALID_ARGUMENT")
UNKNOWN = Status("404", "NOT_FOUND")
REFUSED = Status("429", "RESOURCE_EXHAUSTED")
UNSUPPORTED = Status("501", "UNIMPLEMENTED")
UNAVAILABLE = Status("503", "UNAVAILABLE")


class Session:
    """One client, talking to one server. Coroutines are run to their end, each within a bound.

    All sessions of a process share one runner: gRPC's asyncio client is at home in a single loop.
    """

    def __init__(self, flavour: Flavour, http_url: str, grpc_url: str, runner: asyncio.Runner) -> None:
        self.flavour = flavour
        self.http_url = http_url
        self.grpc_url = grpc_url
        self._runner = runner
        self.client: Any = self.run(self._open_aio()) if flavour.is_aio else self._open()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_error: object) -> None:
        self.call("close")

    def another(self) -> Session:
        """A second client of the same kind."""
        return Session(self.flavour, self.http_url, self.grpc_url, self._runner)

    @property
    def url(self) -> str:
        return self.http_url if self.flavour.is_http else self.grpc_url

    def _open(self) -> Any:
        bounds: dict[str, float] = {}
        if self.flavour is Flavour.HTTP:
            bounds = {"concurrency": 8, "network_timeout": PATIENCE_S, "connection_timeout": PATIENCE_S}
        return self.flavour.module.InferenceServerClient(self.url, **bounds)

    async def _open_aio(self) -> Any:
        return self.flavour.module.InferenceServerClient(self.url)

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        async def bounded() -> Any:
            async with asyncio.timeout(PATIENCE_S):
                return await coroutine

        return self._runner.run(bounded())

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """What the method answers: gRPC's messages as plain documents, and a coroutine's result."""
        function = getattr(self.client, method)
        parameters = inspect.signature(function).parameters
        if "as_json" in parameters:
            kwargs.setdefault("as_json", True)
        if "client_timeout" in parameters:
            kwargs.setdefault("client_timeout", PATIENCE_S)
        answer = function(*args, **kwargs)
        return self.run(answer) if inspect.iscoroutine(answer) else answer

    def refused(self, status: Status, match: str, method: str, *args: Any, **kwargs: Any) -> str:
        """The server must say no in this way; returns what it said."""
        error = self.failure(method, *args, **kwargs)
        said = f"{error.status()}: {error.message()}"
        assert error.status() == status.of(self.flavour), f"expected {status}, got {said}"
        assert match in str(error.message()), f"expected {match!r} in {said}"
        return said.removeprefix("StatusCode.")

    def failure(self, method: str, *args: Any, **kwargs: Any) -> InferenceServerException:
        try:
            answer = self.call(method, *args, **kwargs)
        except InferenceServerException as error:
            return error
        raise AssertionError(f"{method} was not refused; it answered {answer!r}")

    # ---- inference

    def tensor(self, name: str, array: Array, datatype: str = "", **given: Any) -> Any:
        """An InferInput of this flavour; `binary_data` is for HTTP alone."""
        datatype = datatype or np_to_triton_dtype(array.dtype)
        tensor = self.flavour.module.InferInput(name, list(array.shape), datatype)
        return tensor.set_data_from_numpy(array, **given)

    def output(self, name: str, **given: Any) -> Any:
        return self.flavour.module.InferRequestedOutput(name, **given)

    def infer(self, model: str, inputs: Mapping[str, Array], **given: Any) -> Any:
        tensors = [self.tensor(name, array) for name, array in inputs.items()]
        return self.call("infer", model, tensors, **given)

    def ones(self, images: int = 1) -> dict[str, Array]:
        """Pictures for `vision`, whose score k is then k."""
        return {"image": np.ones((images, 224, 224, 3), np.uint8)}


def header_of(result: Any) -> dict[str, str]:
    """Model, version and id of a result, whatever its protocol."""
    response = result.get_response()
    if isinstance(response, Mapping):
        found = {key: response.get(key, "") for key in ("model_name", "model_version", "id")}
    else:
        found = {key: getattr(response, key) for key in ("model_name", "model_version", "id")}
    return found
