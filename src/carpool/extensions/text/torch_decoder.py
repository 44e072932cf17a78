"""Implements a transformer's decoder that writes many answers at once, each in its own slot and at its own
position.

The caches [layer, slot, head, position, …] and all else that a step reads lie in the same place always, so
that a step is one CUDA graph for each width. What a slot may attend to is said by its own row of a tensor:
answers of any age stand side by side. Attention is computed row by row of the batch, and a new answer finds
its slot zeroed, so that what is left in a slot (even NaN, which no mask would stop) reaches no other answer.

Admitting answers is one graph for each number of them, too. There is one slot more than answers use: the
unused places of such a graph go there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from carpool.errors import InvalidInput
from carpool.extensions.text.stepper import AHEAD
from carpool.extensions.torch.torch_device import Device, Program
from carpool.types import Array

_ADMITTED = 32  # answers that are taken in at once, at most
_STAGED = 8  # lists of slots that may be on their way to the device

Weights = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class DecoderForm:
    """Describes what the weights do not say of themselves."""

    layers: int
    heads: int
    begin: int  # the token before the first
    end: int
    norm_first: bool
    activation: str  # relu or gelu
    scale: float = 1.0  # of embeddings
    offset: int = 0  # of positions in their table


class _Launched:
    """Describes a step on its way, and where its tokens go."""

    def __init__(self, device: Device, slots: int, widths: Sequence[int]) -> None:
        told = device.staging((slots,), torch.int64)
        self.all: Array = told.numpy()
        self.told = {width: told[:width] for width in widths}
        self.marker = device.marker()
        self.width = self.staged = 0


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
        own = (form.layers, slots + 1, form.heads, longest, head)
        across = (form.layers, slots + 1, form.heads, memory, head)
        self._keys, self._values = device.zeros(own, kind), device.zeros(own, kind)
        self._cross_keys, self._cross_values = device.zeros(across, kind), device.zeros(across, kind)
        self._tokens = device.zeros((slots + 1,), torch.int64)
        self._at = device.zeros((slots + 1,), torch.int64)  # the position at which each slot writes next
        self._ended = device.zeros((slots + 1,), torch.bool)
        # Added to the attention scores of the encoder's rows: 0, or -inf for rows that are not seen. An
        # unused slot sees its first row of zeros, so that no row is empty.
        self._seen = device.zeros((slots + 1, memory), kind)
        self._seen[:, 1:] = -torch.inf
        self._order = torch.arange(longest, device=device.place)
        self._columns = torch.arange(memory, device=device.place)
        self._rows = torch.arange(slots, device=device.place)
        self._heads = torch.arange(form.heads, device=device.place)[None]
        self.widths = sizes(slots)
        self._programs = {width: self._prepared(width) for width in self.widths}
        self._free = [_Launched(device, slots, self.widths) for _ in range(AHEAD)]
        self._launched: deque[_Launched] = deque()
        self._staged = self._taken = 0  # lists of slots, and how many of them the device has surely read
        self._places = device.staging((_STAGED, slots), torch.int64)
        self._admitting: dict[int, tuple[torch.Tensor, torch.Tensor, Program]] = {}
        if device.captures:
            self._admitting = {size: self._admission(size) for size in self.widths if size <= _ADMITTED}
        for touched in (self._keys, self._values, self._at, self._tokens, self._ended):
            touched.zero_()

    @property
    def slot_bytes(self) -> int:
        caches = (self._keys, self._values, self._cross_keys, self._cross_values)
        return sum(cache.numel() * cache.element_size() for cache in caches) // (self.slots + 1)

    @torch.inference_mode()
    def admit(self, slots: Sequence[int], encoded: Sequence[torch.Tensor]) -> None:
        """Answers begin in these slots, for pictures of the same number of rows: each [rows, width]."""
        self._device.enter()
        size = next((size for size in self._admitting if size >= len(slots)), 0)
        if not size or len(encoded[0]) < self.memory:
            self._take_in(torch.tensor(slots, device=self._device.place), torch.stack(list(encoded)))
            return
        if self._staged - self._taken == _STAGED:
            self.settle()
        places = self._places[self._staged % _STAGED, :size]
        self._staged += 1
        places.numpy()[:] = [*slots, *[self.slots] * (size - len(slots))]
        where, rows, program = self._admitting[size]
        where.copy_(places, non_blocking=True)
        torch.stack(list(encoded), out=rows[: len(slots)])
        self._device.launch(program, 1)

    @torch.inference_mode()
    def _take_in(self, where: torch.Tensor, encoded: torch.Tensor) -> None:
        count, rows = encoded.shape[:2]
        both = functional.linear(encoded, self._weights["cross.kv"], self._weights["cross.kv_bias"])
        # [slot, row, layer, key or value, head, …] to [layer, slot, head, row, …]
        both = both.view(count, rows, self.form.layers, 2, self.form.heads, -1).permute(3, 2, 0, 4, 1, 5)
        for cache in (self._keys, self._values, self._cross_keys, self._cross_values):
            if rows < self.memory or cache is self._keys or cache is self._values:
                cache.index_fill_(1, where, 0.0)
        for cache, made in zip((self._cross_keys, self._cross_values), both, strict=True):
            cache[..., :rows, :].index_copy_(1, where, made)
        hidden = torch.zeros_like(self._seen[0]).masked_fill_(self._columns >= rows, -torch.inf)
        self._seen.index_copy_(0, where, hidden.expand(count, -1))
        self._at.index_fill_(0, where, 0)
        self._ended.index_fill_(0, where, False)
        self._tokens.index_fill_(0, where, self.form.begin)

    def _admission(self, size: int) -> tuple[torch.Tensor, torch.Tensor, Program]:
        where = self._device.zeros((size,), torch.int64)
        where.fill_(self.slots)
        rows = self._device.zeros((size, self.memory, self._width), self._keys.dtype)

        def run() -> Mapping[str, torch.Tensor]:
            self._take_in(where, rows)
            return {}

        with torch.inference_mode():
            self._device.warm(run)
            return where, rows, self._device.capture(run)

    def settle(self) -> None:
        self._device.enter()
        self._device.wait(1)  # it is short: waking up would take a good part of its time
        self._taken = self._staged

    def forget(self) -> None:
        """Discards the tokens of the steps that were launched."""
        self._free += self._launched
        self._launched.clear()
        self.settle()

    def launch(self, width: int) -> None:
        if not 1 <= width <= self.slots:
            raise InvalidInput(f"a step has 1 to {self.slots} slots, not {width}")
        run = next(known for known in self.widths if known >= width)
        self._device.enter()
        program = self._programs[run]
        self._device.launch(program, 1)  # however wide it is, it leaves most of a device to others
        step = self._free.pop()
        step.told[run].copy_(program.outputs["tokens"], non_blocking=True)
        step.marker.record()
        step.width, step.staged = width, self._staged
        self._launched.append(step)

    def tokens(self) -> Array:
        step = self._launched.popleft()
        self._free.append(step)
        step.marker.wait()
        self._taken = max(self._taken, step.staged)
        return step.all[: step.width].copy()

    def step(self, width: int) -> Array:
        self.launch(width)
        return self.tokens()

    # ---- one step

    def _prepared(self, width: int) -> Program:
        def run() -> Mapping[str, torch.Tensor]:
            return {"tokens": self._forward(slice(0, width))}

        with torch.inference_mode():
            self._device.warm(run)
            return self._device.capture(run)

    @torch.inference_mode()
    def _forward(self, rows: slice) -> torch.Tensor:
        """Returns the next token of each of these slots, which is also what their next step begins with."""
        form, w = self.form, self._weights
        at = self._at[rows]
        x = w["embed"][self._tokens[rows]] * form.scale + w["positions"][at + form.offset]
        if "embed_norm" in w:
            x = self._norm(x, "embed_norm")
        hidden = self._order > at[:, None]
        written = torch.zeros_like(hidden, dtype=x.dtype).masked_fill_(hidden, -torch.inf)[:, None, None]
        seen = self._seen[rows][:, None, None]
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
        self._at[rows] = (at + 1).clamp(max=self.longest - 1)  # unused slots are stepped for ever
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
        """Computes attention to what the encoder made of the picture."""
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


def sizes(largest: int) -> list[int]:
    """Returns powers of two, and the largest itself: what programs are prepared for."""
    return sorted({largest, *(1 << power for power in range(largest.bit_length()))})
