"""What the pipeline benchmark serves: a detector whose boxes its device chooses, and a classifier."""

from pathlib import Path

from chip.repository import write_model

FOUND = 4  # things in every picture
FINDER_SIDE = 320
FINDER, STREET = "finder", "street"

_FINDER = '''"""A detector as small ones are built, with random weights. What it computes moves its boxes;
that there are four, and where, is fixed, so that every picture is as much work as the next."""

import torch

SIDE, CLASSES = {side}, 4
BOXES = ((80.0, 90.0, 110.0, 130.0), (230.0, 80.0, 120.0, 90.0), (90.0, 240.0, 90.0, 100.0),
         (225.0, 230.0, 140.0, 120.0))


def convolution(before, after, stride=1):
    layers = (torch.nn.Conv2d(before, after, 3, stride, 1, bias=False), torch.nn.BatchNorm2d(after),
              torch.nn.SiLU())
    return torch.nn.Sequential(*layers)


class Stage(torch.nn.Module):
    def __init__(self, before, after, blocks):
        super().__init__()
        self.down = convolution(before, after, 2)
        self.blocks = torch.nn.ModuleList(
            torch.nn.Sequential(convolution(after, after), convolution(after, after)) for _ in range(blocks)
        )

    def forward(self, x):
        x = self.down(x)
        for block in self.blocks:
            x = x + block(x)
        return x


class Finder(torch.nn.Module):
    def __init__(self, width, blocks):
        super().__init__()
        self.stem = convolution(3, width, 2)
        self.stages = torch.nn.ModuleList(
            Stage(width << number, width << (number + 1), blocks) for number in range(4)
        )
        self.heads = torch.nn.ModuleList(
            torch.nn.Conv2d(width << (number + 2), 4 + CLASSES, 1) for number in range(3)
        )
        anchors = sum((SIDE // stride) ** 2 for stride in (8, 16, 32))
        base = torch.zeros(4 + CLASSES, anchors)
        base[:2], base[2:4], base[4:] = SIDE / 2, 16.0, 0.05
        for number, box in enumerate(BOXES):
            base[:4, number] = torch.tensor(box)
            base[4 + number, number] = 0.9 - 0.02 * number
        self.register_buffer("base", base)
        spread = torch.full((4 + CLASSES, 1), 0.01)
        spread[:4] = 6.0
        self.register_buffer("spread", spread)

    def forward(self, x):
        x = self.stages[0](self.stem(x))
        found = []
        for stage, head in zip(self.stages[1:], self.heads):
            x = stage(x)
            found.append(head(x).flatten(2))
        return self.base + self.spread * torch.tanh(torch.cat(found, 2))


def build():
    torch.manual_seed(2)
    return Finder({width}, {blocks}).eval()
'''

_FINDER_SETTINGS = """backend = "pytorch"
task = "detect"
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
decode = "device"

[detect]
format = "yolov8"
score = 0.5
iou = 0.6
nms = "device"
max_detections = 8

[[input]]
name = "image"
datatype = "UINT8"
shape = [3, {side}, {side}]

[[output]]
name = "raw"
datatype = "FP32"
shape = [8, {anchors}]
"""

_STREET = """slo_ms = {slo_ms:g}

[[step]]
name = "find"
model = "{finder}"
keep = {{ score = 0.5, most = {found} }}

[[step]]
name = "kind"
model = "{network}"
each = "find.boxes"
crop = {{ pad = 0.05 }}

[answer]
attach = {{ kind = "find.boxes" }}
"""


def write_street(
    folder: Path,
    network: str,
    *,
    slo_ms: float,
    device: str,
    buckets: list[int],
    finder_buckets: list[int],
    instances: int,
    compiled: bool,
) -> Path:
    """A repository with the detector, the classifier and the pipeline of both."""
    write_model(
        folder,
        network,
        slo_ms=slo_ms,
        device=device,
        buckets=buckets,
        instances=instances,
        compiled=compiled,
    )
    finder = folder / FINDER
    (finder / "1").mkdir(parents=True, exist_ok=True)
    small = network == "tiny"
    (finder / "1" / "model.py").write_text(
        _FINDER.format(side=FINDER_SIDE, width=4 if small else 32, blocks=1 if small else 2)
    )
    settings = _FINDER_SETTINGS.format(
        slo_ms=slo_ms,
        largest=finder_buckets[-1],
        instances=instances,
        device=device,
        precision="fp16" if device != "cpu" else "fp32",
        compile=str(compiled).lower(),
        buckets=finder_buckets,
        side=FINDER_SIDE,
        scale=1 / 255,
        anchors=sum((FINDER_SIDE // stride) ** 2 for stride in (8, 16, 32)),
    )
    if not instances:
        settings = settings.replace("instances = 0\n", "")
    (finder / "model.toml").write_text(settings)
    (folder / STREET).mkdir(exist_ok=True)
    (folder / STREET / "pipeline.toml").write_text(
        _STREET.format(slo_ms=slo_ms, finder=FINDER, network=network, found=FOUND)
    )
    return folder
