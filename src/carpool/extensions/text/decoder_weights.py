"""Finds where a decoder's weights lie in the files of others: one map for each kind of file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import sqrt
from typing import Any

import torch

from carpool.errors import ConfigError
from carpool.extensions.text.torch_decoder import DecoderForm

Weights = dict[str, torch.Tensor]
_ACTIVATIONS = ("gelu", "relu")


def of_transformer_decoder(
    state: Mapping[str, torch.Tensor],
    prefix: str,
    layers: int,
    *,
    embed: torch.Tensor,
    positions: torch.Tensor,
    head: torch.Tensor,
    head_bias: torch.Tensor | None = None,
) -> Weights:
    """Returns the weights of PyTorch's nn.TransformerDecoder, whose tensors begin with `prefix` in this state
    dict; embeddings and head are the model's own."""
    found: Weights = {"embed": embed, "positions": positions, "head": head}
    if head_bias is not None:
        found["head_bias"] = head_bias
    keys, biases = [], []
    for layer in range(layers):
        at = f"{prefix}layers.{layer}."
        cross, cross_bias = (
            state[f"{at}multihead_attn.in_proj_weight"],
            state[f"{at}multihead_attn.in_proj_bias"],
        )
        width = len(cross) // 3
        keys.append(cross[width:])
        biases.append(cross_bias[width:])
        found |= {f"{layer}.qkv": state[f"{at}self_attn.in_proj_weight"]}
        found |= {f"{layer}.qkv_bias": state[f"{at}self_attn.in_proj_bias"]}
        found |= {f"{layer}.cross_q": cross[:width], f"{layer}.cross_q_bias": cross_bias[:width]}
        names = {"out": "self_attn.out_proj", "cross_out": "multihead_attn.out_proj"}
        names |= {"wide": "linear1", "narrow": "linear2"}
        names |= {name: name for name in ("norm1", "norm2", "norm3")}
        found |= _pairs(state, {f"{layer}.{ours}": at + theirs for ours, theirs in names.items()})
    found["cross.kv"], found["cross.kv_bias"] = torch.cat(keys), torch.cat(biases)
    if f"{prefix}norm.weight" in state:
        found |= _pairs(state, {"norm": f"{prefix}norm"})
    return found


def of_trocr(state: Mapping[str, torch.Tensor], config: Mapping[str, Any]) -> tuple[DecoderForm, Weights]:
    """Reads a folder of Hugging Face's VisionEncoderDecoderModel whose decoder is TrOCR's: `config` is its
    config.json, `state` its model.safetensors."""
    decoder = config.get("decoder", config)
    if decoder.get("model_type") != "trocr":
        raise ConfigError(f"the decoder is of type {decoder.get('model_type')!r}: only trocr's is known")
    if not decoder.get("use_learned_position_embeddings", True):
        raise ConfigError("use_learned_position_embeddings: only decoders with learned positions are known")
    if decoder["activation_function"] not in _ACTIVATIONS:
        raise ConfigError(f"activation_function: one of {', '.join(_ACTIVATIONS)}")
    width, layers = int(decoder["d_model"]), int(decoder["decoder_layers"])
    form = DecoderForm(
        layers=layers,
        heads=int(decoder["decoder_attention_heads"]),
        begin=int(decoder["decoder_start_token_id"]),
        end=int(decoder["eos_token_id"]),
        norm_first=False,
        activation=str(decoder["activation_function"]),
        scale=sqrt(width) if decoder.get("scale_embedding") else 1.0,
        offset=2,  # of its table of positions, for historical reasons
    )
    at = "decoder.model.decoder."
    embed = state[f"{at}embed_tokens.weight"]
    found: Weights = {"embed": embed, "positions": state[f"{at}embed_positions.weight"]}
    found["head"] = state.get("decoder.output_projection.weight", embed)
    if decoder.get("layernorm_embedding", True):
        found |= _pairs(state, {"embed_norm": f"{at}layernorm_embedding"})
    keys, biases = [], []
    for layer in range(layers):
        here = f"{at}layers.{layer}."
        own = [f"{here}self_attn.{part}_proj" for part in "qkv"]
        found[f"{layer}.qkv"] = torch.cat([state[f"{name}.weight"] for name in own])
        found[f"{layer}.qkv_bias"] = torch.cat([state[f"{name}.bias"] for name in own])
        keys += [state[f"{here}encoder_attn.{part}_proj.weight"] for part in "kv"]
        biases += [state[f"{here}encoder_attn.{part}_proj.bias"] for part in "kv"]
        names = {"out": "self_attn.out_proj", "cross_q": "encoder_attn.q_proj"}
        names |= {"cross_out": "encoder_attn.out_proj", "wide": "fc1", "narrow": "fc2"}
        names |= {"norm1": "self_attn_layer_norm", "norm2": "encoder_attn_layer_norm"}
        names |= {"norm3": "final_layer_norm"}
        found |= _pairs(state, {f"{layer}.{ours}": here + theirs for ours, theirs in names.items()})
    found["cross.kv"], found["cross.kv_bias"] = torch.cat(keys), torch.cat(biases)
    return form, found


def _pairs(state: Mapping[str, torch.Tensor], names: Mapping[str, str]) -> Weights:
    return dict(_each(state, names))


def _each(state: Mapping[str, torch.Tensor], names: Mapping[str, str]) -> Iterator[tuple[str, torch.Tensor]]:
    for ours, theirs in names.items():
        yield ours, state[f"{theirs}.weight"]
        yield f"{ours}_bias", state[f"{theirs}.bias"]
