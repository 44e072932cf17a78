"""An address in MLflow is resolved and fetched; whatever the registry answers, nothing half is ever there."""

from __future__ import annotations

import json
import shutil
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path

import pytest

from carpool.errors import ConfigError
from carpool.extensions.registry.mlflow_source import MlflowServer, MlflowSource, flavours
from carpool.extensions.registry.source import (
    BadArtifacts,
    NotInRegistry,
    NotReady,
    RegistryDown,
    RegistryError,
)
from carpool.extensions.registry.version_store import VersionStore
from extensions.registry.stand_in import MLMODEL, Reply, StandIn, standing_in

CHAMPION = "models:/detector@champion"


@pytest.fixture
def mlflow() -> Iterator[StandIn]:
    with standing_in() as found:
        found.register(7, b"seven" * 100, **{"extra/deep/notes.txt": b"x" * 10})
        found.aliases["champion"] = 7
        yield found


def source(mlflow: StandIn, address: str = CHAMPION, **environ: str) -> MlflowSource:
    return MlflowSource(MlflowServer.at(mlflow.url, environ), address)


def everything(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")} if folder.exists() else set()


# ---- what an address means


@pytest.mark.parametrize("address", [CHAMPION, "models:/detector/7"])
def test_an_address_is_a_version_and_its_files(mlflow: StandIn, address: str) -> None:
    pin = source(mlflow, address).resolve()
    assert pin.version == 7
    sizes = {file.path: file.size for file in pin.files}
    assert sizes == {"MLmodel": len(MLMODEL), "model.onnx": 500, "extra/deep/notes.txt": 10}
    assert pin.bytes == sum(sizes.values())
    assert pin.run == "run7"


def test_a_known_version_costs_one_call(mlflow: StandIn) -> None:
    asking = source(mlflow)
    pin = asking.resolve()
    mlflow.asked.clear()
    assert asking.resolve(pin) is pin
    assert len(mlflow.asked) == 1
    mlflow.register(8, b"eight")
    mlflow.aliases["champion"] = 8
    moved = asking.resolve(pin)
    assert moved.version == 8
    assert moved.digest != pin.digest


def test_what_is_not_there_is_told_apart(mlflow: StandIn) -> None:
    for address in ("models:/detector@nobody", "models:/absent@champion", "models:/detector/9"):
        with pytest.raises(NotInRegistry):
            source(mlflow, address).resolve()
    mlflow.status[7] = "PENDING_REGISTRATION"
    with pytest.raises(NotReady, match="version 7 is PENDING_REGISTRATION"):
        source(mlflow).resolve()


@pytest.mark.parametrize(
    "address",
    ["models:/detector", "models:/detector/latest", "models:/a/b/1", "models:/../x@y", "models:/d@"],
)
def test_other_addresses_are_refused(mlflow: StandIn, address: str) -> None:
    with pytest.raises(ConfigError, match="models:/detector@champion"):
        source(mlflow, address)


@pytest.mark.parametrize(
    "url", ["", "mlflow.example", "file:///x", "http://", "http://h:port", "http://h?q=1"]
)
def test_other_registries_are_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="--registry"):
        MlflowServer.at(url, {})


# ---- who asks


def test_keys_go_along_and_are_never_told(mlflow: StandIn) -> None:
    for environ, sent in (
        ({}, ""),
        ({"MLFLOW_TRACKING_TOKEN": "s3cret"}, "Bearer s3cret"),
        (
            {"MLFLOW_TRACKING_USERNAME": "me", "MLFLOW_TRACKING_PASSWORD": "s3cret"},
            "Basic bWU6czNjcmV0",
        ),
    ):
        mlflow.keys.clear()
        server = MlflowServer.at("", {"MLFLOW_TRACKING_URI": mlflow.url, **environ})
        MlflowSource(server, CHAMPION).resolve()
        assert set(mlflow.keys) == {sent}
        assert "s3cret" not in repr(server)
        mlflow.instead = lambda _path: (401, {}, b"who are you?")
        with pytest.raises(RegistryDown, match="MLFLOW_TRACKING_TOKEN") as told:
            MlflowSource(server, CHAMPION).resolve()
        assert "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD" in str(told.value)
        assert "s3cret" not in str(told.value)
        mlflow.instead = lambda _path: None
    named = MlflowServer.at(mlflow.url.replace("//", "//me:s3cret@"), {})
    assert "s3cret" not in repr(named) + named.url
    assert named.authorization == "Basic bWU6czNjcmV0"


