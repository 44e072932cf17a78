"""Paths on the command line: which models, which versions, which files, and what deserves a warning."""

from __future__ import annotations

from pathlib import Path

import pytest

from absent import needs, rows
from carpool.config.model import InstanceGroup, InstanceKind, Mode, ModelConfig
from carpool.config.repository import ModelSource, find_models, find_places, read_model, with_promise
from carpool.config.settings_part import other_files
from carpool.config.toml import toml_config
from carpool.core.objectives import Promise
from carpool.errors import ConfigError

TRT = """
name: "yolo" backend: "tensorrt" max_batch_size: 64
input [{ name: "images" data_type: TYPE_FP32 dims: [3, 640, 640] }]
output [{ name: "output0" data_type: TYPE_FP32 dims: [-1, 8400] }]
dynamic_batching { preferred_batch_size: [8, 16] max_queue_delay_microseconds: 5000 }
instance_group [{ kind: KIND_GPU count: 2 }]
"""


def touch(root: Path, *files: str) -> Path:
    for file in files:
        path = root / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    return root


def put(file: Path, text: str) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file.parent


def one(path: Path, gpus: int = 0) -> tuple[ModelSource, list[str]]:
    models, warnings = find_models([path], gpus=gpus)
    assert len(models) == 1
    return models[0], warnings


def refused(path: Path, gpus: int = 0) -> str:
    with pytest.raises(ConfigError) as error:
        find_models([path], gpus=gpus)
    return str(error.value)


def test_a_repository(tmp_path: Path) -> None:
    touch(tmp_path, "a/1/model.onnx", "b/model.py", "README.md", ".git/1/model.onnx")
    put(tmp_path / "c" / "model.toml", '[fake]\ncurve = "16+4"')
    models, warnings = find_models([tmp_path])
    assert [(m.config.name, m.config.backend) for m in models] == [
        ("a", "onnxruntime"),
        ("b", "python"),
        ("c", "fake"),
    ]
    assert [m.versions[0].file for m in models] == [
        tmp_path / "a/1/model.onnx",
        tmp_path / "b/model.py",
        None,
    ]
    assert warnings == []


def test_folders_without_a_model_are_named_once(tmp_path: Path) -> None:
    touch(tmp_path, "a/model.onnx", "notes/x.txt", "old/y.txt")
    models, warnings = find_models([tmp_path])
    assert len(models) == 1
    assert warnings == [f"{tmp_path}: these folders have no model and are ignored: notes, old"]


def test_nothing_to_serve(tmp_path: Path) -> None:
    others = "".join(f"{name}, " for name in other_files())
    assert f"no models: looked for config.pbtxt, model.toml, {others}model.onnx" in refused(tmp_path)
    assert "no such file or folder" in refused(tmp_path / "missing")
    touch(tmp_path, "x.txt")
    assert "not a model file" in refused(tmp_path / "x.txt")


def test_relative_paths_have_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    touch(tmp_path, "net/model.onnx", "net/deep/x.txt")
    monkeypatch.chdir(tmp_path / "net")
    assert one(Path())[0].config.name == "net"
    monkeypatch.chdir(tmp_path / "net" / "deep")
    assert one(Path(".."))[0].config.name == "net"


@pytest.mark.parametrize(
    ("policy", "numbers"),
    [
        ("", [10]),
        ("versions = {latest = 2}", [2, 10]),
        ('versions = "all"', [1, 2, 10]),
        ("versions = [2, 1]", [1, 2]),
    ],
)
def test_versions_by_policy(tmp_path: Path, policy: str, numbers: list[int]) -> None:
    touch(tmp_path, "1/model.onnx", "2/model.onnx", "10/model.onnx")
    put(tmp_path / "model.toml", policy)
    source, warnings = one(tmp_path)
    assert [v.number for v in source.versions] == numbers
    assert source.versions[-1].file == tmp_path / str(numbers[-1]) / "model.onnx"
    assert warnings == []


def test_odd_version_folders_share_one_warning(tmp_path: Path) -> None:
    touch(
        tmp_path, "1/model.onnx", "02/model.onnx", "v3/model.onnx", "-4/x", ".hid/x", "warmup/x", "configs/x"
    )
    source, warnings = one(tmp_path)
    assert [v.number for v in source.versions] == [1]
    why = "because a version is a number without leading zeros"
    assert warnings == [f"{tmp_path}: these folders are ignored, {why}: -4, 02, v3"]


