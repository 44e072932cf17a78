"""Detector and classifier in one process without a network, in batches: what a pipeline is measured against.

Decode a batch of JPEGs, resize, detect, choose boxes, cut four crops out of each, classify all of them, top
five: on threads with a stream each, networks and NMS in CUDA graphs, crops in one call of torchvision. It
says "ready", then measures for each line `SECONDS THREADS` that it is given, and answers with a line of JSON.
"""

import argparse
import importlib.util
import json
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import simplejpeg
import torch

from carpool.extensions.torch.torch_pictures import BoxForm, KeptBoxes
from chip.repository import MEAN, SIDE, STD
from chip.street import FINDER, FINDER_SIDE, FOUND

_WARM = 3
Forward = Callable[[torch.Tensor], torch.Tensor]


class Captured:
    """A network for one batch size, from pixels to its answer: a CUDA graph, or as it is on a CPU."""

    def __init__(self, forward: Forward, shape: Sequence[int], device: torch.device, stream: Any) -> None:
        kind = torch.float16 if device.type == "cuda" else torch.float32
        self.input = torch.zeros(*shape, dtype=kind, device=device)
        self._forward = forward
        self._graph: Any = None
        with torch.inference_mode():
            if stream is None:
                self.output = forward(self.input)
                return
            with torch.cuda.stream(stream):
                for _ in range(_WARM):
                    forward(self.input)
            stream.synchronize()
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph, stream=stream):
                self.output = forward(self.input)

    def __call__(self) -> torch.Tensor:
        if self._graph is None:
            self.output = self._forward(self.input)
        else:
            self._graph.replay()
        return self.output


class Alone:
    """What one thread needs: `step` takes a batch of pictures from files to classes."""

    def __init__(self, forwards: tuple[Forward, Forward], files: list[torch.Tensor], most: int) -> None:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.stream = torch.cuda.Stream() if device.type == "cuda" else None
        self._device = device
        self._files = files
        self.pictures = len(files)
        self._finder = Captured(
            forwards[0], (self.pictures, 3, FINDER_SIDE, FINDER_SIDE), device, self.stream
        )
        crops = min(most, FOUND * self.pictures)
        self._namer = Captured(forwards[1], (crops, 3, SIDE, SIDE), device, self.stream)

    def step(self) -> int:
        pixels = decoded(self._files, self._device)
        small = torch.nn.functional.interpolate(
            pixels.float(), (FINDER_SIDE, FINDER_SIDE), mode="bilinear", antialias=True
        )
        self._finder.input.copy_(small)
        rows = self._finder().cpu()
        height, width = pixels.shape[2:]
        scale = torch.tensor([width, height, width, height]) / FINDER_SIDE
        boxes = [row[row[:, 5] >= 0][:FOUND, :4] * scale for row in rows]
        parts = crops_of(pixels, boxes)
        size = len(self._namer.input)
        for start in range(0, len(parts), size):
            some = parts[start : start + size]
            self._namer.input[: len(some)].copy_(some)
            self._namer().cpu()
        return self.pictures


def decoded(files: list[torch.Tensor], device: torch.device) -> torch.Tensor:
    if device.type == "cuda":
        from torchvision.io import ImageReadMode, decode_jpeg

        return torch.stack(decode_jpeg(files, device=device, mode=ImageReadMode.RGB))
    read = [torch.from_numpy(simplejpeg.decode_jpeg(file.numpy())) for file in files]
    return torch.stack(read).permute(0, 3, 1, 2)


def crops_of(pixels: torch.Tensor, boxes: Sequence[torch.Tensor]) -> torch.Tensor:
    if pixels.device.type == "cuda":
        from torchvision.ops import roi_align

        owners = torch.repeat_interleave(torch.arange(len(boxes)), torch.tensor([len(b) for b in boxes]))
        rows = torch.cat((owners.unsqueeze(1), torch.cat(list(boxes))), 1).half().to(pixels.device)
        return roi_align(pixels.half(), rows, (SIDE, SIDE), sampling_ratio=2, aligned=True)
    parts = []
    for picture, listed in zip(pixels, boxes, strict=True):
        for x1, y1, x2, y2 in listed.round().int().clamp(min=0).tolist():
            part = picture[:, y1 : max(y2, y1 + 1), x1 : max(x2, x1 + 1)].unsqueeze(0).float()
            parts.append(torch.nn.functional.interpolate(part, (SIDE, SIDE), mode="bilinear"))
    return torch.cat(parts)


def built(folder: Path) -> Any:
    """The module that the server has, too."""
    spec = importlib.util.spec_from_file_location(f"model_{folder.name}", folder / "1" / "model.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # torch.compile looks there for it
    spec.loader.exec_module(module)
    network = module.build()
    if torch.cuda.is_available():
        network = network.cuda().half().to(memory_format=torch.channels_last)
    return network


def forwards(repository: Path, network: str, *, compiled: bool) -> tuple[Forward, Forward]:
    finder, namer = built(repository / FINDER), built(repository / network)
    device = next(namer.parameters()).device
    kept = KeptBoxes(BoxForm("yolov8", ("raw",), "kept", 0.5, 0.6, True, 8))
    mean = torch.tensor(MEAN, device=device).view(1, 3, 1, 1)
    std = torch.tensor(STD, device=device).view(1, 3, 1, 1)

    def whole(values: torch.Tensor) -> torch.Tensor:
        like = next(namer.parameters()).dtype
        return values.to(like).contiguous(memory_format=torch.channels_last)

    def raw(pixels: torch.Tensor) -> torch.Tensor:
        answer: torch.Tensor = finder(whole(pixels / 255))
        return answer

    def classes(pixels: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = namer(whole((pixels.float() / 255 - mean) / std)).float()
        best = scores.softmax(1).topk(5)
        return torch.cat((best.values, best.indices.float()), 1)

    if compiled:
        raw, classes = torch.compile(raw, dynamic=False), torch.compile(classes, dynamic=False)
    return (lambda pixels: kept({"raw": raw(pixels)})["kept"]), classes


def measured(workers: Sequence[Alone], seconds: float) -> float:
    """Pictures per second, of all of them at once."""
    counts = [0] * len(workers)
    go, stop = threading.Barrier(len(workers) + 1), threading.Event()

    def work(number: int) -> None:
        one = workers[number]
        with torch.cuda.stream(one.stream), torch.inference_mode():
            one.step()
            go.wait()
            while not stop.is_set():
                counts[number] += one.step()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(len(workers))]
    for thread in threads:
        thread.start()
    go.wait()
    began = time.perf_counter()
    time.sleep(seconds)
    stop.set()
    for thread in threads:
        thread.join()
    return sum(counts) / (time.perf_counter() - began)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("repository", type=Path)
    parser.add_argument("network")
    parser.add_argument("photos", type=Path, nargs="+")
    parser.add_argument("--pictures", type=int, default=64, help="in a batch")
    parser.add_argument("--crops", type=int, default=128, help="in a batch, at most")
    parser.add_argument("--threads", type=int, default=3)
    parser.add_argument("--eager", action="store_true")
    given = parser.parse_args()
    read = [torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8) for path in given.photos]
    files = (read * (given.pictures // len(read) + 1))[: given.pictures]
    both = forwards(given.repository, given.network, compiled=not given.eager)
    workers = [Alone(both, files, given.crops) for _ in range(given.threads)]
    print("ready", flush=True)
    for line in sys.stdin:
        seconds, threads = line.split()
        found = measured(workers[: int(threads)], float(seconds))
        print(json.dumps({"pictures_per_s": round(found, 1), "threads": int(threads)}), flush=True)


if __name__ == "__main__":
    main()
