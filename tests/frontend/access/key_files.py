"""Key files as an operator writes them."""

from __future__ import annotations

from pathlib import Path

ALICE, BOB, ROOT = "alice-0123456789", "bob-0123456789ab", "root-0123456789a"


def write(path: Path, text: str, mode: int = 0o600) -> str:
    path.write_text(text)
    path.chmod(mode)
    return str(path)


def api_keys(folder: Path) -> str:
    return write(
        folder / "api", f"# who may ask\nalice {ALICE}\n\nbob {BOB} priority=3 models=image,echo-*\n"
    )


def admin_keys(folder: Path) -> str:
    return write(folder / "admin", f"root {ROOT}\n")