def test_missing_versions(tmp_path: Path) -> None:
    touch(tmp_path, "1/model.onnx")
    put(tmp_path / "model.toml", "versions = [1, 7]")
    assert one(tmp_path)[1] == [f"{tmp_path.name}: {tmp_path} has no version 7"]
    put(tmp_path / "model.toml", "versions = [7]")
    assert "none of the versions asked for: 7" in refused(tmp_path)


@needs("torch")
@pytest.mark.usefixtures("no_large_engines")
def test_a_missing_file_says_what_was_looked_for(tmp_path: Path) -> None:
    (tmp_path / "m" / "1").mkdir(parents=True)
    assert (
        "looked for model.onnx, model.pt, model.pt2, model.torchscript, model.xml, model.tflite, model.py"
        in refused(tmp_path / "m")
    )
    put(tmp_path / "m" / "config.pbtxt", 'backend: "python"')
    assert refused(tmp_path / "m").endswith("1: looked for model.py")
    put(tmp_path / "m" / "config.pbtxt", 'default_model_filename: "net.onnx"')
    assert refused(tmp_path / "m").endswith("1: looked for net.onnx")
    (tmp_path / "m" / "1" / "colour.onnx").touch()
    assert refused(tmp_path / "m").endswith(
        'to serve colour.onnx, set file = "colour.onnx" in its model.toml'
    )


@pytest.mark.usefixtures("no_large_engines")
def test_a_tensorrt_engine_alone_cannot_run(tmp_path: Path) -> None:
    touch(tmp_path, "yolo/1/model.plan")
    put(tmp_path / "yolo" / "config.pbtxt", TRT)
    assert "model.plan is a TensorRT engine, which cannot run here: add model.onnx" in refused(tmp_path)


@pytest.mark.usefixtures("no_large_engines")
def test_tensorrt_settings_run_on_what_is_there_with_one_warning(tmp_path: Path) -> None:
    touch(tmp_path, "yolo/1/model.onnx", "yolo/1/model.plan")
    put(tmp_path / "yolo" / "config.pbtxt", TRT)
    source, warnings = one(tmp_path)
    assert (source.config.backend, source.config.file) == ("onnxruntime", "model.onnx")
    assert source.config.instances == (InstanceGroup(2, InstanceKind.CPU),)
    assert warnings == [
        'yolo: runs with onnxruntime on the CPU: "tensorrt" was asked for, but the file found is model.onnx; '
        "a GPU was asked for, but there is none"
    ]
    source, warnings = one(tmp_path, gpus=1)
    assert source.config.instances == (InstanceGroup(2, InstanceKind.GPU),)
    assert warnings == [
        'yolo: runs with onnxruntime: "tensorrt" was asked for, but the file found is model.onnx'
    ]


@pytest.mark.usefixtures("no_large_engines")
def test_a_foreign_file_name_gives_way(tmp_path: Path) -> None:
    touch(tmp_path, "m/1/model.onnx")
    put(tmp_path / "m" / "config.pbtxt", 'default_model_filename: "net.plan"')
    source, warnings = one(tmp_path)
    assert source.config.file == "model.onnx"
    assert warnings == [
        "m: runs with onnxruntime on the CPU: net.plan was asked for, but the file found is model.onnx"
    ]


def test_gpus_must_exist(tmp_path: Path) -> None:
    touch(tmp_path, "model.onnx")
    put(tmp_path / "model.toml", 'instances = [{kind = "gpu", gpus = [1]}, {kind = "model"}]')
    assert "asks for GPU 1, but there are 1" in refused(tmp_path, gpus=1)
    source, _ = one(tmp_path)
    assert source.config.instances == (
        InstanceGroup(1, InstanceKind.CPU),
        InstanceGroup(1, InstanceKind.MODEL),
    )
    source, _ = one(tmp_path, gpus=2)
    assert source.config.instances[0] == InstanceGroup(1, InstanceKind.GPU, (1,))


def test_files_and_backends(tmp_path: Path) -> None:
    touch(tmp_path, "model.onnx", "model.py", "other.bin")
    assert "holds model.onnx and model.py; choose one by setting the backend" in refused(tmp_path)
    for text, backend, file in [
        ('backend = "python"', "python", "model.py"),
        ('backend = "openvino"', "openvino", "model.onnx"),
        ('file = "model.py"', "python", "model.py"),
        ('file = "other.bin"\nbackend = "python"', "python", "other.bin"),
    ]:
        put(tmp_path / "model.toml", text)
        source, warnings = one(tmp_path)
        assert (source.config.backend, source.config.file, warnings) == (backend, file, [])
    put(tmp_path / "model.toml", 'file = "other.bin"')
    assert "has none of the endings" in refused(tmp_path)


