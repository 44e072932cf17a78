"""Answers pictures of cascades in the front end that decoded them."""

from __future__ import annotations

from carpool.extensions.cascades.cascade_run import CascadeModel, CascadeRun
from carpool.extensions.cascades.cascade_steps import NAME
from carpool.extensions.pipelines.pipeline_run import PipelineClient
from carpool.frontend.calls.front_part import FrontPart, FrontServer
from carpool.frontend.calls.request import Infer, places_at
from carpool.frontend.pictures.sent_pictures import PictureModel
from carpool.link.catalog import ModelEntry


def front(server: FrontServer) -> FrontPart:
    place = places_at(PipelineClient(CascadeRun))

    def around(inner: Infer, entry: ModelEntry) -> Infer:
        return place if NAME in entry.extra else inner

    def picture_model(entry: ModelEntry) -> PictureModel | None:
        return CascadeModel.found(entry, server.pictures) if NAME in entry.extra else None

    return FrontPart(around=around, picture_model=picture_model)