# ---- what it may answer


HTML = (200, {"Content-Type": "text/html"}, b"<html>Please log in</html>")


def listing(*entries: dict[str, object]) -> bytes:
    return json.dumps({"files": list(entries)}).encode()


def is_listing(path: str) -> bool:
    return "mlflow-artifacts/artifacts?" in path


def is_file(path: str) -> bool:
    return path.endswith("/model.onnx")


HOSTILE = ("../../evil", "/etc/passwd", "a/b", "..", "", "a\\b", "a\0b", "x" * 300, "line\nbreak")
BREAKAGES: dict[str, tuple[object, Reply]] = {
    "401": (lambda _: True, (401, {}, b"")),
    "403": (lambda _: True, (403, {}, b"")),
    "429": (lambda _: True, (429, {"Retry-After": "7"}, b"slow down")),
    "500": (lambda _: True, (500, {}, b"boom")),
    "302": (lambda _: True, (302, {"Location": "http://127.0.0.1:9/"}, b"")),
    "HTML": (lambda _: True, HTML),
    "JSON that is no object": (lambda _: True, (200, {}, b"[]")),
    "JSON without a version": (lambda _: True, (200, {}, b"{}")),
    "a version that is no number": (
        lambda path: "alias" in path,
        (200, {}, b'{"model_version": {"version": "../7"}}'),
    ),
    "nested JSON": (lambda _: True, (200, {}, b"[" * 100_000)),
    "files elsewhere": (
        lambda path: "download-uri" in path,
        (200, {}, b'{"artifact_uri": "s3://bucket/model"}'),
    ),
    "files above": (
        lambda path: "download-uri" in path,
        (200, {}, b'{"artifact_uri": "mlflow-artifacts:/../../etc"}'),
    ),
    "HTML for a listing": (is_listing, HTML),
    "a listing without sizes": (is_listing, (200, {}, listing({"path": "model.onnx", "is_dir": False}))),
    "a listing of numbers": (is_listing, (200, {}, b'{"files": [1, 2]}')),
    "too many files": (
        is_listing,
        (200, {}, listing(*({"path": f"{n}.bin", "file_size": 1} for n in range(1001)))),
    ),
    "folders without end": (is_listing, (200, {}, listing({"path": "d", "is_dir": True}))),
    "too many bytes": (is_listing, (200, {}, listing({"path": "model.onnx", "file_size": 1 << 40}))),
    "a short file": (is_file, (200, {}, b"seven")),
    "a long file": (is_file, (200, {}, b"seven" * 101)),
    "a file that breaks off": (is_file, (200, {"Content-Length": "500"}, b"seven")),
    "a file that is gone": (is_file, (404, {}, b"")),
    **{
        f"a file named {name[:12]!r}": (is_listing, (200, {}, listing({"path": name, "file_size": 1})))
        for name in HOSTILE
    },
}


@pytest.mark.parametrize("breakage", BREAKAGES)
def test_whatever_it_answers_nothing_half_is_there(mlflow: StandIn, tmp_path: Path, breakage: str) -> None:
    applies, reply = BREAKAGES[breakage]
    mlflow.instead = lambda path: reply if applies(path) else None  # type: ignore[operator]
    home = tmp_path / "detector"
    asking, store = source(mlflow, MLFLOW_TRACKING_TOKEN="s3cret"), VersionStore(tmp_path / "store")
    with pytest.raises(RegistryError) as told:
        store.bring(asking, asking.resolve(), home)
    assert "s3cret" not in str(told.value)
    assert not everything(home)
    assert everything(tmp_path) <= {"detector"}
    if breakage == "429":
        assert isinstance(told.value, RegistryDown)
        assert told.value.retry_after_s == 7
    mlflow.instead = lambda _path: None
    assert (store.bring(asking, asking.resolve(), home) / "model.onnx").read_bytes() == b"seven" * 100


