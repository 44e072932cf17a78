"""`carpool pipeline check`: is a pipeline.toml right, and what does it do? Drawn with lines and words."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

from carpool.cli import verb_options as o
from carpool.errors import ConfigError, InvalidInput

if TYPE_CHECKING:
    from carpool.config.repository import ModelSource
    from carpool.extensions.pipelines.picture_graph import PictureGraph
    from carpool.extensions.pipelines.settings import PipelineStep
    from carpool.vision.plans.settings import VisionSettings

Action = StrEnum("Action", ["check"])
_SHOWN = 6  # labels


@dataclass(frozen=True, kw_only=True)
class PipelineVerb:
    """Check a pipeline, and show its steps.

        carpool pipeline check models/street

    Its models are searched for beside it, or in --models. Each is opened, tried and timed; nothing
    is served. Errors name their line. An SLO that cannot be met here is reported with one that can.
    """

    action: Action = o.argument("The action.", metavar="check")
    folder: Path = o.argument("The folder with the pipeline.toml.", metavar="DIR")
    models: list[Path] | None = o.option(
        None, "Folder of its models, if they are not beside it.", metavar="PATH"
    )

    def run(self) -> None:
        from carpool.config.repository import folder_settings
        from carpool.core.objectives import Promise
        from carpool.extensions.pipelines.picture_graph import PictureGraph, StepFacts
        from carpool.extensions.pipelines.pipeline_times import picture_seconds, time_report
        from carpool.extensions.pipelines.pipeline_toml import PIPELINE_TOML
        from carpool.extensions.pipelines.settings import pipeline_settings
        from carpool.lab.model_report import how_it_sees

        folder = self.folder.absolute()
        if not (folder / PIPELINE_TOML).is_file():
            raise InvalidInput(f"{self.folder} has no {PIPELINE_TOML}")
        config, _ = folder_settings(folder, folder.name)
        settings = pipeline_settings(config)
        assert settings is not None
        graph = PictureGraph(settings)
        there = self._models(folder.parent)
        facts, seen, sources = [], [], []
        for number, step in enumerate(graph.steps):
            source = _found(there, step.model, graph.settings.at(number))
            sources.append(source)
            vision = None if source.config.needs else how_it_sees(source)
            seen.append(vision)
            if vision is None:
                facts.append(StepFacts(None, runs_nothing=bool(source.config.needs)))
            else:
                facts.append(StepFacts(str(vision.task), vision.sides, labels=vision.labels))
        graph.check(facts)
        promise = config.policy.slo if isinstance(config.policy, Promise) else None
        print("\n".join(drawn(config.name, graph, seen, promise)))
        print(f"  {time_report(config.name, promise, picture_seconds(graph, sources))}")

    def _models(self, beside: Path) -> dict[str, ModelSource]:
        from carpool.config.repository import find_models

        mistakes: dict[str, ConfigError] = {}
        sources, _ = find_models(self.models or [beside], some=False, mistakes=mistakes)
        return {source.config.name: source for source in sources}


def _found(there: dict[str, ModelSource], model: str, at: str) -> ModelSource:
    from carpool.config import rules

    if model not in there:
        said = rules.nearest(model, there) if there else "there are none"
        raise ConfigError(f"{at}: there is no model {rules.shown(model)}; {said}")
    return there[model]


def drawn(
    name: str, graph: PictureGraph, seen: list[VisionSettings | None], promise: float | None
) -> list[str]:
    """Returns the graph from top to bottom."""
    whole = f"one SLO of {promise * 1e3:g} ms for all steps" if promise else "no SLO: slo_ms sets one"
    lines = [f"{name}: {whole}", "", "  picture"]
    roots = [number for number in graph.order if graph.after[number] is None]
    for place, number in enumerate(roots):
        lines += _branch(graph, seen, number, "  ", last=place == len(roots) - 1)
    lines += ["", *(_of_cascade(graph) if len(graph.settings.answer) > 1 else _of_parts(graph))]
    lines.append(f"  pixels kept between the steps: {graph.settings.keep_px} on the longer side")
    return lines


def _of_parts(graph: PictureGraph) -> list[str]:
    late = (
        "rejected"
        if graph.settings.if_late == "refuse"
        else ("answered without the step, which is listed in late")
    )
    return [
        f"  answer: the response of {graph.steps[graph.base].name}, with those of the other steps",
        *(f"    {where}" for where in _attached(graph)),
        f"  a step that would be late: {late}",
    ]


def _of_cascade(graph: PictureGraph) -> list[str]:
    big, cheap = graph.settings.answer
    late = (
        "rejected"
        if graph.settings.under_load == "refuse"
        else (f"the response of {cheap}, marked as degraded")
    )
    return [f"  answer: that of {big} if it runs, else of {cheap}", f"  no time for {big}: {late}"]


def _branch(
    graph: PictureGraph, seen: list[VisionSettings | None], number: int, indent: str, *, last: bool
) -> list[str]:
    step, vision = graph.steps[number], seen[number]
    corner, trunk = ("└─ ", "   ") if last else ("├─ ", "│  ")
    lines = [f"{indent}│"]
    if step.each is not None:
        lines.append(f"{indent}{corner}for each of {'.'.join(step.each)}: {_cut(step)}")
        indent, corner, trunk = indent + trunk, "└─ ", "   "
    if step.escalate is not None:
        lines.append(f"{indent}{corner}where its {step.escalate.by} is below {step.escalate.below:g}:")
        indent, corner, trunk = indent + trunk, "└─ ", "   "
    version = "" if step.version == -1 else f" version {step.version}"
    lines.append(f"{indent}{corner}{step.name}: {step.model}{version}, {_seen(vision)}")
    following = graph.following(number)
    if following and graph.steps[following[0]].escalate is None:
        lines.append(f"{indent}{trunk}keeps {_kept(step)}")
    for place, other in enumerate(following):
        lines += _branch(graph, seen, other, indent + trunk, last=place == len(following) - 1)
    return lines


def _seen(vision: VisionSettings | None) -> str:
    if vision is None:
        return "takes no images"
    height, width = vision.image.size or vision.sides
    labels = f", {len(vision.labels)} labels" if vision.labels else ""
    return f"{vision.task}, sees {width} × {height}{labels}"


def _cut(step: PipelineStep) -> str:
    crop = step.crop
    if crop.rectify:
        stretched = f", stretched {crop.stretch:g} times" if crop.stretch != 1.0 else ""
        return f"made straight{stretched}, {crop.height} high, {' or '.join(map(str, crop.widths))} wide"
    words = ["cut out"]
    words += [f"{crop.pad:.0%} more on every side"] if crop.pad else []
    words += ["square"] if crop.square else []
    words += [f"at least {crop.least} pixels"] if crop.least > 1 else []
    return ", ".join(words)


def _kept(step: PipelineStep) -> str:
    keep = step.keep
    labels = ", ".join(keep.labels[:_SHOWN]) + (", …" if len(keep.labels) > _SHOWN else "")
    score = f" with a score of {keep.score:g} or more" if keep.score else ""
    return f"at most {keep.most} {f'of {labels}' if labels else 'things'}{score}"


def _attached(graph: PictureGraph) -> list[str]:
    found = []
    for number, step in enumerate(graph.steps):
        if number == graph.base:
            continue
        names = [step.name]
        at = step
        while at.each is not None:
            names.insert(0, f"{'detections' if at.each[1] == 'boxes' else 'regions'}[…]")
            source = graph.steps[graph.settings.numbered(at.each[0])]
            if source.each is not None:
                names.insert(0, source.name)
            at = source
        found.append(".".join(names))
    return found
