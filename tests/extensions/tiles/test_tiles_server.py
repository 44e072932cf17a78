"""Tiles on a whole server with a real detector: what they find, and what they leave of plain requests."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from urllib.request import urlopen

import pytest
from PIL import Image

from extensions.tiles.photo_boards import board, photos, png
from extensions.tiles.tiled_server import detect, nanodet_server, objects, without_partner
from frontend.whole_server import PATIENCE_S, WholeServer

SIDE = 416


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WholeServer]:
    with nanodet_server(tmp_path_factory.mktemp("tiles"), "[tiles]\nsize = 416\nwhole = false") as running:
        yield running


def test_a_mosaic_has_what_its_photos_have(server: WholeServer) -> None:
    known = [one.resize((SIDE, SIDE)) for one in photos().values()]
    known.append(known[0].transpose(Image.Transpose.FLIP_LEFT_RIGHT))
    mosaic, alone = Image.new("RGB", (2 * SIDE, 2 * SIDE)), []
    for number, photo in enumerate(known):
        x, y = SIDE * (number % 2), SIDE * (number // 2)
        mosaic.paste(photo, (x, y))
        for class_id, score, (x1, y1, x2, y2) in objects(detect(server, png(photo), "tile=0")):
            alone.append((class_id, score, [x1 + x, y1 + y, x2 + x, y2 + y]))
    together = detect(server, png(mosaic))
    assert together["tiles"]["count"] == 9
    assert len(alone) > 5
    lost = without_partner(alone, objects(together), 0.5, 1.0)
    assert len(lost) <= 0.05 * len(alone)


def test_small_objects_are_found_that_the_whole_hides(server: WholeServer) -> None:
    image = png(board(1))
    assert len(objects(detect(server, image))) > len(objects(detect(server, image, "tile=0")))


def test_the_same_image_has_the_same_answer(server: WholeServer) -> None:
    image = png(board(2, (900, 700)))
    assert detect(server, image, "whole=1") == detect(server, image, "whole=1")


def test_each_part_is_an_image_of_the_model(server: WholeServer) -> None:
    """Both ways of counting agree: images that ran, and parts that were asked."""
    before = _images(server)
    count = detect(server, png(board(3, (900, 700))), "tile=300")["tiles"]["count"]
    assert _images(server) - before == count


def _images(server: WholeServer) -> int:
    with urlopen(f"http://{server.url}/v2/models/nanodet/stats", timeout=PATIENCE_S) as response:
        statistics = json.loads(response.read())
    count: int = statistics["model_stats"][0]["inference_count"]
    return count


@pytest.mark.parametrize("query", ["tile=416&model=nanodet", "tile=640&merge=nms&per_class=0"])
def test_options_in_a_query_count_before_the_models(server: WholeServer, query: str) -> None:
    assert detect(server, png(board(4, (700, 500))), query)["tiles"]["whole"] is False


def test_wrong_settings_are_named(tmp_path: Path) -> None:
    with pytest.raises(BaseException, match="tiles"), nanodet_server(tmp_path, "[tiles]\nsize = 5"):
        pass
