"""Limits how many requests for a model are under way in each front end."""

from carpool.extension import USE, Columns, Extension, HttpRoute, Routes, Verb

EXTENSION = Extension(
    name="limit",
    home="carpool_limit",
    owns=("limit",),
    settings="settings:PART",
    engine="engine:engine",
    front="front:front",
    routes=(Routes(table=(HttpRoute("GET", "/v2/models/{model}/limit", "front:start_status"),)),),
    columns=(Columns("rejected"),),
    metrics="carpool_limit_rejected_total counter some cell:rejected Requests beyond the limit.",
    verbs={"limit": Verb("command:LimitVerb", USE, "Show the limit of a model in a running server.")},
)
