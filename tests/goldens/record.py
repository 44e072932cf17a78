"""Writes the goldens anew, when they are meant to change: `PYTHONPATH=tests python -m goldens.record`.

Read the difference before it is committed: whatever goes away or changes here is something that users had.
"""

from __future__ import annotations

import json
from pathlib import Path

from goldens import names, simulations

HERE = Path(__file__).parent


def main() -> None:
    runs = {seed: simulations.printed(seed) for seed in simulations.SEEDS}
    hashes = {str(seed): simulations.digest(text) for seed, text in runs.items()}
    _write("simulations.json", hashes)
    for seed in simulations.WHOLE:
        (HERE / f"simulation_{seed}.json").write_text(runs[seed], "utf-8")
    _write("names.json", names.public_names())


def _write(name: str, found: object) -> None:
    (HERE / name).write_text(json.dumps(found, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
