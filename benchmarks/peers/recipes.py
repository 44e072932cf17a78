"""The servers of the comparison: Carpool, FastAPI with its own batcher, Triton's Python backend, mosec."""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Template

import numpy as np

from load.ports import free_port
from load.wrk import Target
from peers import setup, tiny
from peers.region import Region
from peers.server import Recipe
from peers.ways import GRPC, GRPC_SHM, HTTP, HTTP_SHM, HttpWay, Way, answer_message, registering, v2_way

CARPOOL, FASTAPI, TRITON = "carpool", "FastAPI + asyncio batcher", "Triton, Python backend"
MOSEC = "mosec (Rust)"
EMPTY = "grpc.aio, empty handler"
SETTINGS = ((1, 2), (2, 1))  # instances × threads: the two ways to fill two cores
_HERE = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class Job:
    """What all servers are set up for: the model, how they are asked, and where the image lies."""

    folder: Path
    model: Path
    groups: Sequence[str]
    region: Region

    @property
    def over_grpc(self) -> bool:
        return GRPC in self.groups or GRPC_SHM in self.groups

    @property
    def in_memory(self) -> bool:
        return HTTP_SHM in self.groups or GRPC_SHM in self.groups

    def ways(self, http_port: int, grpc_port: int) -> list[Way]:
        return [v2_way(group, http_port, grpc_port) for group in self.groups]

    def first(self, http_port: int) -> Target | None:
        return registering(http_port, self.region) if self.in_memory else None


def carpool(job: Job, frontends: int | None, instances: int = 1) -> Recipe:
    """`carpool serve` of this environment, on an ordinary Triton repository with the ONNX file."""
    repository = job.folder / "carpool-models"
    version = repository / "tiny" / "1"
    version.mkdir(parents=True)
    config = Template((_HERE / "carpool.pbtxt").read_text()).substitute(INSTANCES=instances)
    (repository / "tiny" / "config.pbtxt").write_text(config)
    (version / "model.onnx").write_bytes(job.model.read_bytes())
    port, grpc_port = free_port(), free_port()
    command = [str(Path(sys.executable).with_name("carpool")), "serve", str(repository)]
    command += ["--host", "127.0.0.1", "--http-port", str(port), "--metrics-port", str(free_port())]
    command += ["--grpc-port", str(grpc_port)] if job.over_grpc else ["--grpc-frontends", "0"]
    if job.in_memory:
        command += ["--allow-client-shm"]
    if frontends is not None:
        command += ["--frontends", str(frontends)]
    return Recipe(CARPOOL, command, {}, job.ways(port, grpc_port), first=job.first(port))


def fastapi(job: Job, peers_dir: Path, delay_ms: float) -> Recipe:
    """One uvicorn process; two threads within a run, so that both cores can help."""
    port = free_port()
    python = setup.fastapi_python(peers_dir)
    env = {
        "BENCH_PORT": str(port),
        "BENCH_MODEL": str(job.model),
        "BENCH_THREADS": "2",
        "BENCH_MAX_BATCH": str(tiny.MAX_BATCH),
        "BENCH_MAX_WAIT_MS": str(delay_ms),
    }
    headers = {"Content-Type": "application/octet-stream"}
    target = Target(port, "/infer", headers, tiny.image().tobytes())
    way = HttpWay(HTTP, "HTTP raw body", target, read_json)
    return Recipe(FASTAPI, [str(python), str(_HERE / "fastapi_app.py")], env, [way])


def empty_grpc(job: Job) -> Recipe:
    """No model and no batches: only what the gRPC library takes."""
    port, answer = free_port(), job.folder / "empty-grpc.answer"
    answer.write_bytes(answer_message(tiny.expected(job.model)))
    command = [sys.executable, str(_HERE / "empty_grpc.py"), str(port), str(answer)]
    groups = [group for group in job.groups if group in (GRPC, GRPC_SHM)]
    return Recipe(EMPTY, command, {}, [v2_way(group, port, port) for group in groups])


def triton(job: Job, peers_dir: Path, delay_ms: float) -> Iterator[Recipe]:
    """The tritonserver binary of the nvidia-pytriton wheel, once per setting."""
    install = setup.TritonInstall(peers_dir)
    for instances, threads in SETTINGS:
        setting = f"{instances} × {threads}"
        home = job.folder / f"triton-{instances}x{threads}"
        repository, backends = home / "models", home / "backends"
        version = repository / "tiny" / "1"
        version.mkdir(parents=True)
        config = Template((_HERE / "triton.pbtxt").read_text())
        (repository / "tiny" / "config.pbtxt").write_text(
            config.substitute(INSTANCES=instances, DELAY_US=round(1e3 * delay_ms))
        )
        (version / "model.py").write_text((_HERE / "triton_model.py").read_text())
        (version / "onnx_session.py").write_text((_HERE / "onnx_session.py").read_text())
        install.link_backend(backends / "python")
        port, grpc_port = free_port(), free_port()
        command = tritonserver(install, repository, backends, port, grpc_port if job.over_grpc else None)
        env = {**install.env, "BENCH_MODEL": str(job.model), "BENCH_THREADS": str(threads)}
        yield Recipe(TRITON, command, env, job.ways(port, grpc_port), setting, job.first(port))


def tritonserver(
    install: setup.TritonInstall, repository: Path, backends: Path, port: int, grpc_port: int | None
) -> list[str]:
    return [
        str(install.server),
        f"--model-repository={repository}",
        f"--backend-directory={backends}",
        "--http-address=127.0.0.1",
        f"--http-port={port}",
        f"--allow-grpc={str(grpc_port is not None).lower()}",
        "--grpc-address=127.0.0.1",
        f"--grpc-port={grpc_port or free_port()}",
        "--metrics-address=127.0.0.1",
        f"--metrics-port={free_port()}",
        "--allow-gpu-metrics=false",
    ]


def mosec(job: Job, peers_dir: Path, delay_ms: float) -> Iterator[Recipe]:
    """A server in Rust that hands batches to Python processes, once per setting; it speaks HTTP only."""
    for workers, threads in SETTINGS:
        port = free_port()
        env = {
            "BENCH_MODEL": str(job.model),
            "BENCH_THREADS": str(threads),
            "BENCH_WORKERS": str(workers),
            "BENCH_MAX_BATCH": str(tiny.MAX_BATCH),
            "BENCH_MAX_WAIT_MS": str(delay_ms),
        }
        command = [str(setup.peer_python(peers_dir, "mosec")), str(_HERE / "mosec_app.py")]
        command += ["--address", "127.0.0.1", "--port", str(port), "--log-level", "warning"]
        headers = {"Content-Type": "application/octet-stream"}
        target = Target(port, "/inference", headers, tiny.image().tobytes())
        way = HttpWay(HTTP, "HTTP raw body", target, read_raw)
        yield Recipe(MOSEC, command, env, [way], f"{workers} × {threads}")


def read_raw(_headers: Mapping[str, str], body: bytes) -> np.ndarray:
    return np.frombuffer(body, "<f4")


def read_json(_headers: Mapping[str, str], body: bytes) -> np.ndarray:
    return np.array(json.loads(body)["output"], np.float32)