def test_a_model_with_weights_beside_it_may_be_a_folder(tmp_path: Path) -> None:
    touch(tmp_path, "m/1/model.onnx/model.onnx", "m/1/model.onnx/weights.bin")
    assert one(tmp_path)[0].versions[0].file == tmp_path / "m/1/model.onnx/model.onnx"


def test_versions_may_have_backends_of_the_same_process(tmp_path: Path) -> None:
    touch(tmp_path, "1/model.onnx", "2/model.xml", "2/model.bin", "3/model.onnx")
    put(tmp_path / "model.toml", 'versions = "all"')
    source, warnings = one(tmp_path)
    own = [source.config_of(version) for version in source.versions]
    assert [config.backend for config in own] == ["onnxruntime", "openvino", "onnxruntime"]
    assert [config.file for config in own] == ["model.onnx", "model.xml", "model.onnx"]
    assert (source.config, warnings) == (own[2], [])


def test_the_settings_of_an_older_version_stay_as_they_were(tmp_path: Path) -> None:
    touch(tmp_path, "1/model.onnx")
    put(tmp_path / "model.toml", 'versions = "all"')
    before = one(tmp_path)[0]
    touch(tmp_path, "2/model.xml", "2/model.bin")
    after = one(tmp_path)[0]
    assert after.config_of(after.versions[0]) == before.config_of(before.versions[0])


def test_versions_share_a_process(tmp_path: Path) -> None:
    touch(tmp_path, "1/model.onnx", "2/model.py")
    put(tmp_path / "model.toml", 'versions = "all"')
    assert "different backends: onnxruntime, python" in refused(tmp_path)


def test_name_must_match_the_folder(tmp_path: Path) -> None:
    for file, text in (("config.pbtxt", 'name: "x"'), ("model.toml", 'name = "x"')):
        folder = tmp_path / file.replace(".", "_")
        touch(folder, "1/model.onnx")
        put(folder / file, text)
        assert f'unexpected folder name "{folder.name}" for model "x"' in refused(folder)


def test_two_settings_files_must_be_chosen(tmp_path: Path) -> None:
    touch(tmp_path, "model.onnx", "model.toml", "config.pbtxt")
    assert "both config.pbtxt and model.toml" in refused(tmp_path)


def test_two_models_of_one_name(tmp_path: Path) -> None:
    touch(tmp_path, "x/m/model.onnx", "y/m/model.onnx")
    with pytest.raises(ConfigError, match='two models are called "m"'):
        find_models([tmp_path / "x", tmp_path / "y" / "m"])


def test_labels_must_exist(tmp_path: Path) -> None:
    touch(tmp_path, "model.onnx")
    put(tmp_path / "model.toml", 'labels = "coco.txt"')
    assert "coco.txt is missing" in refused(tmp_path)
    touch(tmp_path, "coco.txt")
    assert one(tmp_path)[0].config.labels == "coco.txt"


def test_one_file(tmp_path: Path) -> None:
    touch(tmp_path, "nets/detector.onnx", "nets/2024/big.onnx", "net/model.py", "repo/m/3/model.onnx")
    found = {}
    for file in ("nets/detector.onnx", "nets/2024/big.onnx", "net/model.py", "repo/m/3/model.onnx"):
        source, warnings = one(tmp_path / file)
        assert warnings == []
        assert source.versions[0].file == tmp_path / file
        found[source.config.name] = (source.config.backend, source.versions[0].number)
    assert found == {
        "detector": ("onnxruntime", 1),
        "big": ("onnxruntime", 1),
        "net": ("python", 1),
        "m": ("onnxruntime", 3),
    }


def test_settings_beside_one_file(tmp_path: Path) -> None:
    touch(tmp_path, "a.onnx", "b.onnx")
    put(tmp_path / "model.toml", "slo_ms = 20")
    assert one(tmp_path / "a.onnx")[0].config.mode is Mode.PROMISE
    put(tmp_path / "model.toml", 'slo_ms = 20\nfile = "a.onnx"\nname = "mine"')
    assert one(tmp_path / "a.onnx")[0].config.name == "mine"
    source, warnings = one(tmp_path / "b.onnx")
    assert (source.config.name, source.config.mode) == ("b", Mode.EAGER)
    assert warnings == [f"{tmp_path / 'b.onnx'}: served without the settings beside it, which are for a.onnx"]


