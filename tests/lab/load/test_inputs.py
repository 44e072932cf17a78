"""Tensors for any model: as the server describes it, at random, or from a file."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from carpool.errors import InvalidInput
from carpool.lab.load import messages as module
from carpool.lab.load.messages import Filling, make_tensors
from carpool.types import DATATYPES, Datatype, TensorSpec
from carpool.wire.codec import to_binary

IMAGE = TensorSpec("image", Datatype.FP32, (-1, 3, 4, 4))
OPEN = TensorSpec("image", Datatype.FP32, (-1, 3, -1, -1))
FIXED = TensorSpec("image", Datatype.FP32, (3, 4))


@pytest.mark.parametrize("datatype", DATATYPES.values())
@pytest.mark.parametrize("data", ["random", "zeros"])
def test_every_datatype_can_be_sent(datatype: Datatype, data: str) -> None:
    ((tensor,), *_) = make_tensors([TensorSpec("x", datatype, (-1, 5))], Filling(data), 2)
    assert tensor.shape == tensor.data.shape == (2, 5)
    assert tensor.data.dtype == datatype.dtype
    size = 10 * (4 + 16 if datatype is Datatype.BYTES else datatype.size)
    assert len(to_binary(tensor)) == size


def test_requests_differ_and_the_seed_decides() -> None:
    first = make_tensors([IMAGE], Filling(distinct=3), 1)
    assert len(first) == 3
    assert not np.array_equal(first[0][0].data, first[1][0].data)
    again = make_tensors([IMAGE], Filling(distinct=3), 1)
    assert all(np.array_equal(a.data, b.data) for (a,), (b,) in zip(first, again, strict=True))
    other = make_tensors([IMAGE], Filling(distinct=3, seed=2), 1)
    assert not np.array_equal(first[0][0].data, other[0][0].data)


def test_large_requests_are_prepared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_PREPARED", 400)
    assert len(make_tensors([IMAGE], Filling(distinct=8), 1)) == 2
    assert len(make_tensors([IMAGE], Filling(distinct=8), 5)) == 1


def test_shapes_that_the_model_leaves_open() -> None:
    ((tensor,), *_) = make_tensors([OPEN], Filling(shapes={"image": (1, 3, 8, 6)}), 1)
    assert tensor.shape == (1, 3, 8, 6)
    ((tensor,), *_) = make_tensors([OPEN], Filling(shapes={"image": (1, 3, 8, 6)}), 4)
    assert tensor.shape == (4, 3, 8, 6)


@pytest.mark.parametrize(
    ("spec", "filling", "images", "says"),
    [
        (OPEN, Filling(), 1, "like --shape image:1,3,224,224"),
        (IMAGE, Filling(shapes={"image": (1, 3, 4)}), 1, "the model says -1,3,4,4"),
        (IMAGE, Filling(shapes={"image": (1, 3, 4, 5)}), 1, "does not fit"),
        (IMAGE, Filling(shapes={"picture": (1,)}), 1, "'picture', but the model's inputs are image"),
        (OPEN, Filling(shapes={"image": (1, 3, 90_000, 90_000)}), 1, "the most is"),
        (FIXED, Filling(), 2, "which has no batch"),
        (IMAGE, Filling("nowhere.npy"), 1, "cannot read nowhere.npy"),
    ],
)
def test_what_cannot_be_sent_is_explained(spec: TensorSpec, filling: Filling, images: int, says: str) -> None:
    with pytest.raises(InvalidInput, match=says):
        make_tensors([spec], filling, images)


def test_files(tmp_path: Path) -> None:
    values = np.arange(48, dtype=np.float32).reshape(1, 3, 4, 4)
    np.save(tmp_path / "one.npy", values[0])
    np.savez(tmp_path / "named.npz", image=values)
    (tmp_path / "flat.json").write_text(json.dumps({"image": values.tolist()}))
    request = {
        "inputs": [
            {"name": "image", "shape": [1, 3, 4, 4], "datatype": "FP32", "data": values.ravel().tolist()}
        ]
    }
    (tmp_path / "request.json").write_text(json.dumps(request))
    for file in sorted(tmp_path.iterdir()):
        ((tensor,),) = make_tensors([IMAGE], Filling(str(file)), 2)
        assert np.array_equal(tensor.data, np.concatenate([values, values])), file


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("a.json", "nonsense", "must be random, zeros"),
        ("a.json", "[1]", "an object with an array for each input"),
        ("a.json", '{"inputs": [3]}', '"name" and "data"'),
        ("a.json", '{"other": [3]}', "nothing for input 'image'"),
        ("a.json", '{"image": [1, 2, 3, 4, 5]}', "does not fit input 'image'"),
        ("a.json", '{"image": ["a"]}', "does not fit input 'image'"),
        ("a.npy", "not an array", "must be random, zeros"),
    ],
)
def test_files_that_do_not_fit(tmp_path: Path, name: str, text: str, says: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(InvalidInput, match=says):
        make_tensors([IMAGE], Filling(str(tmp_path / name)), 1)


def test_an_array_without_a_name_is_for_one_input(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.zeros(3))
    with pytest.raises(InvalidInput, match=r"use \.npz"):
        make_tensors([IMAGE, TensorSpec("mask", Datatype.BOOL, (4,))], Filling(str(tmp_path / "a.npy")), 1)
