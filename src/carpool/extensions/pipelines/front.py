"""Answers pictures of pipelines in the front end that decoded them."""

from __future__ import annotations

from carpool.extensions.pipelines.pipeline_pictures import PipelineModel
from carpool.extensions.pipelines.pipeline_run import PipelineClient
from carpool.extensions.pipelines.settings import NAME
from carpool.frontend.calls.front_part import FrontPart, FrontServer
from carpool.frontend.calls.request import Infer, places_at
from carpool.frontend.pictures.sent_pictures import PictureModel
from carpool.link.catalog import ModelEntry


def front(server: FrontServer) -> FrontPart:
    place = places_at(PipelineClient())

    def around(inner: Infer, entry: ModelEntry) -> Infer:
        """Nothing of the pipeline itself goes to the engine, so that `inner` is never called."""
        return place if NAME in entry.extra else inner

    def picture_model(entry: ModelEntry) -> PictureModel | None:
        return PipelineModel.found(entry, server.pictures) if NAME in entry.extra else None

    return FrontPart(around=around, picture_model=picture_model)
