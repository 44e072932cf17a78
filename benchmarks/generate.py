#!/usr/bin/env python3
"""Answers per second of a model that writes: static batches as libraries do it, static batches with CUDA
graphs, and slots.

    python benchmarks/generate.py [--quick] [--json FILE] [--precision fp16]

The network has the shape of Carpool's line reader; its decoder has random weights and as many positions as
the longest answer needs. Lengths are drawn beforehand and the same for all: an answer ends when it has as
many tokens as were drawn for it, so that what is compared is the order of the work and not the reading.

(a) is `transformers`' generate, greedy, in batches of 64, for a VisionEncoderDecoderModel of the same size
    where transformers is installed; else the plain loop that it would run: a step for the whole batch, one
    launch after the other, until the last answer has ended.
(b) is the same loop with the captured steps that (c) uses.
(c) is Carpool's loop of scheduler and slots, as it runs in the server, without the network around it.

Then first tokens at 0.7, 0.9 and 1.5 times of what (c) carried, within the promise of `--ttft-ms`; below 1
also without a promise, and so with the encoder apart: a thread and a stream of its own on the same device,
against the same requests.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from carpool.core.curve import BatchCurve
from carpool.extensions.text import line_reader
from carpool.extensions.text.decoder_weights import of_transformer_decoder
from carpool.extensions.text.generation_simulation import TokenLengths
from carpool.extensions.text.line_reader import LineReader
from carpool.extensions.text.stepper import ModelPart, TextInstance
from carpool.extensions.text.text_job import TextPromise
from carpool.extensions.text.text_loading import measure
from carpool.extensions.text.text_loop import TextLoop
from carpool.extensions.text.text_network import TextNetwork, line_network
from carpool.extensions.text.text_records import Event, Failed, Piece
from carpool.extensions.text.text_scheduler import TextScheduler
from carpool.extensions.text.torch_decoder import DecoderForm
from carpool.extensions.text.torch_stepper import TorchStepper
from carpool.extensions.torch.torch_device import PRECISIONS, CudaDevice, Device

KINDS = {
    "lines": (TokenLengths.parse("lognormal:22,0.5"), 80),
    "pages": (TokenLengths.parse("lognormal:200,0.8"), 1024),
}
NO_END = -1
SWITCH_S = 1e-4  # as in the server's processes


def network_of(longest: int) -> TextNetwork:
    torch.manual_seed(1)
    reader = LineReader().eval()
    state = reader.state_dict()
    weights = of_transformer_decoder(
        state,
        "decoder.",
        line_reader.LAYERS,
        embed=state["characters.weight"],
        positions=0.02 * torch.randn(longest, line_reader.WIDTH),
        head=state["head.weight"],
        head_bias=state["head.bias"],
    )
    ours = line_network(reader)
    form = DecoderForm(line_reader.LAYERS, line_reader.HEADS, 0, NO_END, True, "relu")
    return TextNetwork(ours.pictures, ours.encoder, form, weights, longest, ours.pieces)


def static(stepper: TorchStepper, lengths: Sequence[int], step: Callable[[int], object]) -> float:
    """Answers per second."""
    picture, began = stepper.sample(), time.monotonic()
    for first in range(0, len(lengths), stepper.slots):
        batch = lengths[first : first + stepper.slots]
        stepper.admit(range(len(batch)), stepper.encode([picture] * len(batch)))
        for _ in range(max(batch)):
            step(len(batch))
    return len(lengths) / (time.monotonic() - began)


class Run:
    """Requests through Carpool's loop, and when their tokens came."""

    def __init__(
        self, instance: TextInstance, curves: tuple[BatchCurve, BatchCurve], promise: TextPromise
    ) -> None:
        self.firsts: list[float] = []
        self.failed = 0
        self.ended = 0
        self._arrived: dict[int, float] = {}
        self._changed = threading.Condition()
        self._loop = TextLoop("generate", instance, TextScheduler(*curves, promise), self._tell)

    def play(self, lengths: Sequence[int], rate: float | None = None) -> float:
        """At this rate, or all at once; answers per second."""
        draw, picture = random.Random(2), np.zeros((1, line_reader.HEIGHT, 512), np.uint8)
        threads = [
            threading.Thread(target=self._work, args=(number,), daemon=True)
            for number in range(self._loop.threads)
        ]
        for thread in threads:
            thread.start()
        began = at = time.monotonic()
        for number, length in enumerate(lengths):
            if rate is not None:
                at += draw.expovariate(rate)
                time.sleep(max(0.0, at - time.monotonic()))
            now = time.monotonic()
            self._arrived[number] = now
            if self._loop.submit(number, picture, now, limit=length) is not None:
                with self._changed:
                    self.failed += 1
        with self._changed:
            self._changed.wait_for(lambda: self.ended + self.failed == len(lengths), 300.0)
        seconds = time.monotonic() - began
        self._loop.close()
        for thread in threads:
            thread.join(10.0)
        return self.ended / seconds

    def _work(self, thread: int) -> None:
        while self._loop.turn(thread, wait=True):
            """Until it is closed. The stepper stays open for the next run."""

    def _tell(self, events: Sequence[Event]) -> None:
        now = time.monotonic()
        for event in events:
            if isinstance(event, Piece):
                if event.tokens == 1:
                    self.firsts.append(now - self._arrived[event.number])
                self.ended += bool(event.finish)
            elif isinstance(event, Failed):
                self.failed += 1
        with self._changed:
            self._changed.notify_all()


