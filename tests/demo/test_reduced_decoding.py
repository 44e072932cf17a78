"""A JPEG decoded smaller, because the input is small, is the same picture to a classifier."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnxruntime
import pytest

from carpool.config.model import ImageSettings
from carpool.types import Datatype, TensorSpec
from carpool.vision.decode import Decoded, decode
from carpool.vision.transforms import Transform
from later import first, later
from vision.photos import PHOTOS, encoded, enlarged_photo

LITE0 = ImageSettings(resize="crop", crop=0.875, kernel="area", mean=(127.0,), std=(128.0,))


@pytest.mark.parametrize("name", first(2, PHOTOS))
@pytest.mark.parametrize("enlarged", [4, later(8)])
def test_the_first_class_is_the_same(name: str, enlarged: int, model_file: Any) -> None:
    transform = Transform(LITE0, TensorSpec("images", Datatype.FP32, (3, 224, 224)), "lite0")
    session = onnxruntime.InferenceSession(model_file("efficientnet_lite0"))

    def best(decoded: Decoded) -> int:
        batch = np.empty((1, *transform.shape), transform.dtype)
        transform.prepare(decoded, batch[0])
        return int(session.run(None, {"images": batch})[0].argmax())

    sent = encoded(enlarged_photo(name, enlarged), "JPEG", quality=90)
    in_full, reduced = decode(sent), decode(sent, reduction=transform.reduction)
    assert reduced.pixels.size < in_full.pixels.size
    assert best(reduced) == best(in_full)
