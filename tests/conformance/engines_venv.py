"""An environment of its own with TensorFlow and transformers over the packages of .venv: there the tests of
backends run against the libraries themselves, and benchmarks/zoo.py finds those whose exports it inspects.

    make engines     installs it, once, and runs tests/backends in it
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path

PACKAGES = ("tensorflow-cpu==2.21.0", "transformers==5.23.0", "skl2onnx==1.20.0")
ALONE = ("timm==1.0.31",)
"""Without what they depend on: it would bring another PyTorch."""
BESIDE = ("torchvision==0.28.0",)
"""In a folder `beside` that only the zoo looks into: transformers would use it, and a torchvision that was
built for GPUs cannot be imported beside a PyTorch for CPUs."""
FOLDER = Path(__file__).parents[2] / ".venv" / "conformance" / "engines"
_INSTALL_S = 1800.0


def install(folder: Path = FOLDER) -> Path:
    """Its interpreter."""
    python, done = folder / "bin" / "python", folder / ".installed"
    wanted = " ".join((*PACKAGES, *ALONE, *BESIDE))
    if done.is_file() and done.read_text() == wanted:
        return python
    quiet = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    try:
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True, timeout=_INSTALL_S)
        _look_into_ours(python)
        subprocess.run([*quiet, *PACKAGES], check=True, timeout=_INSTALL_S)
        subprocess.run([*quiet, "--no-deps", *ALONE], check=True, timeout=_INSTALL_S)
        beside = ["--no-deps", "--upgrade", "--target", str(folder / "beside")]
        subprocess.run([*quiet, *beside, *BESIDE], check=True, timeout=_INSTALL_S)
    except subprocess.SubprocessError as error:
        sys.exit(f"engines: TensorFlow and transformers could not be installed: {error}")
    done.write_text(wanted)
    return python


def _look_into_ours(python: Path) -> None:
    """Our packages come after its own, those that were installed to be edited too."""
    asked = [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    found = subprocess.run(asked, check=True, capture_output=True, text=True, timeout=_INSTALL_S)
    ours = sysconfig.get_path("purelib")
    Path(found.stdout.strip(), "of_carpool.pth").write_text(f"import site; site.addsitedir({ours!r})\n")


if __name__ == "__main__":
    sys.stdout.write(f"{install()}\n")
