"""Lists the verbs of `carpool`: its own, and those of extensions. A verb is imported when it is asked for,
with what extensions add to it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from inspect import cleandoc
from itertools import chain
from typing import Any

from carpool.extension import CAPACITY, CHECK, PANELS, PREPARE, SERVE, USE, Extension, Verb
from carpool.extensions import BUILT_IN, installed

OWN = Extension(
    name="carpool",
    home="carpool.cli",
    verbs={
        "serve": Verb(
            "serve_command:Serve",
            SERVE,
            "Serve models over HTTP and gRPC: image routes and Triton's protocol (KServe v2).",
        ),
        "doctor": Verb(
            "doctor_command:Doctor",
            SERVE,
            "Check this machine for the server: packages, engines, devices, limits, ports.",
        ),
        "demo": Verb(
            "demo_command:Demo", SERVE, "Show a rollout in minutes instead of days, or read a page of text."
        ),
        "completion": Verb(
            "completion_command:Completion",
            SERVE,
            "Print a script that completes verbs, options, choices and files in a shell.",
        ),
        "inspect": Verb(
            "inspect_command:Inspect",
            PREPARE,
            "Show a model's task, the evidence for it, and a model.toml that would fix it.",
        ),
        "init": Verb(
            "init_command:Init",
            PREPARE,
            "Write a commented model.toml beside a model, with what was recognised.",
        ),
        "predict": Verb("predict_command:Predict", USE, "Send images to a running server."),
        "top": Verb(
            "top_command:TopVerb",
            USE,
            "Show a running server once a second: rates, percentiles, rejections, busiest clients.",
        ),
        "models": Verb(
            "models_command:ModelsVerb", USE, "List, load and unload the models of a running server."
        ),
        "profile": Verb(
            "profile_command:ProfileVerb",
            CAPACITY,
            "Measure batch times on this machine, and which SLO they allow.",
        ),
        "load": Verb(
            "load_command:Load",
            CAPACITY,
            "Send load to a running server, and measure responses and latencies.",
        ),
        "sweep": Verb(
            "sweep_command:Sweep",
            CAPACITY,
            "Measure a model at many rates and settings, and plot its operating curve.",
        ),
        "simulate": Verb(
            "simulate_command:Simulate",
            CAPACITY,
            "Simulate traffic in virtual time, with the server's own scheduler.",
        ),
        "plan": Verb(
            "plan_command:PlanVerb",
            CAPACITY,
            "Plan how many replicas meet an SLO, with which settings, at what cost, and why.",
        ),
        "evaluate": Verb(
            "evaluate_command:Evaluate",
            CHECK,
            "Measure a model's accuracy on labelled images, or compare two versions.",
        ),
    },
)


def verb_class(name: str) -> type[Any] | None:
    """Returns the verb, imported now; other packages are asked only if none here has it."""
    for one in chain((OWN, *BUILT_IN), _others()):
        if name in one.verbs:
            return _with_more(name, one.part(one.verbs[name].place))
    return None


def _with_more(name: str, verb: type[Any]) -> type[Any]:
    """Returns the verb with the options and the examples of all extensions that add some."""
    more = [one.part(one.more_of_verbs[name]) for one in installed().values() if name in one.more_of_verbs]
    if not more:
        return verb
    about = "\n\n".join(cleandoc(one.__doc__ or "") for one in (verb, *more))
    return dataclass(frozen=True, kw_only=True)(type(verb.__name__, tuple(more), {"__doc__": about}))


def listed() -> dict[str, Verb]:
    """Returns every verb by name, the command's own first."""
    found: dict[str, Verb] = {}
    for one in chain((OWN, *BUILT_IN), _others()):
        found = {**found, **{name: verb for name, verb in one.verbs.items() if name not in found}}
    return found


def by_panel() -> dict[str, dict[str, str]]:
    """Returns the sentences of verbs by panel and name."""
    panels: dict[str, dict[str, str]] = {title: {} for title in PANELS}
    for name, verb in listed().items():
        panels.setdefault(verb.panel, {})[name] = verb.sentence
    return panels


def _others() -> Iterator[Extension]:
    yield from installed().values()