def percentile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else float("nan")


def transformers_model(longest: int, device: torch.device, precision: torch.dtype) -> Any | None:
    try:
        from transformers import TrOCRConfig, TrOCRForCausalLM, VisionEncoderDecoderModel, ViTConfig, ViTModel
    except ImportError:
        return None
    size = {"hidden_size": line_reader.WIDTH, "num_hidden_layers": 4, "num_attention_heads": 6}
    encoder = ViTModel(
        ViTConfig(**size, intermediate_size=512, image_size=128, patch_size=16, num_channels=3)
    )
    decoder = TrOCRForCausalLM(
        TrOCRConfig(
            vocab_size=len(line_reader.ALPHABET) + 4,
            d_model=line_reader.WIDTH,
            decoder_layers=4,
            decoder_attention_heads=6,
            decoder_ffn_dim=512,
            max_position_embeddings=longest + 8,
            cross_attention_hidden_size=line_reader.WIDTH,
            is_decoder=True,
            add_cross_attention=True,
        )
    )
    model = VisionEncoderDecoderModel(encoder=encoder, decoder=decoder).to(device, precision).eval()
    model.config.decoder_start_token_id = model.generation_config.decoder_start_token_id = 2
    model.config.pad_token_id = model.generation_config.pad_token_id = 1
    model.generation_config.eos_token_id = None
    return model


@torch.inference_mode()
def theirs(model: Any, lengths: Sequence[int], batch: int) -> float:
    place, kind = next(model.parameters()).device, next(model.parameters()).dtype
    pixels = torch.zeros(batch, 3, 128, 128, device=place, dtype=kind)
    began = time.monotonic()
    for first in range(0, len(lengths), batch):
        some = lengths[first : first + batch]
        model.generate(
            pixels[: len(some)],
            max_new_tokens=max(some),
            min_new_tokens=max(some),
            do_sample=False,
            num_beams=1,
        )
    if place.type == "cuda":
        torch.cuda.synchronize()
    return len(lengths) / (time.monotonic() - began)


