"""The peers' own environments: made once by a benchmark's `--setup`, found again by later runs."""

import os
import subprocess
import sys
from pathlib import Path

_RUNTIME = ("numpy", "onnxruntime")
FASTAPI_PACKAGES = ("fastapi", "uvicorn[standard]", *_RUNTIME)
VISION_PACKAGES = (*FASTAPI_PACKAGES, "opencv-python-headless")
TRITON_PACKAGES = ("nvidia-pytriton", *_RUNTIME)
BENTOML_PACKAGES = ("bentoml", "numpy")
MOSEC_PACKAGES = ("mosec", *_RUNTIME)
LITSERVE_PACKAGES = ("litserve", "python-multipart", "numpy")
OVERHEAD_PEERS = ("fastapi", "triton", "mosec")
OVERLOAD_PEERS = ("fastapi", "triton", "bentoml", "litserve")
DEBIAN_PYTHON = Path("/usr/bin/python3")


class SetupError(Exception):
    """A peer's environment could not be made."""


def default_dir() -> Path:
    """$CARPOOL_PEERS, or a folder in the user's cache."""
    given = os.environ.get("CARPOOL_PEERS")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return Path(given) if given else cache / "carpool" / "peers"


def peer_python(peers_dir: Path, peer: str) -> Path:
    return peers_dir / f"venv-{peer}" / "bin" / "python"


def fastapi_python(peers_dir: Path) -> Path:
    return peer_python(peers_dir, "fastapi")


def vision_python(peers_dir: Path) -> Path:
    return peer_python(peers_dir, "fastapi-vision")


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


def is_there(peers_dir: Path, peer: str) -> bool:
    if peer == "triton":
        triton = TritonInstall(peers_dir)
        return triton.server.exists() and triton.stub.exists()
    return peer_python(peers_dir, peer).exists()


def missing(peers_dir: Path) -> list[str]:
    """The peers of `overhead.py` that are not set up in this folder."""
    return [peer for peer in OVERHEAD_PEERS if not is_there(peers_dir, peer)]


def why_missing(peers_dir: Path, peer: str) -> str | None:
    """None for a peer that is set up; else why not, as far as the last attempt could tell."""
    if is_there(peers_dir, peer):
        return None
    note = _note(peers_dir, peer)
    return note.read_text().strip() if note.exists() else "not set up: run it with --setup"


def make(peers_dir: Path, system_python: Path | None) -> None:
    """The environments of `overhead.py`."""
    for peer in OVERHEAD_PEERS:
        _make_peer(peers_dir, peer, system_python)
    if absent := missing(peers_dir):
        raise SetupError(f"still missing after the installation: {', '.join(absent)}")


def make_overload(peers_dir: Path, system_python: Path | None) -> None:
    """What `overload.py` compares with and is not there yet. Who cannot be installed is noted, not fatal."""
    for peer in OVERLOAD_PEERS:
        note = _note(peers_dir, peer)
        note.unlink(missing_ok=True)
        if is_there(peers_dir, peer):
            continue
        try:
            _make_peer(peers_dir, peer, system_python)
            if not is_there(peers_dir, peer):
                raise SetupError(f"{peer} is still missing after the installation")
        except SetupError as error:
            peer_python(peers_dir, peer).unlink(missing_ok=True)  # half an environment is none
            lines = [line for line in str(error).splitlines() if line.strip()]
            note.write_text(f"could not be installed: {lines[-1][:300]}\n")
            print(f"{peer} {note.read_text().strip()}", file=sys.stderr, flush=True)


def _note(peers_dir: Path, peer: str) -> Path:
    return peers_dir / f"{peer}.failed"


def _make_peer(peers_dir: Path, peer: str, system_python: Path | None) -> None:
    """Triton's stub needs the shared libpython of a system interpreter; the others take ours."""
    if peer == "triton":
        python = system_python or (DEBIAN_PYTHON if DEBIAN_PYTHON.exists() else Path(sys.executable))
        _check_libpython(python)
        _make_venv(peers_dir / "venv-pytriton", python, TRITON_PACKAGES)
        return
    packages = {
        "fastapi": FASTAPI_PACKAGES,
        "mosec": MOSEC_PACKAGES,
        "bentoml": BENTOML_PACKAGES,
        "litserve": LITSERVE_PACKAGES,
    }
    _make_venv(peers_dir / f"venv-{peer}", Path(sys.executable), packages[peer])


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
