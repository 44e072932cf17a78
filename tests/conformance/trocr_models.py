"""Small TrOCR models with random weights, as transformers makes and saves them, and what it writes with them.

Carpool does not need transformers: it is installed in a folder of its own, and runs in a process of its own,
`python -m conformance.trocr_models FOLDER`, so that no test finds it by chance.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from conformance import environment

VARIABLE = "CARPOOL_TRANSFORMERS"
"""Names the folder that it is installed in, for tests."""
PACKAGES = (
    *("transformers==5.22.2", "huggingface_hub==2.4.0", "tokenizers", "regex", "tqdm", "filelock", "pyyaml"),
    *("requests", "fsspec"),
)
_MAKE_S = 300.0
SIDE, WORDS, LONGEST, BEGIN, PAD, END = 32, 40, 24, 2, 1, 3
PICTURES = 6
KINDS = ("vit", "deit", "vit-same-width")


def install() -> Path:
    """The folder of its packages, without what the project has already, PyTorch above all."""
    what = "transformers"
    folder = environment.FOLDER / what
    wanted = ("--no-deps", "--upgrade", "--target", str(folder), *PACKAGES)
    return environment.install(what, what, wanted, own_python=False)


def made(transformers: str, folder: Path) -> None:
    """A folder for each kind below this one: what transformers saves, pictures.npy, and tokens.json."""
    tests = str(Path(__file__).parents[1])
    given = os.environ | {"PYTHONPATH": os.pathsep.join((tests, transformers)), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "conformance.trocr_models", str(folder)]
    subprocess.run(command, env=given, check=True, timeout=_MAKE_S)


def _make(kind: str, folder: Path) -> None:
    import torch
    from transformers import (
        DeiTConfig,
        TrOCRConfig,
        VisionEncoderDecoderConfig,
        VisionEncoderDecoderModel,
        ViTConfig,
    )

    seed = KINDS.index(kind)
    torch.manual_seed(seed)
    form: Any = DeiTConfig if kind == "deit" else ViTConfig
    sizes = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 40}
    writes = TrOCRConfig(
        vocab_size=WORDS,
        d_model=24 if kind == "vit-same-width" else 16,
        cross_attention_hidden_size=24,
        decoder_layers=2,
        decoder_attention_heads=2,
        decoder_ffn_dim=32,
        max_position_embeddings=LONGEST,
        bos_token_id=0,
        pad_token_id=PAD,
        eos_token_id=END,
        decoder_start_token_id=BEGIN,
    )
    pictures = form(image_size=SIDE, patch_size=8, **sizes)
    config = VisionEncoderDecoderConfig.from_encoder_decoder_configs(pictures, writes)
    model = VisionEncoderDecoderModel(config).eval()
    with torch.no_grad():  # as they begin, all answers would be alike
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 or "bias" in name:
                parameter.normal_(0.0, 0.1 if "bias" in name else 1.0)
    for known in (model.config, model.generation_config):
        known.decoder_start_token_id, known.eos_token_id, known.pad_token_id = BEGIN, END, PAD
    model.save_pretrained(folder)
    (folder / "vocab.json").write_text(json.dumps({f"w{n}": n for n in range(WORDS)}))
    seen = np.random.default_rng(seed).integers(0, 256, (PICTURES, 3, SIDE, SIDE), dtype=np.uint8)
    np.save(folder / "pictures.npy", seen)
    values = (torch.from_numpy(seen).float() / 255.0 - 0.5) / 0.5
    told = {"max_new_tokens": LONGEST - 1, "num_beams": 1, "do_sample": False}
    tokens = [model.generate(pixel_values=one[None], **told)[0, 1:].tolist() for one in values]
    with torch.no_grad():
        np.save(folder / "rows.npy", model.encoder(values).last_hidden_state.numpy())
    (folder / "tokens.json").write_text(json.dumps(tokens))


if __name__ == "__main__":
    for name in KINDS:
        _make(name, Path(sys.argv[1]) / name)
