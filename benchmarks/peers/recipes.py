"""The servers of the comparison: Carpool, FastAPI with its own batcher, Triton with the Python backend."""

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from string import Template

import numpy as np

from load.wrk import Target
from peers import setup, tiny
from peers.server import Recipe, free_port

CARPOOL, FASTAPI, TRITON = "carpool", "FastAPI + asyncio batcher", "Triton, Python backend"
TRITON_SETTINGS = ((1, 2), (2, 1))  # instances × threads: the two ways to fill two cores
_HERE = Path(__file__).parent
_V2_PATH = "/v2/models/tiny/infer"


def carpool(folder: Path, model: Path, frontends: int | None) -> Recipe:
    """`carpool serve` of this environment, on an ordinary Triton repository with the ONNX file."""
    repository = folder / "carpool-models"
    version = repository / "tiny" / "1"
    version.mkdir(parents=True)
    (repository / "tiny" / "config.pbtxt").write_text((_HERE / "carpool.pbtxt").read_text())
    (version / "model.onnx").write_bytes(model.read_bytes())
    port = free_port()
    command = [str(Path(sys.executable).with_name("carpool")), "serve", str(repository)]
    command += ["--host", "127.0.0.1", "--http-port", str(port), "--metrics-port", str(free_port())]
    if frontends is not None:
        command += ["--frontends", str(frontends)]
    return Recipe(CARPOOL, "HTTP v2 binary", command, {}, _v2_target(port), _read_v2)


def fastapi(peers_dir: Path, model: Path, delay_ms: float) -> Recipe:
    """One uvicorn process; two threads within a run, so that both cores can help."""
    port = free_port()
    python = setup.fastapi_python(peers_dir)
    env = {
        "BENCH_PORT": str(port),
        "BENCH_MODEL": str(model),
        "BENCH_THREADS": "2",
        "BENCH_MAX_BATCH": str(tiny.MAX_BATCH),
        "BENCH_MAX_WAIT_MS": str(delay_ms),
    }
    headers = {"Content-Type": "application/octet-stream"}
    target = Target(port, "/infer", headers, tiny.image().tobytes())
    return Recipe(
        FASTAPI, "HTTP raw body", [str(python), str(_HERE / "fastapi_app.py")], env, target, _read_json
    )


def triton(folder: Path, peers_dir: Path, model: Path, delay_ms: float) -> Iterator[Recipe]:
    """The tritonserver binary of the nvidia-pytriton wheel, once per setting."""
    install = setup.TritonInstall(peers_dir)
    for instances, threads in TRITON_SETTINGS:
        setting = f"{instances} × {threads}"
        home = folder / f"triton-{instances}x{threads}"
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
        port = free_port()
        command = [
            str(install.server),
            f"--model-repository={repository}",
            f"--backend-directory={backends}",
            "--http-address=127.0.0.1",
            f"--http-port={port}",
            "--allow-grpc=false",
            "--metrics-address=127.0.0.1",
            f"--metrics-port={free_port()}",
            "--allow-gpu-metrics=false",
        ]
        env = {**install.env, "BENCH_MODEL": str(model), "BENCH_THREADS": str(threads)}
        yield Recipe(TRITON, "HTTP v2 binary", command, env, _v2_target(port), _read_v2, setting)


def _v2_target(port: int) -> Target:
    """One image as a binary tensor, the answer asked for as binary: what tritonclient sends."""
    image = tiny.image().tobytes()
    tensor = {
        "name": tiny.INPUT,
        "shape": [1, *tiny.SHAPE],
        "datatype": "UINT8",
        "parameters": {"binary_data_size": len(image)},
    }
    head = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
    headers = {
        "Content-Type": "application/octet-stream",
        "Inference-Header-Content-Length": str(len(head)),
    }
    return Target(port, _V2_PATH, headers, head + image)


def _read_v2(headers: Mapping[str, str], body: bytes) -> np.ndarray:
    """The scores behind the JSON head of a binary answer."""
    return np.frombuffer(body, "<f4", offset=int(headers["inference-header-content-length"]))


def _read_json(_headers: Mapping[str, str], body: bytes) -> np.ndarray:
    return np.array(json.loads(body)["output"], np.float32)