def test_a_server_that_is_gone_is_down(tmp_path: Path) -> None:
    with standing_in() as mlflow:
        mlflow.register(7, b"seven")
        mlflow.aliases["champion"] = 7
        asking = source(mlflow)
        pin = asking.resolve()
    with pytest.raises(RegistryDown, match="no response"):
        asking.resolve()
    with pytest.raises(RegistryDown):
        VersionStore(tmp_path / "store").bring(asking, pin, tmp_path / "detector")
    assert not everything(tmp_path / "detector")


def test_too_little_room_is_told_before_anything_is_fetched(
    mlflow: StandIn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: usage(10**10, 9 * 10**9, 10**9))
    reply = (200, {}, listing({"path": "model.onnx", "file_size": 5 * 10**9}))
    mlflow.instead = lambda path: reply if is_listing(path) else None
    asking = source(mlflow)
    pin = asking.resolve()
    mlflow.asked.clear()
    with pytest.raises(BadArtifacts, match=r"has 5,000 MB, and .* has room for"):
        VersionStore(tmp_path / "store").bring(asking, pin, tmp_path / "detector")
    assert mlflow.asked == []
    assert not everything(tmp_path / "detector")


# ---- the store


def test_contents_are_kept_once_and_checked_when_they_are_used_again(mlflow: StandIn, tmp_path: Path) -> None:
    asking, store = source(mlflow), VersionStore(tmp_path / "store")
    pin = asking.resolve()
    first = store.bring(asking, pin, tmp_path / "a" / "detector")
    assert store.bring(asking, pin, tmp_path / "a" / "detector") == first
    mlflow.asked.clear()
    second = store.bring(asking, pin, tmp_path / "b" / "detector")
    assert mlflow.asked == []  # nothing was fetched again
    assert (second / "model.onnx").samefile(first / "model.onnx")
    (first / "model.onnx").write_bytes(b"somebody wrote into it")
    third = store.bring(asking, pin, tmp_path / "c" / "detector")
    assert mlflow.asked != []
    assert (third / "model.onnx").read_bytes() == b"seven" * 100


def test_what_is_not_from_the_registry_stays(mlflow: StandIn, tmp_path: Path) -> None:
    asking, store = source(mlflow), VersionStore(tmp_path / "store")
    mine = tmp_path / "detector" / "7"
    mine.mkdir(parents=True)
    (mine / "model.onnx").write_bytes(b"mine")
    with pytest.raises(RegistryError, match="is not from the registry"):
        store.bring(asking, asking.resolve(), tmp_path / "detector")
    store.tidy(tmp_path / "detector", [])
    assert (mine / "model.onnx").read_bytes() == b"mine"


def test_a_registry_that_was_made_anew_replaces_its_version(mlflow: StandIn, tmp_path: Path) -> None:
    asking, store = source(mlflow), VersionStore(tmp_path / "store")
    store.bring(asking, asking.resolve(), tmp_path / "detector")
    mlflow.register(7, b"another seven")
    folder = store.bring(asking, asking.resolve(), tmp_path / "detector")
    assert (folder / "model.onnx").read_bytes() == b"another seven"


def test_old_versions_go_but_for_the_last_few(mlflow: StandIn, tmp_path: Path) -> None:
    store = VersionStore(tmp_path / "store")
    for version in range(1, 7):
        mlflow.register(version, b"model %d" % version)
        asking = source(mlflow, f"models:/detector/{version}")
        store.bring(asking, asking.resolve(), tmp_path / "detector")
    store.tidy(tmp_path / "detector", [1])
    assert {path.name for path in (tmp_path / "detector").iterdir()} == {"1", "5", "6"}


