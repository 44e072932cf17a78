"""Answers images in tiles, in the front end that decoded them."""

from __future__ import annotations

from collections.abc import Mapping

from carpool.errors import InvalidInput
from carpool.extensions import installed
from carpool.extensions.tiles.settings import NAME, TASKS, TILE, TileSettings, read_settings
from carpool.extensions.tiles.tile_run import TileClient
from carpool.extensions.tiles.tiled_model import TiledModel, WholePictureModel
from carpool.frontend.calls.front_part import FrontPart, FrontServer
from carpool.frontend.calls.request import Infer, Request, places_at
from carpool.frontend.pictures.sent_pictures import PictureModel, SentPictures
from carpool.link.catalog import Catalog, ModelEntry

_MOST_KEPT = 64  # models with settings: requests choose those


def front(server: FrontServer) -> FrontPart:
    return TilesInFront(server).part


class TilesInFront:
    """Keeps the models as they were asked for. Used in the loop's thread."""

    def __init__(self, server: FrontServer) -> None:
        self._server = server
        self._place = places_at(TileClient(lambda: server.pictures))
        self._made: dict[tuple[int, TileSettings | None], PictureModel] = {}
        self.part = FrontPart(
            around=self._around, picture_model_for=self._picture_model_for, follow=self._follow
        )

    def _around(self, inner: Infer, entry: ModelEntry) -> Infer:
        if why_not(entry):
            return inner

        def in_tiles(request: Request) -> None:
            content = request.content
            if not (isinstance(content, SentPictures) and isinstance(content.model, TiledModel)):
                inner(request)
            elif request.choice is None:
                self._place(request)
            else:
                why = f"{entry.name} has two versions that share requests: one in tiles names its version"
                raise InvalidInput(why, field="version")

        return in_tiles

    def _picture_model_for(self, entry: ModelEntry, options: Mapping[str, str]) -> PictureModel | None:
        own = entry.extra.get(NAME)
        if own is None and TILE not in options:
            return None
        why = why_not(entry)
        if why:
            raise InvalidInput(f"{entry.name} {why}", field=TILE)
        settings = read_settings(None if own is None else TileSettings(**own), options)
        kept = self._made.get((entry.key, settings))
        if kept is not None and kept.entry is entry:
            return kept
        plain = self._server.pictures.model(entry)
        made = WholePictureModel(entry) if settings is None else TiledModel(plain, settings)
        if len(self._made) >= _MOST_KEPT:
            self._made.clear()
        self._made[entry.key, settings] = made
        return made

    def _follow(self, catalog: Catalog) -> None:
        entries = {entry.key: entry for entry in catalog.entries.values()}
        self._made = {at: made for at, made in self._made.items() if entries.get(at[0]) is made.entry}


def why_not(entry: ModelEntry) -> str:
    """Returns why the images of a version are not cut; empty: they are."""
    vision = entry.vision
    if vision is None or vision["task"] not in TASKS:
        return f"takes no tiles: they are for models that {', '.join(TASKS[:-1])} or find {TASKS[-1]}s"
    if entry.traits.decoupled:
        return "takes no tiles: it may give several answers"
    meets = installed()[NAME].meets
    return next((why for other, why in meets.items() if other in entry.extra), "")
