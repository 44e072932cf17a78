"""What one process reaches without a network: the same steps, on threads with a stream each."""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torchvision

from chip.repository import MEAN, SIDE, STD

WARM = 3
STREAMS = (2, 3)


@dataclass(frozen=True)
class Ceiling:
    what: str
    batch: int
    threads: int
    images_per_s: float
    cpu_us_per_image: float


class Graph:
    """The network from bytes of pixels to logits, captured for one batch size."""

    def __init__(self, forward: Callable[[torch.Tensor], torch.Tensor], batch: int) -> None:
        self.stream = torch.cuda.Stream()
        self.input = torch.zeros(batch, 3, SIDE, SIDE, dtype=torch.uint8, device="cuda")
        with torch.cuda.stream(self.stream), torch.inference_mode():
            for _ in range(WARM):
                forward(self.input)
        self.stream.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.inference_mode(), torch.cuda.graph(self.graph, stream=self.stream):
            scores, classes = forward(self.input).softmax(1).topk(5)
        self.outputs = (scores, classes)
        self.host = [torch.empty_like(output, device="cpu", pin_memory=True) for output in self.outputs]

    def finish(self) -> None:
        """From the filled input to the answer in the host's memory."""
        self.graph.replay()
        for host, output in zip(self.host, self.outputs, strict=True):
            host.copy_(output, non_blocking=True)
        self.stream.synchronize()


def forward_of(network: str, *, compiled: bool) -> Callable[[torch.Tensor], torch.Tensor]:
    model = getattr(torchvision.models, network)(weights=None).eval().cuda().half()
    model = model.to(memory_format=torch.channels_last)
    mean = torch.tensor(MEAN, device="cuda").view(1, 3, 1, 1)
    std = torch.tensor(STD, device="cuda").view(1, 3, 1, 1)

    def forward(pixels: torch.Tensor) -> torch.Tensor:
        values = ((pixels.float() / 255 - mean) / std).half().contiguous(memory_format=torch.channels_last)
        answer: torch.Tensor = model(values).float()
        return answer

    return torch.compile(forward, dynamic=False) if compiled else forward


def jpeg_step(graph: Graph, jpegs: Sequence[torch.Tensor]) -> Callable[[], None]:
    """Decode, resize, run, copy back."""

    def step() -> None:
        decoded = torchvision.io.decode_jpeg(
            list(jpegs), device="cuda", mode=torchvision.io.ImageReadMode.RGB
        )
        small = torch.nn.functional.interpolate(
            torch.stack(decoded).float(), (SIDE, SIDE), mode="bilinear", antialias=True
        )
        graph.input.copy_(small.round_().clamp_(0, 255))
        graph.finish()

    return step


def tensor_step(graph: Graph, pinned: torch.Tensor) -> Callable[[], None]:
    def step() -> None:
        graph.input.copy_(pinned, non_blocking=True)
        graph.finish()

    return step


def measure(
    what: str, batch: int, steps: Sequence[Callable[[], None]], graphs: Sequence[Graph], seconds: float
) -> Ceiling:
    """All steps at once, each in a thread with its own stream."""
    counts = [0] * len(steps)
    go, stop = threading.Event(), threading.Event()

    def work(number: int) -> None:
        with torch.cuda.stream(graphs[number].stream), torch.inference_mode():
            for _ in range(WARM):
                steps[number]()
            go.wait()
            while not stop.is_set():
                steps[number]()
                counts[number] += 1

    threads = [threading.Thread(target=work, args=(number,)) for number in range(len(steps))]
    for thread in threads:
        thread.start()
    time.sleep(0.5)
    processor, began = time.process_time(), time.perf_counter()
    go.set()
    time.sleep(seconds)
    stop.set()
    for thread in threads:
        thread.join()
    took, spent = time.perf_counter() - began, time.process_time() - processor
    images = batch * sum(counts)
    return Ceiling(what, batch, len(steps), round(images / took), round(spent / images * 1e6, 1))


def ceilings(network: str, jpegs: Sequence[bytes], *, compiled: bool, seconds: float) -> list[Ceiling]:
    forward = forward_of(network, compiled=compiled)
    files = [torch.frombuffer(bytearray(data), dtype=torch.uint8) for data in jpegs]
    found: list[Ceiling] = []
    for batch in (64, 128):
        graphs = [Graph(forward, batch) for _ in range(max(STREAMS))]
        pinned = torch.randint(0, 255, (batch, 3, SIDE, SIDE), dtype=torch.uint8).pin_memory()
        chosen = (files * (batch // len(files) + 1))[:batch]
        for count in STREAMS:
            used = graphs[:count]
            steps = [jpeg_step(graph, chosen) for graph in used]
            found.append(measure("jpeg", batch, steps, used, seconds))
            steps = [tensor_step(graph, pinned) for graph in used]
            found.append(measure("tensor", batch, steps, used, seconds))
    return found


def main() -> None:
    """In a process of its own, so that its memory and threads are gone afterwards."""
    import argparse
    import json
    from dataclasses import asdict
    from pathlib import Path

    parser = argparse.ArgumentParser()
    parser.add_argument("network")
    parser.add_argument("photos", type=Path, nargs="+")
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--eager", action="store_true")
    given = parser.parse_args()
    found = ceilings(
        given.network,
        [path.read_bytes() for path in given.photos],
        compiled=not given.eager,
        seconds=given.seconds,
    )
    print(json.dumps([asdict(one) for one in found]))


if __name__ == "__main__":
    main()
