"""TrOCR models write here what they write with transformers: encoder and decoder, token for token."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch

from carpool.extensions.text.text_network import read_trocr
from carpool.extensions.text.torch_stepper import TorchStepper
from carpool.extensions.torch.torch_device import Device
from conformance import trocr_models

INSTALLED = os.environ.get(trocr_models.VARIABLE)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if INSTALLED is None:
        pytest.skip(f"make conformance installs transformers, and says where in {trocr_models.VARIABLE}")
    folder = tmp_path_factory.mktemp("trocr")
    trocr_models.made(INSTALLED, folder)
    return folder


@pytest.mark.conformance
def test_greedy_tokens_are_those_of_transformers(models: Path) -> None:
    answers = set()
    for folder in sorted(models.iterdir()):
        stepper = TorchStepper(read_trocr(folder), 3, Device())
        pictures = np.load(folder / "pictures.npy")
        wanted = json.loads((folder / "tokens.json").read_text())
        rows = list(stepper.encode([stepper.read({"image": one}) for one in pictures]))
        theirs = torch.from_numpy(np.load(folder / "rows.npy"))
        torch.testing.assert_close(torch.stack(rows), theirs, rtol=1e-4, atol=1e-4)
        for first in range(0, len(pictures), 3):  # slots are taken again
            stepper.admit(range(3), rows[first : first + 3])
            steps = [stepper.step(3) for _ in range(trocr_models.LONGEST - 1)]
            for slot in range(3):
                tokens = wanted[first + slot]
                assert [int(step[slot]) for step in steps[: len(tokens)]] == tokens, folder.name
                answers.add(tuple(tokens))
    assert len(answers) > 4  # they are not all alike