def compared(kind: str, args: argparse.Namespace, cuda: bool) -> dict[str, Any]:
    drawn, longest = KINDS[kind]
    source = random.Random(1)
    count = (4 if args.quick else 40 if kind == "lines" else 12) * args.slots
    lengths = [min(longest - 1, drawn.draw(source)) for _ in range(count)]
    device = CudaDevice(0) if cuda else Device(args.threads)
    precision = PRECISIONS[args.precision]
    network = network_of(longest)
    stepper = TorchStepper(network, args.slots, device, kind, precision)
    instance, picture = TextInstance.whole(stepper), stepper.sample()

    def encode(size: int) -> None:
        stepper.admit(range(size), stepper.encode([picture] * size))
        stepper.step(1)

    sizes = [size for size in (1, 2, 4, 8, 16, 32) if size <= args.slots]
    steps = [measure(partial(stepper.step, width), width) for width in stepper.widths]
    one = steps[0].seconds
    encodes = [(size, max(1e-6, measure(partial(encode, size), size).seconds - one)) for size in sizes]
    curves = (
        BatchCurve.measured(encodes, sizes[-1]),
        BatchCurve.measured([(p.size, p.seconds) for p in steps], args.slots, stepper.widths),
    )
    found: dict[str, Any] = {
        "requests": count,
        "tokens": sum(lengths),
        "encode_ms": {size: round(seconds * 1e3, 4) for size, seconds in encodes},
        "step_ms": {p.size: round(p.seconds * 1e3, 4) for p in steps},
        "slot_bytes": stepper.slot_bytes,
    }
    few = lengths[: max(args.slots, count // 8)]
    model = transformers_model(longest, device.place, precision)
    if model is not None:
        theirs(model, [4] * args.slots, args.slots)
        found["a_is"], found["a"] = "transformers generate", theirs(model, few, args.slots)
        del model
    else:
        plain = stepper._decoder

        @torch.inference_mode()
        def eager(width: int) -> list[int]:
            device.enter()
            return plain._forward(slice(0, width)).tolist()

        found["a_is"], found["a"] = "a plain loop: transformers is not installed", static(stepper, few, eager)
    found["b"] = static(stepper, lengths, stepper.step)
    free = TextPromise(args.slots, longest, max_queue=1 << 20)
    run = Run(instance, curves, free)
    found["c"] = run.play(lengths)
    found["c_over_b"], found["b_over_a"], found["c_over_a"] = (
        found["c"] / found["b"],
        found["b"] / found["a"],
        found["c"] / found["a"],
    )
    promise = TextPromise(args.slots, longest, ttft=args.ttft_ms / 1e3, per_token=max(0.002, 3 * one))
    for load in (0.7, 0.9, 1.5):
        rate = load * found["c"]
        some = (lengths * 20)[: max(50, int(rate * (2.0 if args.quick else 6.0)))]
        found[f"at_{load}_promised"] = first_tokens(instance, curves, promise, some, rate)
        if load > 1:
            continue
        found[f"at_{load}"] = first_tokens(instance, curves, free, some, rate)
        encoder, decoder = (
            TorchStepper(network, args.slots, CudaDevice(0) if cuda else device, kind, precision, part)
            for part in (ModelPart.ENCODER, ModelPart.DECODER)
        )
        pools = TextInstance([encoder], [decoder], apart=True)
        found[f"at_{load}_apart"] = first_tokens(pools, curves, replace(free, encoders=1), some, rate)
        pools.close()
    stepper.close()
    return found


def first_tokens(
    instance: TextInstance,
    curves: tuple[BatchCurve, BatchCurve],
    promise: TextPromise,
    lengths: Sequence[int],
    rate: float,
) -> dict[str, float]:
    run = Run(instance, curves, promise)
    carried = run.play(lengths, rate)
    within = sum(first <= promise.ttft for first in run.firsts) / max(1, len(run.firsts))
    return {
        "asked_per_s": rate,
        "answered_per_s": carried,
        "refused": run.failed,
        "first_p50_ms": percentile(run.firsts, 0.5) * 1e3,
        "first_p99_ms": percentile(run.firsts, 0.99) * 1e3,
        "first_within_ttft": within,
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a tenth of the requests")
    parser.add_argument("--json", type=Path, help="write the numbers there")
    parser.add_argument("--precision", choices=sorted(PRECISIONS), default="fp16")
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--ttft-ms", type=float, default=20.0)
    parser.add_argument("--threads", type=int, default=2, help="on a CPU")
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    args = parser.parse_args()
    sys.setswitchinterval(SWITCH_S)
    cuda = torch.cuda.is_available()
    if not cuda:
        args.precision = "fp32"
    report: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if cuda else "CPU",
        "torch": torch.__version__,
        "precision": args.precision,
        "slots": args.slots,
    }
    for kind in args.kinds:
        report[kind] = compared(kind, args, cuda)
        print(kind, json.dumps(report[kind], indent=1), flush=True)
        if args.json is not None:
            args.json.write_text(json.dumps(report, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
