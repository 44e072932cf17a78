"""The peers' own environments: made once by `overhead.py --setup`, found again by later runs."""

import os
import subprocess
import sys
from pathlib import Path

_RUNTIME = ("numpy", "onnxruntime")
FASTAPI_PACKAGES = ("fastapi", "uvicorn[standard]", *_RUNTIME)
VISION_PACKAGES = (*FASTAPI_PACKAGES, "opencv-python-headless")
TRITON_PACKAGES = ("nvidia-pytriton", *_RUNTIME)
DEBIAN_PYTHON = Path("/usr/bin/python3")


class SetupError(Exception):
    """A peer's environment could not be made."""


def default_dir() -> Path:
    """$CARPOOL_PEERS, or a folder in the user's cache."""
    given = os.environ.get("CARPOOL_PEERS")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(given) if given else cache / "carpool" / "peers"


def fastapi_python(peers_dir: Path) -> Path:
    return peers_dir / "venv-fastapi" / "bin" / "python"


def vision_python(peers_dir: Path) -> Path:
    return peers_dir / "venv-fastapi-vision" / "bin" / "python"


def make_vision(peers_dir: Path) -> None:
    """What `vision.py` compares with."""
    _make_venv(peers_dir / "venv-fastapi-vision", Path(sys.executable), VISION_PACKAGES)


class TritonInstall:
    """Where things lie inside the nvidia-pytriton wheel, and what tritonserver needs to find them."""

    def __init__(self, peers_dir: Path) -> None:
        self._venv = peers_dir / "venv-pytriton"
        found = sorted(self._venv.glob("lib/python3*/site-packages"))
        self._packages = found[0] if found else self._venv / "absent"
        self._root = self._packages / "pytriton" / "tritonserver"
        self._python = self._packages.parent.name.removeprefix("python")

    @property
    def server(self) -> Path:
        return self._root / "bin" / "tritonserver"

    @property
    def stub(self) -> Path:
        """The program that runs a Python model; there is one for each Python version."""
        return self._root / "python_backend_stubs" / self._python / "triton_python_backend_stub"

    @property
    def env(self) -> dict[str, str]:
        return {
            "PATH": f"{self._venv / 'bin'}:{os.environ.get('PATH', '')}",
            "PYTHONPATH": str(self._packages),
            "LD_LIBRARY_PATH": str(self._packages / "nvidia_pytriton.libs"),
        }

    def link_backend(self, folder: Path) -> None:
        """Lay out the Python backend as tritonserver wants it, with the stub beside the library."""
        folder.mkdir(parents=True)
        for file in (self._root / "backends" / "python").iterdir():
            if file.is_file():
                (folder / file.name).symlink_to(file)
        (folder / self.stub.name).symlink_to(self.stub)


def missing(peers_dir: Path) -> list[str]:
    """The peers that are not set up in this folder."""
    triton = TritonInstall(peers_dir)
    absent = []
    if not fastapi_python(peers_dir).exists():
        absent.append("fastapi")
    if not (triton.server.exists() and triton.stub.exists()):
        absent.append("triton")
    return absent


def make(peers_dir: Path, peer_python: Path | None) -> None:
    """Make both environments. Triton's stub needs the shared libpython of a system interpreter."""
    _make_venv(peers_dir / "venv-fastapi", Path(sys.executable), FASTAPI_PACKAGES)
    python = peer_python or (DEBIAN_PYTHON if DEBIAN_PYTHON.exists() else Path(sys.executable))
    _check_libpython(python)
    _make_venv(peers_dir / "venv-pytriton", python, TRITON_PACKAGES)
    if absent := missing(peers_dir):
        raise SetupError(f"still missing after the installation: {', '.join(absent)}")


def _check_libpython(python: Path) -> None:
    find = "ctypes.util.find_library('python%d.%d' % sys.version_info[:2])"
    code = f"import ctypes.util, sys; sys.exit(not {find})"
    if subprocess.run([python, "-c", code], capture_output=True, check=False).returncode != 0:
        raise SetupError(
            f"the system has no shared libpython for {python}; Triton's Python backend is linked to it: "
            "install it (Debian and Ubuntu: apt install libpython3-dev) or name another interpreter with "
            "--peer-python"
        )


def _make_venv(folder: Path, python: Path, packages: tuple[str, ...]) -> None:
    """A venv without pip in it (not every system Python can bootstrap one); this pip installs into it."""
    print(f"{folder}: {', '.join(packages)}", file=sys.stderr, flush=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    _run([str(python), "-m", "venv", "--clear", "--without-pip", str(folder)])
    pip = [sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python"), "install", "--quiet"]
    _run([*pip, "--disable-pip-version-check", *packages])


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SetupError(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