# ---- which file is the model


def test_flavours_are_read() -> None:
    found = flavours(MLMODEL)
    assert set(found) == {"onnx", "python_function"}
    assert found["onnx"]["data"] == "model.onnx"
    assert flavours("") == flavours("flavors: 3") == flavours("- a\n  b: c") == {}
    assert flavours(
        "x:\n  onnx:\n    data: y\nflavors:\n  'z':\n    a: \"b\"\nq:\n  onnx:\n    data: y\n"
    ) == {"'z'": {"a": "b"}}


@pytest.mark.parametrize(
    ("mlmodel", "said"),
    [
        ("flavors:\n  pytorch:\n    model_data: data\n", "allow_pickle = true"),
        ("flavors:\n  sklearn:\n    pickled_model: model.pkl\n", r"\(sklearn\); readable: onnx"),
        ("flavors:\n  onnx:\n    data: ../../model.onnx\n", "which is not there"),
        ("nothing", r"\(none\)"),
    ],
)
def test_other_flavours_are_refused(mlflow: StandIn, tmp_path: Path, mlmodel: str, said: str) -> None:
    mlflow.versions[7]["MLmodel"] = mlmodel.encode()
    mlflow.versions[7]["data/model.pth"] = b"pickle"
    asking = source(mlflow)
    with pytest.raises(BadArtifacts, match=said):
        VersionStore(tmp_path / "store").bring(asking, asking.resolve(), tmp_path / "detector")
    assert not everything(tmp_path / "detector")


def test_what_could_run_code_is_left_there_unless_it_is_wanted(mlflow: StandIn, tmp_path: Path) -> None:
    mlflow.versions[7] |= {
        "model.py": b"evil",
        "weights.pkl": b"evil",
        "weights.bin": b"good",
        ".hidden": b"?",
    }
    asking = source(mlflow)
    folder = VersionStore(tmp_path / "store").bring(asking, asking.resolve(), tmp_path / "detector")
    names = {path.name for path in folder.iterdir() if not path.name.startswith(".")}
    assert names == {"MLmodel", "model.onnx", "extra", "weights.bin"}
    mlflow.versions[7] = {
        "MLmodel": b"flavors:\n  pytorch:\n    model_data: data\n",
        "data/model.pth": b"pickle",
    }
    trusting = MlflowSource(MlflowServer.at(mlflow.url, {}), CHAMPION, allow_pickle=True)
    folder = VersionStore(tmp_path / "store").bring(trusting, trusting.resolve(), tmp_path / "torch")
    assert (folder / "model.pth").read_bytes() == b"pickle"


def test_a_model_of_another_name_is_found_under_the_usual_one(mlflow: StandIn, tmp_path: Path) -> None:
    mlflow.versions[7] = {"MLmodel": b"flavors:\n  onnx:\n    data: net.onnx\n", "net.onnx": b"net"}
    asking = source(mlflow)
    folder = VersionStore(tmp_path / "store").bring(asking, asking.resolve(), tmp_path / "detector")
    assert (folder / "model.onnx").read_bytes() == b"net"


# ---- what is told to the registry


def test_tags_metrics_and_the_alias_are_written_back(mlflow: StandIn) -> None:
    mlflow.register(8, b"eight")
    asking = source(mlflow)
    pin = source(mlflow, "models:/detector/8").resolve()
    asking.write_back(pin, "canary", "r-1", {"carpool.share": 0.1})
    assert mlflow.tags == {8: {"carpool.state": "canary", "carpool.rollout": "r-1"}}
    assert [(one["run_id"], one["key"], one["value"]) for one in mlflow.metrics] == [
        ("run8", "carpool.share", 0.1)
    ]
    asking.point(pin)
    assert mlflow.aliases["champion"] == 8
    with pytest.raises(NotInRegistry, match="no alias"):
        source(mlflow, "models:/detector/8").point(pin)
