"""An environment of its own with TensorFlow and transformers over the packages of .venv: there the tests of
backends run against the libraries themselves, and benchmarks/zoo.py finds those whose exports it inspects.

    make engines     installs it, once, and runs tests/backends in it
"""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path

from conformance import environment

PACKAGES = ("tensorflow-cpu==2.21.0", "transformers==5.23.0", "skl2onnx==1.20.0")
ALONE = ("timm==1.0.31",)
"""Without what they depend on: it would bring another PyTorch."""
BESIDE = ("torchvision==0.28.0",)
"""In a folder `beside` that only the zoo looks into: transformers would use it, and a torchvision that was
built for GPUs cannot be imported beside a PyTorch for CPUs."""
_NAME = "engines"


def install() -> Path:
    """Its interpreter."""
    beside = ("--no-deps", "--upgrade", "--target", str(environment.FOLDER / _NAME / "beside"), *BESIDE)
    runs = (PACKAGES, ("--no-deps", *ALONE), beside)
    what = "TensorFlow and transformers"
    return environment.install(_NAME, what, *runs, before=look_into_ours) / "bin" / "python"


def look_into_ours(folder: Path) -> None:
    """Our packages come after its own, those that were installed to be edited too."""
    asked = (str(folder / "bin" / "python"), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))")
    ours = sysconfig.get_path("purelib")
    file = Path(environment.run(*asked).strip(), "of_carpool.pth")
    file.write_text(f"import site; site.addsitedir({ours!r})\n")


if __name__ == "__main__":
    sys.stdout.write(f"{install()}\n")
