"""The servers of `overload.py`, each in front of the same pretended device and asked with the same image."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import carpool as carpool_package
from load.ports import free_port
from load.wrk import Target
from peers import setup
from peers.recipes import read_json, tritonserver
from peers.server import Recipe
from peers.ways import HTTP, HttpWay

SHAPE, SCORES = (3, 4, 4), 3
FIXED_MS, PER_IMAGE_MS = 16.0, 4.0
SLO_MS = 200.0
ROOMY = 64  # a generous largest batch, as people set it
PROMISED = 21  # the largest with 2 × t(B) within the SLO: what `carpool plan` names for this device
HOLD_MS = 20.0  # how long a batch may be held back to fill up
_HERE = Path(__file__).parent
_DEVICE = {
    "BENCH_LOADER": "device",
    "BENCH_FIXED_MS": str(FIXED_MS),
    "BENCH_PER_IMAGE_MS": str(PER_IMAGE_MS),
    "BENCH_SHAPE": ",".join(map(str, SHAPE)),
    "BENCH_SLO_MS": f"{SLO_MS:.0f}",
}
_CARPOOL_MODEL = f"""backend = "fake"
slo_ms = {SLO_MS:g}
max_batch = {ROOMY}
[fake]
curve = "{FIXED_MS:g}+{PER_IMAGE_MS:g}"
[[input]]
name = "x"
datatype = "UINT8"
shape = {list(SHAPE)}
[[output]]
name = "y"
datatype = "FP32"
shape = [{SCORES}]
"""
_TRITON_MODEL = """name: "m"
backend: "python"
max_batch_size: {max_batch}
input [{{ name: "input" data_type: TYPE_UINT8 dims: {shape} }}]
output [{{ name: "output" data_type: TYPE_FP32 dims: [{scores}] }}]
dynamic_batching {{ {batching} }}
instance_group [{{ kind: KIND_CPU count: 1 }}]
"""


def expected() -> np.ndarray:
    return np.zeros(SCORES, np.float32)


@dataclass(frozen=True, slots=True)
class Contender:
    """A server in one setting. `start` writes what it needs into a folder and says how to run it."""

    key: str
    name: str
    setting: str
    start: Callable[[Path, Path], Recipe]  # of a fresh folder and the peers' folder
    peer: str | None = None  # whose environment it needs; none but ours


def contenders() -> list[Contender]:
    roomy = f"max batch {ROOMY}, held back {HOLD_MS:g} ms"
    tuned = f"max batch {PROMISED}, queue timeout {SLO_MS / 2:g} ms, REJECT"
    return [
        Contender("carpool", "Carpool", f"slo_ms = {SLO_MS:g}", _carpool),
        Contender("fastapi", "FastAPI + asyncio batcher", roomy, _fastapi, "fastapi"),
        Contender("triton", "Triton, Python backend", roomy, _triton, "triton"),
        Contender("triton-tuned", "Triton, tuned by hand", tuned, _triton_tuned, "triton"),
        Contender("bentoml", "BentoML", f"max_latency_ms {SLO_MS:g}", _bentoml, "bentoml"),
        Contender("litserve", "LitServe", roomy, _litserve, "litserve"),
    ]


def carpool_command(models: Path, port: int) -> list[str]:
    """`carpool serve` of the environment that runs this, over HTTP only."""
    import sys

    command = [str(Path(sys.executable).with_name("carpool")), "serve", str(models), "--host", "127.0.0.1"]
    command += ["--http-port", str(port), "--metrics-port", str(free_port()), "--grpc-frontends", "0"]
    return [*command, "--log-level", "warning"]


def carpool_env(folder: Path) -> dict[str, str]:
    """The same source as this process has; profiles are kept for this run only."""
    return {"PYTHONPATH": str(Path(carpool_package.__file__).parents[1]), "CARPOOL_CACHE_DIR": str(folder)}


def _carpool(folder: Path, _peers_dir: Path) -> Recipe:
    model = folder / "models" / "m"
    model.mkdir(parents=True)
    (model / "model.toml").write_text(_CARPOOL_MODEL)
    port = free_port()
    env = carpool_env(folder / "cache")
    return Recipe("carpool", carpool_command(model.parent, port), env, [_v2(port, "x")])


def _fastapi(_folder: Path, peers_dir: Path) -> Recipe:
    """Kinder than usual: the event loop stays free while the device works."""
    port = free_port()
    env = _settings(port, ROOMY, HOLD_MS) | {"BENCH_IN_THREAD": "1"}
    command = [str(setup.peer_python(peers_dir, "fastapi")), str(_HERE / "fastapi_app.py")]
    target = Target(port, "/infer", {"Content-Type": "application/octet-stream"}, _image().tobytes())
    return Recipe("fastapi", command, env, [HttpWay(HTTP, "raw body", target, read_json)])


def _litserve(_folder: Path, peers_dir: Path) -> Recipe:
    port = free_port()
    command = [str(setup.peer_python(peers_dir, "litserve")), str(_HERE / "litserve_app.py")]
    body = json.dumps({"image": _image().tolist()}).encode()
    target = Target(port, "/predict", {"Content-Type": "application/json"}, body)
    env = _settings(port, ROOMY, HOLD_MS)
    return Recipe("litserve", command, env, [HttpWay(HTTP, "JSON", target, read_json)])


def _bentoml(folder: Path, peers_dir: Path) -> Recipe:
    """It decides by itself how long to hold back, and is told the SLO as its budget."""
    port = free_port()
    command = [str(setup.peer_python(peers_dir, "bentoml")), "-m", "bentoml", "serve"]
    command += ["bentoml_service:Pretended", "--working-dir", str(_HERE), "--host", "127.0.0.1"]
    command += ["--port", str(port)]
    home = {"BENTOML_HOME": str(folder / "bentoml"), "BENTOML_DO_NOT_TRACK": "true"}
    body = json.dumps({"images": [_image().tolist()]}).encode()
    target = Target(port, "/predict", {"Content-Type": "application/json"}, body)
    env = _settings(port, ROOMY, HOLD_MS) | home
    return Recipe("bentoml", command, env, [HttpWay(HTTP, "JSON", target, _read_list)])


def _triton(folder: Path, peers_dir: Path) -> Recipe:
    return _triton_with(
        folder, peers_dir, ROOMY, f"max_queue_delay_microseconds: {round(1e3 * HOLD_MS)}", "triton"
    )


def _triton_tuned(folder: Path, peers_dir: Path) -> Recipe:
    """What somebody can do who knows the device's curve: no batch too long, and no waiting past hope."""
    timeout = round(1e3 * SLO_MS / 2)
    policy = f"timeout_action: REJECT default_timeout_microseconds: {timeout}"
    batching = f"default_queue_policy {{ {policy} }}"
    return _triton_with(folder, peers_dir, PROMISED, batching, "triton-tuned")


