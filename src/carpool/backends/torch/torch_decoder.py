"""A transformer's decoder that writes many answers at once, each in its own slot and at its own position.

The caches [layer, slot, head, position, …] and all else that a step reads lie in the same place always, so
that a step is one CUDA graph for each width. What a slot may attend to is said by its own row of a tensor:
answers of any age stand side by side. Attention is computed row by row of the batch, and a new answer finds
its slot zeroed, so that whatever is left in a slot (even NaN, which no mask would stop) reaches nobody.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from carpool.backends.torch.torch_device import Device, Program
from carpool.errors import InvalidInput
from carpool.types import Array

Weights = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class DecoderForm:
    """What the weights do not say of themselves."""

    layers: int
    heads: int
    begin: int  # the token before the first
    end: int
    norm_first: bool
    activation: str  # relu or gelu
    scale: float = 1.0  # of embeddings
    offset: int = 0  # of positions in their table


class TorchDecoder:
    """`weights` as decoder_weights.py names them; `memory` is the longest that an encoder hands over."""

    def __init__(
        self, form: DecoderForm, weights: Weights, slots: int, longest: int, memory: int, device: Device
    ) -> None:
        self.form, self.slots, self.longest, self.memory = form, slots, longest, memory
        self._device = device
        self._weights = {name: tensor.to(device.place) for name, tensor in weights.items()}
        embedded = self._weights["embed"]
        if form.offset + longest > len(self._weights["positions"]):
            raise InvalidInput(f"the model has no positions for {longest} tokens")
        self._width = embedded.shape[1]
        head = self._width // form.heads
        kind = embedded.dtype
        own = (form.layers, slots, form.heads, longest, head)
        across = (form.layers, slots, form.heads, memory, head)
        self._keys, self._values = device.zeros(own, kind), device.zeros(own, kind)
        self._cross_keys, self._cross_values = device.zeros(across, kind), device.zeros(across, kind)
        self._tokens = device.zeros((slots,), torch.int64)
        self._at = device.zeros((slots,), torch.int64)  # the position at which each slot writes next
        self._ended = device.zeros((slots,), torch.bool)
        self._seen = device.zeros((slots, memory), torch.bool)  # what of the encoder's rows is there
        self._order = torch.arange(longest, device=device.place)
        self._columns = torch.arange(memory, device=device.place)
        self._rows = torch.arange(slots, device=device.place)
        self._heads = torch.arange(form.heads, device=device.place)[None]
        self._told = device.staging((slots,), torch.int64)
        self.widths = sorted(
            {slots, *(1 << power for power in range(slots.bit_length()) if 1 << power <= slots)}
        )
        self._programs = {width: self._prepared(width) for width in self.widths}
        for touched in (self._keys, self._values, self._at, self._tokens, self._ended):
            touched.zero_()

    @property
    def slot_bytes(self) -> int:
        caches = (self._keys, self._values, self._cross_keys, self._cross_values)
        return sum(cache.numel() * cache.element_size() for cache in caches) // self.slots

    @torch.inference_mode()
    def admit(self, slot: int, encoded: torch.Tensor, prompt: Sequence[int] = (), limit: int = 0) -> None:
        """`encoded` [rows, width] is what the encoder made of the picture."""
        if not 0 <= slot < self.slots:
            raise InvalidInput(f"there are slots 0 to {self.slots - 1}, not {slot}")
        if not 0 < len(encoded) <= self.memory:
            raise InvalidInput(f"an encoded picture has 1 to {self.memory} rows, not {len(encoded)}")
        first = list(prompt) or [self.form.begin]
        if len(first) + max(1, limit) - 1 > self.longest:
            raise InvalidInput(f"{len(first)} tokens to begin with and {limit} more are over {self.longest}")
        self.admit_all([slot], encoded[None])
        for token in first[:-1]:
            self._tokens[slot] = token
            self._forward(slice(slot, slot + 1))
            self._ended[slot] = False
        self._tokens[slot] = first[-1]

    @torch.inference_mode()
    def admit_all(self, slots: Sequence[int], encoded: torch.Tensor) -> None:
        """Answers without a prompt, for pictures of the same number of rows: `encoded` [slots, rows, width].
        These are a dozen launches, however many there are."""
        count, rows = encoded.shape[:2]
        self._device.enter()
        where = torch.tensor(slots, device=self._device.place)
        both = functional.linear(encoded, self._weights["cross.kv"], self._weights["cross.kv_bias"])
        # [slot, row, layer, key or value, head, …] to [layer, slot, head, row, …]
        both = both.view(count, rows, self.form.layers, 2, self.form.heads, -1).permute(3, 2, 0, 4, 1, 5)
        for cache in (self._keys, self._values, self._cross_keys, self._cross_values):
            if rows < self.memory or cache is self._keys or cache is self._values:
                cache.index_fill_(1, where, 0.0)
        for cache, made in zip((self._cross_keys, self._cross_values), both, strict=True):
            cache[..., :rows, :].index_copy_(1, where, made)
        self._seen[where] = self._columns < rows
        self._at[where] = 0
        self._ended[where] = False
        self._tokens[where] = self.form.begin

    @torch.inference_mode()
    def step(self, width: int) -> Array:
        if not 1 <= width <= self.slots:
            raise InvalidInput(f"a step has 1 to {self.slots} slots, not {width}")
        run = next(known for known in self.widths if known >= width)
        self._device.enter()
        program = self._programs[run]
        self._device.launch(program, 1)  # however wide it is, it leaves most of a device to others
        told = self._told[:run]
        told.copy_(program.outputs["tokens"], non_blocking=True)
        self._device.wait(1)  # a step is short: waking up would take a good part of its time
        return told[:width].numpy().copy()

    # ---- one step

    def _prepared(self, width: int) -> Program:
        def run() -> Mapping[str, torch.Tensor]:
            return {"tokens": self._forward(slice(0, width))}

        with torch.inference_mode():
            self._device.warm(run)
            return self._device.capture(run)

    def _forward(self, rows: slice) -> torch.Tensor:
        """The next token of each of these slots, which is also what their next step begins with."""
        form, w = self.form, self._weights
        at = self._at[rows]
        x = w["embed"][self._tokens[rows]] * form.scale + w["positions"][at + form.offset]
        if "embed_norm" in w:
            x = self._norm(x, "embed_norm")
        written = (self._order <= at[:, None])[:, None, None]
        # Nobody's slot sees its first row of zeros, so that no row of the mask is empty.
        seen = self._seen[rows].index_fill(1, self._order[:1], True)[:, None, None]
        for layer in range(form.layers):
            x = self._own(x, layer, rows, written)
            x = self._across(x, layer, rows, seen)
            x = self._inner(x, layer)
        if "norm" in w:
            x = self._norm(x, "norm")
        likely = functional.linear(x, w["head"], w.get("head_bias")).argmax(1)
        self._ended[rows] |= likely == form.end
        likely = torch.where(self._ended[rows], form.end, likely)
        self._tokens[rows] = likely
        self._at[rows] = (at + 1).clamp(max=self.longest - 1)  # slots that nobody has are stepped for ever
        return likely

    def _own(self, x: torch.Tensor, layer: int, rows: slice, written: torch.Tensor) -> torch.Tensor:
        """Attention to what the slot has written; this token's key and value are put beside the others."""
        y = self._linear(self._before(x, f"{layer}.norm1"), f"{layer}.qkv")
        query, key, value = y.view(len(y), 3, self.form.heads, 1, -1).unbind(1)
        slots, at = self._rows[rows], self._at[rows]
        self._keys[layer].index_put_((slots[:, None], self._heads, at[:, None]), key[:, :, 0])
        self._values[layer].index_put_((slots[:, None], self._heads, at[:, None]), value[:, :, 0])
        found = functional.scaled_dot_product_attention(
            query, self._keys[layer, rows], self._values[layer, rows], attn_mask=written
        )
        return self._after(x, self._linear(found.flatten(1), f"{layer}.out"), f"{layer}.norm1")

    def _across(self, x: torch.Tensor, layer: int, rows: slice, seen: torch.Tensor) -> torch.Tensor:
        """Attention to what the encoder made of the picture."""
        y = self._linear(self._before(x, f"{layer}.norm2"), f"{layer}.cross_q")
        query = y.view(len(y), self.form.heads, 1, -1)
        found = functional.scaled_dot_product_attention(
            query, self._cross_keys[layer, rows], self._cross_values[layer, rows], attn_mask=seen
        )
        return self._after(x, self._linear(found.flatten(1), f"{layer}.cross_out"), f"{layer}.norm2")

    def _inner(self, x: torch.Tensor, layer: int) -> torch.Tensor:
        y = self._linear(self._before(x, f"{layer}.norm3"), f"{layer}.wide")
        y = functional.relu(y) if self.form.activation == "relu" else functional.gelu(y)
        return self._after(x, self._linear(y, f"{layer}.narrow"), f"{layer}.norm3")

    def _before(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return self._norm(x, name) if self.form.norm_first else x

    def _after(self, x: torch.Tensor, y: torch.Tensor, name: str) -> torch.Tensor:
        return x + y if self.form.norm_first else self._norm(x + y, name)

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        weight = self._weights[name]
        return functional.layer_norm(x, weight.shape, weight, self._weights[f"{name}_bias"])

    def _linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return functional.linear(x, self._weights[name], self._weights[f"{name}_bias"])
