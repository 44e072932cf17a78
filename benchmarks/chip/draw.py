"""The operating curves of `gpu.json`, drawn: images per second against the 99th percentile.

python -m chip.draw OUT.png GPU.json…
"""

import json
import sys
from pathlib import Path
from typing import Any

COLOURS = {"jpeg": "#f58518", "tensor": "#4c78a8", "shared": "#54a24b"}
NAMES = {
    "jpeg": "JPEG 640×480 over HTTP",
    "tensor": "uint8 tensors over HTTP",
    "shared": "uint8 in shared memory",
}
TITLES = {"resnet50": "ResNet-50", "vit_b_16": "ViT-B/16"}


def points(rows: list[dict[str, Any]], what: str) -> list[tuple[float, float, str]]:
    """Closed loops only, by their number of clients; with the short promise where there is no other."""
    found: dict[int, dict[str, Any]] = {}
    for name in (f"light {what}", what, f"within 50 ms, {what}"):
        for row in rows:
            if row["what"] == name and row["concurrency"]:
                found.setdefault(row["concurrency"], row)
    return [(row["images_per_s"], row["p99_ms"], str(clients)) for clients, row in sorted(found.items())]


def main() -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    target, *files = map(Path, sys.argv[1:])
    networks = {
        name: found["rows"]
        for file in files
        for name, found in json.loads(file.read_text()).items()
        if isinstance(found, dict) and "rows" in found
    }
    figure, all_axes = plt.subplots(1, len(networks), figsize=(6.2 * len(networks), 4.4), squeeze=False)
    for axes, (network, rows) in zip(all_axes[0], networks.items(), strict=True):
        for what, colour in COLOURS.items():
            listed = points(rows, what)
            axes.plot([p[0] for p in listed], [p[1] for p in listed], "o-", color=colour, label=NAMES[what])
            for rate, p99, clients in listed:
                axes.annotate(clients, (rate, p99), textcoords="offset points", xytext=(4, 5), fontsize=8)
        axes.set_title(f"{TITLES.get(network, network)}, fp16")
        axes.set_xlabel("images per second")
        axes.set_ylabel("p99, ms")
        axes.set_ylim(bottom=0)
        axes.set_xlim(left=0)
        axes.grid(alpha=0.3)
        axes.legend(frameon=False, fontsize=9)
    figure.tight_layout()
    figure.savefig(target, dpi=110)


if __name__ == "__main__":
    main()