def test_unreadable_folders_are_config_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def deny(self: Path) -> bool:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "iterdir", deny)
    assert "cannot be read: Permission denied" in refused(tmp_path)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_model(tmp_path)


def model(text: str) -> ModelConfig:
    return toml_config(text, Path("models/m/model.toml"))


def test_a_promise_from_the_command_line() -> None:
    config, warnings = with_promise(model("max_batch = 8\n[batching]\nmax_delay_ms = 5"), 40)
    assert (config.mode, config.policy) == (Mode.PROMISE, Promise(slo=0.04, max_batch=8))
    assert warnings == ["m: an SLO of 40 ms replaces its fixed batching settings"]
    assert with_promise(model("slo_ms = 50"), 40)[1] == [
        "m: an SLO of 40 ms replaces the 50 ms of its settings"
    ]
    assert with_promise(model("slo_ms = 40"), 40)[1] == []
    assert with_promise(model(""), 40)[1] == []
    for bad in (0, -1, float("nan"), float("inf")):
        with pytest.raises(ConfigError, match="slo_ms must be above 0"):
            with_promise(model(""), bad)


def test_some_models_are_found_without_looking_into_the_others(tmp_path: Path) -> None:
    touch(tmp_path, "a/1/model.onnx", "b/1/model.onnx")
    put(tmp_path / "broken" / "model.toml", "sloms = 3")
    models, _ = find_models([tmp_path], only=["b", "a", "b"])
    assert [m.config.name for m in models] == ["b", "a"]
    with pytest.raises(ConfigError, match='no model "c"; valid here: a, b, broken'):
        find_models([tmp_path], only=["c"])
    assert find_models([tmp_path], only=[])[0] == []


def test_places_are_found_without_reading(tmp_path: Path) -> None:
    touch(tmp_path, "a/1/model.onnx", "stray/README", "one/net.onnx")
    put(tmp_path / "broken" / "model.toml", "sloms = 3")
    file = tmp_path / "one" / "net.onnx"
    places, warnings = find_places([tmp_path, file])
    assert places == {
        "a": (tmp_path / "a",),
        "broken": (tmp_path / "broken",),
        "net": (file,),
    }
    assert len(warnings) == 1
    assert "stray" in warnings[0]
    assert find_places([tmp_path, tmp_path / "a"])[0]["a"] == (tmp_path / "a",)  # one place, given twice


def test_a_file_keeps_its_name_and_may_go(tmp_path: Path) -> None:
    touch(tmp_path, "net.onnx")
    put(tmp_path / "model.toml", 'name = "detector"')
    file = tmp_path / "net.onnx"
    places, _ = find_places([file])
    assert places == {"detector": (file,)}
    (tmp_path / "model.toml").write_text("sloms = 3")
    assert find_places([file], places)[0] == places
    file.unlink()
    assert find_places([file], places)[0] == {}
    with pytest.raises(ConfigError, match="no such file"):
        find_places([file])


def test_an_empty_repository_may_be_meant(tmp_path: Path) -> None:
    assert find_models([tmp_path], some=False) == ([], [])
    assert "no models" in refused(tmp_path)


def test_a_folder_of_model_files_is_one_model_each(tmp_path: Path) -> None:
    for name in ("a.onnx", "b.tflite", "script.py", "notes.txt", "form.xml"):
        (tmp_path / name).write_bytes(b"")
    sources, _ = find_models([tmp_path])
    assert [(one.config.name, one.config.backend) for one in sources] == [
        ("a", "onnxruntime"),
        ("b", "litert"),
    ]


def test_a_folder_that_is_a_model(tmp_path: Path) -> None:
    saved, hub = tmp_path / "net", tmp_path / "vit"
    saved.mkdir()
    hub.mkdir()
    (saved / "saved_model.pb").write_bytes(b"")
    (hub / "config.json").write_text("{}")
    (hub / "model.safetensors").write_bytes(b"")
    for folder, backend in ((saved, "tensorflow"), *rows("torch", (hub, "transformers"))):
        [source], _ = find_models([folder])
        assert (source.config.name, source.config.backend) == (folder.name, backend)
    assert {one.config.name for one in find_models([tmp_path])[0]} == {"net", *rows("torch", "vit")}
