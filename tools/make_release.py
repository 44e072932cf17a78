"""`make release`: sdist and wheel in dist/, built twice and found equal, checked, installed into an empty
environment, tried, and taken off again; with a list of all that an installation brings along.

    python tools/make_release.py                  # everything
    python tools/make_release.py --skip-install   # build and check only
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
import venv
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DIST = ROOT / "dist"
APART = ("onnxruntime", "numpy", "opencv-python-headless")  # what every such server has
_READY_S = 180.0
_WORKS = ("PATH", "HOME", "LANG", "TMPDIR", "PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_CONFIG_FILE")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--skip-install", action="store_true", help="build and check only")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="carpool-release-") as folder:
        built = build_twice(Path(folder))
        sizes = ", ".join(f"{path.name} {megabytes(path.stat().st_size)}" for path in built)
        say(f"built twice, equal: {sizes}")
        run([tool("twine"), "check", "--strict", *map(str, built)])
        shutil.rmtree(DIST, ignore_errors=True)
        DIST.mkdir()
        for path in built:
            shutil.copy2(path, DIST)
        (DIST / "SHA256SUMS").write_text("".join(f"{digest(path)}  {path.name}\n" for path in built))
        if not arguments.skip_install:
            wheel = next(path for path in built if path.suffix == ".whl")
            try_wheel(wheel, Path(folder))
    return 0


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def megabytes(size: float) -> str:
    return f"{size / 1e6:.1f} MB"


def tool(name: str) -> str:
    """Of the environment that runs this file."""
    return str(Path(sys.executable).parent / name)


def run(command: Sequence[str], **more: str) -> str:
    environment = {**os.environ, **more}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


# ── build ──


def build_twice(folder: Path) -> list[Path]:
    """From what is committed, in two places, with the time of the last commit for all files."""
    at = run(["git", "log", "-1", "--format=%ct"]).strip()
    both = []
    for number in ("first", "second"):
        source, out = folder / number / "source", folder / number / "dist"
        source.mkdir(parents=True)
        archive = folder / f"{number}.tar"
        run(["git", "archive", "--format=tar", "-o", str(archive), "HEAD"])
        shutil.unpack_archive(archive, source, filter="data")
        build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(source)]
        run(build, SOURCE_DATE_EPOCH=at)
        both.append(sorted(out.iterdir()))
    for one, other in zip(*both, strict=True):
        if (one.name, digest(one)) != (other.name, digest(other)):
            raise SystemExit(f"{one.name} differs from build to build")
    return both[0]


# ── the wheel, tried ──


def try_wheel(wheel: Path, folder: Path) -> None:
    place = folder / "empty"
    venv.create(place, with_pip=True)
    python = str(place / "bin" / "python")
    environment = {name: value for name, value in os.environ.items() if name in _WORKS}
    before = files_in(place)
    began = time.monotonic()
    run([python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", str(wheel)])
    say(f"installed in {time.monotonic() - began:.0f} s")
    tell_sizes(python)
    command = str(place / "bin" / "carpool")
    say(run([command, "--version"]).strip())
    with served(command, folder, environment) as url:
        picture = next(place.rglob("demo/pictures/astronaut.jpg")).read_bytes()
        request = urllib.request.Request(f"{url}/detect", picture, {"Content-Type": "image/jpeg"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            found = json.load(answer)["detections"]
    labels = [one["label"] for one in found]
    if "person" not in labels:
        raise SystemExit(f"the demo did not find the person: {labels}")
    say(f"served the demo, which found {', '.join(labels)}")
    write_bill(python)
    run([python, "-m", "pip", "uninstall", "--quiet", "--yes", "carpool"])
    left = [path for path in files_in(place) - before if "carpool" in path and "__pycache__" not in path]
    if left:
        raise SystemExit(f"left behind after pip uninstall: {', '.join(sorted(left)[:10])}")
    say("uninstalled, and nothing of it is left")


def files_in(place: Path) -> set[str]:
    return {str(path.relative_to(place)) for path in place.rglob("*") if path.is_file()}


def tell_sizes(python: str) -> None:
    """What is installed, and how much of it every such server has."""
    code = (
        "import importlib.metadata as m, json\n"
        "print(json.dumps({d.name: sum(f.size or 0 for f in d.files or ()) for d in m.distributions()}))"
    )
    sizes: dict[str, int] = json.loads(run([python, "-c", code]))
    apart = sum(sizes.get(name, 0) for name in APART)
    rest = sum(sizes.values()) - apart - sizes.get("pip", 0) - sizes.get("setuptools", 0)
    largest = sorted(sizes.items(), key=lambda item: -item[1])
    say(f"{megabytes(rest)} besides {', '.join(APART)} ({megabytes(apart)}); the largest parts:")
    for name, size in [item for item in largest if item[0] not in APART][:6]:
        say(f"  {name:<24} {megabytes(size)}")


@contextmanager
def served(command: str, folder: Path, environment: dict[str, str]) -> Iterator[str]:
    cache = {"CARPOOL_CACHE_DIR": str(folder / "cache"), "CARPOOL_STATE_DIR": str(folder / "state")}
    ports = ["--http-port", "28470", "--grpc-port", "28471", "--metrics-port", "28472"]
    log = folder / "serve.log"
    with log.open("wb") as file:
        process = subprocess.Popen(
            [command, "serve", *ports], cwd=folder, env={**environment, **cache},
            stdout=file, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            url = "http://127.0.0.1:28470"
            wait_ready(process, url, log)
            yield url
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                raise SystemExit("the server did not stop within 30 s") from None


def wait_ready(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    end = time.monotonic() + _READY_S
    while time.monotonic() < end:
        if process.poll() is not None:
            break
        try:
            with urllib.request.urlopen(f"{url}/v2/health/ready", timeout=5):
                return
        except OSError:
            time.sleep(0.2)
    raise SystemExit(f"it did not get ready:\n{log.read_text('utf-8', 'replace')[-2000:]}")


def write_bill(python: str) -> None:
    """CycloneDX: every package of the installation with its version and licence."""
    bill = DIST / "carpool.cdx.json"
    run([tool("cyclonedx-py"), "environment", python, "--output-format", "JSON", "-o", str(bill)])
    parts = json.loads(bill.read_text())["components"]
    unknown = [part["name"] for part in parts if not part.get("licenses")]
    say(
        f"{bill.name}: {len(parts)} packages"
        + (f"; without a licence: {', '.join(unknown)}" if unknown else "")
    )


if __name__ == "__main__":
    sys.exit(main())
