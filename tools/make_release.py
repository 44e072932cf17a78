"""`make release`: sdist and wheels in dist/, built twice and found equal, checked; each form put into an
empty environment, tried, and taken off again; with a list of all that an installation brings along.

    python tools/make_release.py                  # everything
    python tools/make_release.py --skip-install   # build and check only

The compiled wheel is for this machine's Python and processor. Without a C compiler it is left out.
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
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
DIST = ROOT / "dist"
APART = ("onnxruntime", "numpy", "opencv-python-headless")  # what every such server has, and what these need
MOST_MB = 56.0  # besides those: docs/limits.md says what of
COMPILED_MB = 12.0  # what the compiled form may have more
MODELS = {  # in the wheels; docs/models.md and a README in each folder say where they come from
    "models/nanodet": "Apache-2.0",
    "models/efficientnet_lite0": "Apache-2.0",
    "models/open_nsfw": "Apache-2.0 AND BSD-2-Clause AND MIT",
    "models/u2netp": "MIT",
    "ocr/line_reader": "Apache-2.0",
    "ocr/text_finder": "Apache-2.0",
    "reader": "Apache-2.0",
    "rollout": "Apache-2.0",
}
UNSAID = {"protobuf": "BSD-3-Clause"}  # licences that a package has only in words of its own
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
            for wheel in (
                path for path in built if path.name.startswith("carpool-") and path.suffix == ".whl"
            ):
                try_wheel(Path(folder) / wheel.stem, wheel)
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
        run(["tar", "-xf", str(archive), "-C", str(source)])  # Python's own asks for a filter from 3.11.4 on
        build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out)]
        run([*build, str(source)], SOURCE_DATE_EPOCH=at)
        run([*build, "--wheel", str(source / "tools" / "demos")], SOURCE_DATE_EPOCH=at)
        if not missing():
            run([*build, "--wheel", str(source)], SOURCE_DATE_EPOCH=at, HATCH_BUILD_HOOK_ENABLE_CUSTOM="1")
        both.append(sorted(out.iterdir()))
    if missing():
        say(f"LEFT OUT: the compiled wheel: {missing()}")
    for one, other in zip(*both, strict=True):
        if (one.name, digest(one)) != (other.name, digest(other)):
            raise SystemExit(f"{one.name} differs from build to build")
    return both[0]


@cache
def missing() -> str:
    """What compiling needs and this machine does not have."""
    look = [sys.executable, str(ROOT / "tools" / "compile_modules.py")]
    return subprocess.run(look, capture_output=True, text=True, check=False).stderr.strip()


# ── a wheel, tried ──


def try_wheel(folder: Path, wheel: Path) -> None:
    folder.mkdir()
    place = folder / "empty"
    [demos] = DIST.glob("carpool_demos-*.whl")
    form = "interpreted" if wheel.stem.endswith("-none-any") else "compiled"
    venv.create(place, with_pip=True)
    python = str(place / "bin" / "python")
    environment = {name: value for name, value in os.environ.items() if name in _WORKS}
    before = files_in(place)
    began = time.monotonic()
    install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    run([*install, str(wheel)])
    say(f"{wheel.name} installed in {time.monotonic() - began:.0f} s")
    check_sizes(python, MOST_MB + COMPILED_MB * (form == "compiled"))
    command = str(place / "bin" / "carpool")
    version = run([command, "--version"]).splitlines()[0]
    say(version)
    if not version.endswith(f"({form})"):
        raise SystemExit(f"that is not the {form} form")
    [pictures] = place.rglob("demo/pictures")
    began = time.monotonic()
    with served(command, folder, environment) as url:
        found = [one["label"] for one in ask(f"{url}/detect", pictures / "astronaut.jpg")["detections"]]
        say(f"the demo found {', '.join(found)} {time.monotonic() - began:.1f} s after its start")
    run([*install, "--no-deps", str(demos)])
    with served(command, folder, environment) as url:
        best = ask(f"{url}/classify", pictures / "chelsea.jpg")["classes"][0]["label"]
        say(f"{demos.name} beside it, whose classifier says {best}")
    if "person" not in found or "cat" not in best:
        raise SystemExit("the person or the cat was not found")
    write_bill(python, pictures.parent)
    run([python, "-m", "pip", "uninstall", "--quiet", "--yes", "carpool-demos", "carpool"])
    left = [path for path in files_in(place) - before if "carpool" in path and "__pycache__" not in path]
    if left:
        raise SystemExit(f"left behind after pip uninstall: {', '.join(sorted(left)[:10])}")
    say("uninstalled, and nothing of it is left")


def files_in(place: Path) -> set[str]:
    return {str(path.relative_to(place)) for path in place.rglob("*") if path.is_file()}


def ask(url: str, picture: Path) -> Any:
    request = urllib.request.Request(url, picture.read_bytes(), {"Content-Type": "image/jpeg"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def check_sizes(python: str, most: float) -> None:
    """A table of what is installed besides what every such server has; too much of it is an error."""
    code = (
        "import importlib.metadata as m, json, re\n"
        "def size(d): return sum(file.size or 0 for file in d.files or ())\n"
        "def needs(d): return [line for line in d.requires or () if 'extra ==' not in line]\n"
        "def names(d): return [re.match('[A-Za-z0-9_.-]+', line)[0].lower() for line in needs(d)]\n"
        "print(json.dumps({d.name.lower(): (size(d), names(d)) for d in m.distributions()}))"
    )
    parts: dict[str, tuple[int, list[str]]] = json.loads(run([python, "-c", code]))
    apart = {"pip", "setuptools"}
    looked = list(APART)
    while looked:
        name = looked.pop()
        if name not in apart and name in parts:
            apart.add(name)
            looked += parts[name][1]
    rest = {name: size for name, (size, _) in parts.items() if name not in apart}
    total = sum(rest.values()) / 1e6
    say(f"{total:.1f} MB besides {', '.join(APART)} and what these need:")
    for name, size in sorted(rest.items(), key=lambda item: -item[1]):
        say(f"  {name:<24} {megabytes(size):>8}")
    if total > most:
        raise SystemExit(f"that is more than {most} MB: has a dependency or a model come along?")


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


def write_bill(python: str, demo: Path) -> None:
    """CycloneDX: every package of the installation and every model in it, with version and licence."""
    file = DIST / "carpool.cdx.json"
    run(
        [
            tool("cyclonedx-py"),
            "environment",
            python,
            "--output-reproducible",
            "--of",
            "JSON",
            "-o",
            str(file),
        ]
    )
    bill = json.loads(file.read_text())
    parts = bill["components"]
    for part in parts:
        if part["name"] in UNSAID:
            part.setdefault("licenses", [{"license": {"id": UNSAID[part["name"]]}}])
    weights = [path for path in demo.rglob("*") if path.suffix in (".onnx", ".safetensors")]
    models = {str(path.parents[1].relative_to(demo)): path for path in sorted(weights)}
    parts += [
        {
            "type": "machine-learning-model", "bom-ref": f"model:{name}",
            "name": name, "version": path.parent.name,
            "hashes": [{"alg": "SHA-256", "content": digest(path)}],
            "licenses": [{"expression": MODELS[name]}] if name in MODELS else [],
        }
        for name, path in models.items()
    ]  # fmt: skip
    if unknown := [part["name"] for part in parts if not part.get("licenses")]:
        raise SystemExit(f"without a licence: {', '.join(unknown)}")
    file.write_text(json.dumps(bill, indent=2) + "\n")
    say(f"{file.name}: {len(parts) - len(models)} packages and {len(models)} models, each with its licence")


if __name__ == "__main__":
    sys.exit(main())
