"""Finds what a server would find on this machine: packages, engines, devices, limits, folders and ports, and
what is wrong with them. Nothing is changed, and what may crash when it is imported is imported elsewhere."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import socket
import subprocess
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import StrEnum
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

from carpool import __version__, extensions
from carpool.compiling import form, other_form
from carpool.config.backend_kinds import BackendKind, kinds
from carpool.config.control_groups import memory_limit
from carpool.config.server import ServerSettings, server_settings
from carpool.config.usable_cores import usable_cores
from carpool.engine.profile.hardware import gpu_count, hardware
from carpool.errors import CarpoolError
from carpool.extension import importable

_IMPORT_S = 60.0
_ENOUGH_DESCRIPTORS = 4096
_LITTLE_DISK = 2 << 30
_SHOW_CUDA = (
    "import torch; print(' '.join(['CUDA', str(torch.version.cuda), "
    "*(torch.cuda.get_device_name(n).replace(' ', '_') for n in range(torch.cuda.device_count()))]) "
    "if torch.cuda.is_available() else 'no CUDA')"
)


class State(StrEnum):
    FINE = "fine"
    ABSENT = "absent"  # and not required
    NOTE = "note"
    WRONG = "wrong"


@dataclass(frozen=True, slots=True)
class Finding:
    """`advice` says what would change it, where something is amiss."""

    area: str
    name: str
    state: State
    says: str
    advice: str = ""


def check_machine(environ: Mapping[str, str] | None = None) -> list[Finding]:
    environ = os.environ if environ is None else environ
    settings, found = _settings(environ)
    seen = [*_carpool(), *_engines(), *_devices(), *_limits(), *_folders(settings), *_ports(settings)]
    return [*seen, *_extensions(settings, environ), *found]


def _settings(environ: Mapping[str, str]) -> tuple[ServerSettings, list[Finding]]:
    given = sorted(name for name in environ if name.startswith("CARPOOL_"))
    try:
        settings, warnings = server_settings(environ=environ)
    except CarpoolError as error:
        return ServerSettings(), [Finding("settings", "environment", State.WRONG, error.message)]
    says = ", ".join(given) or "no CARPOOL_ variable is set"
    found = [Finding("settings", "environment", State.FINE, says)]
    return settings, found + [Finding("settings", "environment", State.NOTE, one) for one in warnings]


def _carpool() -> Iterator[Finding]:
    where = Path(__file__).resolve().parents[1]
    yield Finding("carpool", "version", State.FINE, f"{__version__}, in {where}")
    yield Finding("carpool", "form", State.FINE, f"{form()}; {other_form()}")
    yield _python()
    if sys.platform != "linux":
        yield Finding("carpool", "system", State.WRONG, sys.platform, "serving needs Linux")
    for name in _needed():
        try:
            version(name)
        except PackageNotFoundError:
            yield Finding("carpool", name, State.WRONG, "is not installed", f"pip install {name}")


def _python() -> Finding:
    """Names the interpreter, and notes one that was built without optimizations. Debian's and Ubuntu's are
    optimized without the flag, and have an install scheme that no other has."""
    says = f"{platform.python_implementation()} {platform.python_version()}, {platform.machine()}"
    flags = sysconfig.get_config_var("CONFIG_ARGS") or ""
    if not flags or "--enable-optimizations" in flags or "deb_system" in sysconfig.get_scheme_names():
        return Finding("carpool", "python", State.FINE, f"{says}, {sys.executable}")
    advice = (
        "a tenth more requests/s: use your distribution's Python, or build it with --enable-optimizations "
        "(pyenv: PYTHON_CONFIGURE_OPTS='--enable-optimizations --with-lto')"
    )
    says = f"{says}, built without optimizations, {sys.executable}"
    return Finding("carpool", "python", State.NOTE, says, advice)


def _needed() -> list[str]:
    """Returns what Carpool cannot do without. A folder that was never installed does not say."""
    try:
        lines = requires("carpool") or []
    except PackageNotFoundError:
        return []
    needed = [line for line in lines if "extra ==" not in line]
    return [line.split(";")[0].split(">")[0].split("<")[0].split("=")[0].strip() for line in needed]


def _engines() -> list[Finding]:
    """Each is imported in a process of its own: a broken one may take that with it."""
    known = [kind for kind in kinds().values() if kind.home and kind.package]
    with ThreadPoolExecutor(max(1, usable_cores())) as pool:
        return list(pool.map(_engine, known))


def _engine(kind: BackendKind) -> Finding:
    if not importable(kind.imports):
        return Finding("engines", kind.name, State.ABSENT, "is not installed", _how_to_get(kind))
    try:
        found = version(kind.package)
    except PackageNotFoundError:
        found = "of an unknown version"
    code = _SHOW_CUDA if kind.imports == "torch" else f"import {kind.imports}"
    done, said = _run(code)
    if not done:
        last = said.strip().splitlines()[-1:] or ["it ended without a message"]
        return Finding(
            "engines", kind.name, State.WRONG, f"{kind.package} {found}: {last[0][:200]}", _how_to_get(kind)
        )
    devices = said.strip().replace("_", " ")
    if devices == "no CUDA" and gpu_count():
        return Finding(
            "engines", kind.name, State.WRONG, f"{kind.package} {found} sees no GPU, and the machine has one",
            "install a build of torch for this driver's CUDA, and let the container see the GPU",
        )  # fmt: skip
    return Finding(
        "engines", kind.name, State.FINE, f"{kind.package} {found}" + (f", {devices}" if devices else "")
    )


def _how_to_get(kind: BackendKind) -> str:
    return f"pip install 'carpool[{kind.extra}]'" if kind.extra else f"pip install {kind.package}"


def _run(code: str) -> tuple[bool, str]:
    try:
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=_IMPORT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return False, f"it was not imported within {_IMPORT_S:.0f} s"
    return done.returncode == 0, done.stdout if done.returncode == 0 else done.stderr


def _devices() -> Iterator[Finding]:
    machine, there = hardware(), os.cpu_count() or 1
    limited = "" if machine.cores == there else f" of {there}; this process may not use the others"
    cores = "1 core" if machine.cores == 1 else f"{machine.cores} cores"
    yield Finding("devices", "processor", State.FINE, f"{machine.cpu}, {cores}{limited}")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = memory_limit()
    says = "" if limit is None or limit >= memory else f"; {_gigabytes(limit)} in this container"
    yield Finding("devices", "memory", State.FINE, _gigabytes(memory) + says)
    gpus = ", ".join(machine.gpus) or (f"{gpu_count()} GPUs" if gpu_count() else "")
    yield Finding("devices", "GPUs", State.FINE if gpus else State.ABSENT, gpus or "none was found")
    if gpus and not importable("pynvml"):
        advice = "pip install 'carpool[gpu-metrics]'"
        yield Finding("devices", "GPU metrics", State.NOTE, "the metrics nv_gpu_* need nvidia-ml-py", advice)


def _limits() -> Iterator[Finding]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = max(soft, hard) if resource.RLIM_INFINITY not in (soft, hard) else resource.RLIM_INFINITY
    few = most != resource.RLIM_INFINITY and most < _ENOUGH_DESCRIPTORS
    says = "no limit" if most == resource.RLIM_INFINITY else f"{most} at most"
    advice = "raise it: ulimit -n, LimitNOFILE= of a service, or --ulimit nofile= of a container"
    yield Finding(
        "limits", "file descriptors", State.NOTE if few else State.FINE, says, advice if few else ""
    )
    try:
        os.close(os.memfd_create("carpool-doctor"))
    except OSError as error:
        yield Finding("limits", "shared memory", State.WRONG, f"memfd_create: {error.strerror}")
    else:
        yield Finding("limits", "shared memory", State.FINE, "memfd, so the size of /dev/shm does not matter")


def _folders(settings: ServerSettings) -> Iterator[Finding]:
    for name, folder in (("cache", settings.cache_dir), ("state", settings.state_dir)):
        if folder is not None:
            yield _folder(name, folder, f"CARPOOL_{name.upper()}_DIR")


def _folder(name: str, folder: Path, variable: str) -> Finding:
    there = next(place for place in (folder, *folder.parents) if place.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        advice = f"give it to this user, or name another in {variable}"
        return Finding("folders", name, State.WRONG, f"{folder}: nothing can be written there", advice)
    free = shutil.disk_usage(there).free
    kept = (
        f"{sum(1 for _ in folder.rglob('*.profile.json'))} profiles, "
        if name == "cache" and there == folder
        else ""
    )
    says = f"{folder}, {kept}{_gigabytes(free)} free"
    little = free < _LITTLE_DISK
    return Finding("folders", name, State.NOTE if little else State.FINE, says, "make room" if little else "")


def _ports(settings: ServerSettings) -> Iterator[Finding]:
    for name in ("http_port", "grpc_port", "metrics_port"):
        port: int = getattr(settings, name)
        option = f"--{name.replace('_', '-')}"
        taken = _taken(port)
        advice = f"stop the program on this port, or choose another: {option}"
        yield Finding(
            "ports", option, State.NOTE if taken else State.FINE, f"{port} is {'taken' if taken else 'free'}",
            advice if taken else "",
        )  # fmt: skip


def _extensions(settings: ServerSettings, environ: Mapping[str, str]) -> Iterator[Finding]:
    for one in extensions.installed().values():
        if one.home:
            yield Finding("extensions", one.name, State.FINE, f"is installed, in the package {one.home}")
        if one.name in settings.apis:
            url = f"http://{settings.host}:{settings.http_port}"
            yield Finding("apis", one.name, State.FINE, f"type this address: {one.api.format(url=url)}")
        if one.doctor:
            yield from one.part(one.doctor)(settings, environ)


def _taken(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return True
    return False


def _gigabytes(size: int) -> str:
    return f"{size / (1 << 30):.1f} GiB"
