"""What the GPU benchmark serves: networks with random weights, as fast as trained ones, and photos."""

from pathlib import Path

import cv2

from carpool.demo import pictures

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
NETWORKS = {"resnet50": "resnet50", "vit_b_16": "vit_b_16"}
SIDE = 224
PHOTOS = 12
WIDTH, HEIGHT, QUALITY = 640, 480, 92

_BUILD = '''"""A network of torchvision with random weights: the seed makes them the same everywhere."""

import torch
import torchvision


def build() -> torch.nn.Module:
    torch.manual_seed(1)
    return torchvision.models.{network}(weights=None).eval()
'''

_TINY = '''"""Next to no network: for a try on a CPU."""

import torch


class Tiny(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.last = torch.nn.Linear(48, 1000)

    def forward(self, x):
        return self.last(torch.nn.functional.adaptive_avg_pool2d(x, 4).flatten(1))


def build() -> torch.nn.Module:
    torch.manual_seed(1)
    return Tiny().eval()
'''

_SETTINGS = """backend = "pytorch"
task = "classify"
slo_ms = {slo_ms:g}
max_batch = {largest}
instances = {instances}

[pytorch]
device = "{device}"
precision = "{precision}"
compile = {compile}
module = "model.py:build"
buckets = {buckets}

[image]
size = [{side}, {side}]
resize = "stretch"
scale = {scale}
mean = {mean}
std = {std}
decode = "device"

[[input]]
name = "image"
datatype = "UINT8"
shape = [3, {side}, {side}]

[[output]]
name = "logits"
datatype = "FP32"
shape = [1000]
"""


def write_model(
    folder: Path,
    network: str,
    *,
    slo_ms: float,
    device: str,
    buckets: list[int],
    instances: int,
    compiled: bool,
) -> Path:
    """A repository with this one model."""
    model = folder / network
    (model / "1").mkdir(parents=True, exist_ok=True)
    code = _TINY if network == "tiny" else _BUILD.format(network=network)
    (model / "1" / "model.py").write_text(code)
    settings = _SETTINGS.format(
        slo_ms=slo_ms,
        largest=buckets[-1],
        instances=instances,
        device=device,
        precision="fp16" if device != "cpu" else "fp32",
        compile=str(compiled).lower(),
        buckets=buckets,
        side=SIDE,
        scale=1 / 255,
        mean=list(MEAN),
        std=list(STD),
    )
    if not instances:
        settings = settings.replace("instances = 0\n", "")
    (model / "model.toml").write_text(settings)
    return folder


def write_photos(folder: Path) -> list[Path]:
    """Parts of the bundled photos, all of one size: what a camera sends."""
    folder.mkdir(parents=True, exist_ok=True)
    found: list[Path] = []
    sources = [cv2.imread(str(path)) for path in pictures()]
    while len(found) < PHOTOS:
        photo = sources[len(found) % len(sources)]
        height, width = photo.shape[:2]
        part = min(1.0, 0.6 + 0.05 * len(found))
        high, wide = int(height * part), int(width * part)
        cut = photo[height - high :, width - wide :]
        photo = cv2.resize(cut, (WIDTH, HEIGHT), interpolation=cv2.INTER_CUBIC)
        path = folder / f"photo{len(found)}.jpg"
        cv2.imwrite(str(path), photo, [cv2.IMWRITE_JPEG_QUALITY, QUALITY])
        found.append(path)
    return found
