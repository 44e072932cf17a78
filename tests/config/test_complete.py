"""Declared settings and the model file must agree; what is not declared comes from the file."""

from __future__ import annotations

from pathlib import Path

import pytest

from absent import needs, rows
from carpool.config.completing import complete
from carpool.config.model import (
    DEFAULT_MAX_BATCH,
    ModelConfig,
    ModelSignature,
    TensorConfig,
    TensorSignature,
)
from carpool.config.toml import toml_config
from carpool.errors import ConfigError

FOLDER = Path("models/m")
IMAGES = TensorSignature("images", "FP32", (-1, 3, 224, 224))
LOGITS = TensorSignature("logits", "FP32", (-1, 1000))
DYNAMIC = ModelSignature((IMAGES,), (LOGITS,))
FIXED = ModelSignature(
    (TensorSignature("images", "FP32", (1, 3, 224, 224)),), (TensorSignature("logits", "FP32", (1, 1000)),)
)


def config(text: str = "") -> ModelConfig:
    return toml_config(text, FOLDER / "model.toml")


def declared(**changes: object) -> ModelConfig:
    fields = {"name": "images", "datatype": "FP32", "dims": (3, 224, 224), **changes}
    return ModelConfig(name="m", path=FOLDER, inputs=(TensorConfig(**fields),))  # type: ignore[arg-type]


def test_everything_from_a_model_that_batches() -> None:
    done = complete(config("slo_ms = 50"), DYNAMIC)
    assert done.inputs == (TensorConfig("images", "FP32", (3, 224, 224)),)
    assert done.outputs == (TensorConfig("logits", "FP32", (1000,)),)
    assert done.max_batch == done.policy.max_batch == DEFAULT_MAX_BATCH


def test_a_fixed_first_dimension_means_no_batching() -> None:
    done = complete(config(), FIXED)
    assert (done.max_batch, done.policy.max_batch) == (0, 1)
    assert done.inputs[0].dims == (1, 3, 224, 224)


def test_max_batch_stays_as_declared() -> None:
    assert complete(config("max_batch = 7"), DYNAMIC).policy.max_batch == 7
    assert complete(config("max_batch = 0"), DYNAMIC).inputs[0].dims == (-1, 3, 224, 224)
    one = complete(config("max_batch = 1"), FIXED)
    assert (one.max_batch, one.inputs[0].dims) == (1, (3, 224, 224))


def test_preferred_sizes_raise_the_default() -> None:
    assert complete(config("[batching]\npreferred = [64]"), DYNAMIC).max_batch == 64
    with pytest.raises(ConfigError, match="preferred batch 64 is larger"):
        complete(config("[batching]\npreferred = [64]"), FIXED)


def test_batches_on_a_fixed_model_are_refused() -> None:
    with pytest.raises(ConfigError, match=r'"images" has the shape \[1, 3, 224, 224\]; export the model'):
        complete(config("max_batch = 8"), FIXED)


def test_a_declared_whole_shape_means_no_batching() -> None:
    done = complete(declared(dims=(-1, 3, 224, 224)), DYNAMIC)
    assert (done.max_batch, done.inputs[0].dims) == (0, (-1, 3, 224, 224))


@pytest.mark.parametrize("dims", [(3, 224, 224), (3, -1, -1), (-1, 224, 224)])
def test_varying_dimensions_agree_with_any(dims: tuple[int, ...]) -> None:
    assert complete(declared(dims=dims), DYNAMIC).inputs[0].dims == (3, 224, 224)
    free = ModelSignature((TensorSignature("images", "FP32", (-1, 3, -1, -1)),), (LOGITS,))
    assert complete(declared(dims=dims), free).inputs[0].dims == tuple(
        3 if n == 0 and d == -1 else d for n, d in enumerate(dims)
    )


def test_reshape_is_held_against_the_file() -> None:
    done = complete(declared(dims=(3 * 224 * 224,), reshape=(3, 224, 224)), DYNAMIC)
    assert done.inputs[0].dims == (150528,)
    with pytest.raises(ConfigError, match=r"declared \[3, 7\]"):
        complete(declared(dims=(21,), reshape=(3, 7)), DYNAMIC)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"name": "image"}, 'm: input "image" is declared but not in the model file; did you mean "images"?'),
        ({"datatype": "FP16"}, 'm: input "images" is declared FP16 but is FP32 in the model file'),
        ({"dims": (3, 256, 256)}, "declared [3, 256, 256] but is [3, 224, 224] (without the batch)"),
        ({"dims": (3,)}, "declared [3] but is [3, 224, 224] (without the batch)"),
    ],
)
def test_disagreements(changes: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError) as error:
        complete(declared(**changes), DYNAMIC)
    assert words in str(error.value)


def test_every_input_needs_a_declaration_but_not_every_output() -> None:
    extra = TensorSignature("extra", "FP32", (-1, 1))
    with pytest.raises(ConfigError, match='has the input "extra", which is not declared'):
        complete(declared(), ModelSignature((IMAGES, extra), (LOGITS,)))
    optional = TensorSignature("extra", "FP32", (-1, 1), optional=True)
    assert len(complete(declared(), ModelSignature((IMAGES, optional), (LOGITS,))).inputs) == 1
    some = config('[[output]]\nname = "logits"\ndatatype = "FP32"\nshape = [1000]')
    assert len(complete(some, ModelSignature((IMAGES,), (LOGITS, extra))).outputs) == 1


def test_a_file_that_says_nothing_needs_declarations() -> None:
    with pytest.raises(ConfigError, match="does not declare its inputs; declare each"):
        complete(config(), ModelSignature())
    text = '[[input]]\nname="i"\ndatatype="FP32"\nshape=[2]\n[[output]]\nname="o"\ndatatype="FP32"\nshape=[2]'
    done = complete(config(text), ModelSignature())
    assert done.max_batch == DEFAULT_MAX_BATCH
    assert done.inputs[0].dims == (2,)


@needs("streams")
@pytest.mark.parametrize(
    ("text", "words"),
    [
        *rows("cache", ("response_cache = true", "a cache stores the one response")),
        *rows("cache", ("[cache]\nttl_s = 5", "a cache stores the one response")),
        *rows("rollout", ("[rollout]\ncanary = [0.1]", "a rollout compares the one response")),
        *rows(
            "registry rollout",
            (
                "[registry]\nstable = 'models:/m@a'\ncandidate = 'models:/m@b'",
                "a rollout compares the one response",
            ),
        ),
        ("slo_ms = 50", "slo_ms is the latency of a single response"),
        (
            "[batching]\npreserve_ordering = true",
            "preserve_ordering needs requests with exactly one response",
        ),
        *rows("sequences", ("[sequences]\nstrategy = 'oldest'", "the next request of a sequence waits")),
        ("backend = 'onnxruntime'", "it is for Python models"),
    ],
)
def test_what_needs_one_answer_does_not_go_with_many(text: str, words: str) -> None:
    backend = "" if "backend" in text else "backend = 'python'\n"
    with pytest.raises(ConfigError, match=f"m: decoupled: {words}"):
        complete(config(f"decoupled = true\n{backend}{text}"), DYNAMIC)