def _triton_with(folder: Path, peers_dir: Path, max_batch: int, batching: str, row: str) -> Recipe:
    install = setup.TritonInstall(peers_dir)
    repository, backends = folder / "models", folder / "backends"
    version = repository / "m" / "1"
    version.mkdir(parents=True)
    config = _TRITON_MODEL.format(max_batch=max_batch, shape=list(SHAPE), scores=SCORES, batching=batching)
    (repository / "m" / "config.pbtxt").write_text(config)
    (version / "model.py").write_text((_HERE / "triton_model.py").read_text())
    (version / "device.py").write_text((_HERE / "device.py").read_text())
    install.link_backend(backends / "python")
    port = free_port()
    command = tritonserver(install, repository, backends, port, None)
    return Recipe(row, command, install.env | _DEVICE, [_v2(port, "input")])


def _settings(port: int, max_batch: int, hold_ms: float) -> dict[str, str]:
    own = {"BENCH_PORT": str(port), "BENCH_MAX_BATCH": str(max_batch), "BENCH_MAX_WAIT_MS": str(hold_ms)}
    return _DEVICE | own


def _v2(port: int, name: str) -> HttpWay:
    """The image as a binary tensor, the answer as binary."""
    image = _image().tobytes()
    tensor = {
        "name": name,
        "shape": [1, *SHAPE],
        "datatype": "UINT8",
        "parameters": {"binary_data_size": len(image)},
    }
    head = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
    headers = {
        "Content-Type": "application/octet-stream",
        "Inference-Header-Content-Length": str(len(head)),
    }
    return HttpWay(HTTP, "v2 binary", Target(port, "/v2/models/m/infer", headers, head + image), _read_v2)


def _image() -> np.ndarray:
    return np.arange(np.prod(SHAPE), dtype=np.uint8).reshape(SHAPE)


def _read_v2(headers: Mapping[str, str], body: bytes) -> np.ndarray:
    return np.frombuffer(body, "<f4", offset=int(headers["inference-header-content-length"]))


def _read_list(_headers: Mapping[str, str], body: bytes) -> np.ndarray:
    return np.array(json.loads(body)[0], np.float32)
