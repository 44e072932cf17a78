"""Runs an ensemble: its steps are bound to the models that are there now, and to the steps of nested ones."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import cast

from carpool.config.model import ModelStep
from carpool.core.remaining import Step
from carpool.engine.models.served import Served
from carpool.engine.models.stepped_runtime import SteppedRuntime
from carpool.engine.routes.stepped_route import Binding, BoundStep, ServedStep
from carpool.engine.run.batch import Route, Work
from carpool.extensions.ensembles.ensemble_graph import EnsembleGraph, check_models
from carpool.extensions.ensembles.ensemble_route import EnsembleRoute
from carpool.extensions.ensembles.settings import ensemble_settings


class EnsembleRuntime(SteppedRuntime[EnsembleRoute]):
    _field = "ensemble_scheduling.step"

    # ---- loading ----------------------------------------------------------------------------------------

    def _made_route(self) -> EnsembleRoute:
        served, config = self.served, self.served.config
        served.signature = replace(served.signature, told=True)  # its steps are, if they want to know
        settings = ensemble_settings(config)
        assert settings is not None
        return EnsembleRoute(
            served.name,
            EnsembleGraph(config),
            served.signature,
            self._bind,
            served.counters.answered,
            most=settings.max_inflight,
            memory=self._models.memory,
        )

    def _bound(self, binding: Binding, /) -> Iterable[str]:
        """Returns what is known with its models, in words."""
        self.served.labels = self._labels_of(binding)
        return _words(self.steps, binding, self.served.slo)

    def _bind(self) -> Binding:
        """Returns the models of its steps as they are now. Raises what is missing, or does not fit any
        more."""
        found = [self._found(step) for step in self.steps]
        check_models(self.served.config, [served.signature for _, served, _ in found])
        steps: list[BoundStep] = []
        leaves: list[Step] = []
        ends: dict[int, list[int]] = {}  # by step: the leaves that it ends with
        models: list[ServedStep] = []
        for step in EnsembleGraph(self.served.config).steps:
            key, served, route = found[step.number]
            before = tuple(sorted(leaf for other in step.after for leaf in ends[other]))
            inner = self._leaves_of(served, route, before, len(leaves))
            steps.append(BoundStep(step, key, served, route, len(leaves)))
            follows = {number for leaf in inner for number in leaf.after}
            ends[step.number] = [n for n in range(len(leaves), len(leaves) + len(inner)) if n not in follows]
            leaves += inner
            models += [served, *(route.binding.models if isinstance(route, EnsembleRoute) else ())]
        binding = Binding(tuple(leaves), tuple(models), tuple(steps))
        if self.served.promises:
            self._order_turns(binding)
        return binding

    @staticmethod
    def _leaves_of(served: Served, route: Route, before: tuple[int, ...], first: int) -> list[Step]:
        if not isinstance(route, EnsembleRoute):
            assert served.scheduler is not None  # only ensembles and what writes have none
            return [Step(served.scheduler, before)]
        return [
            leaf._replace(after=tuple(first + number for number in leaf.after) or before)
            for leaf in route.binding.leaves
        ]

    def _labels_of(self, binding: Binding) -> Mapping[str, Sequence[str]]:
        """Returns the labels of an output: those of the model that writes it."""
        written: dict[str, tuple[ServedStep, str]] = {
            tensor: (bound.served, name) for bound in binding.steps for name, tensor in bound.step.outputs
        }
        found = {tensor: served.labels.get(name, ()) for tensor, (served, name) in written.items()}
        named = self.served.signature.output_named
        return {name: labels for name, labels in found.items() if labels and name in named}

    # ---- while it serves --------------------------------------------------------------------------------

    def asked_for(self, work: Work) -> Iterable[tuple[Work, Served]] | None:
        """A pipeline's requests are asked for by front ends, so that none of its work waits here."""
        run = self._stepped.open.get(work) if isinstance(self._stepped, EnsembleRoute) else None
        if run is None:
            return None
        return [(step, cast("Served", bound.served)) for step, bound in run.under_way.items()]


def _words(steps: Sequence[ModelStep], binding: Binding, slo: float) -> Iterator[str]:
    names = " → ".join(bound.step.model for bound in binding.steps)
    yield f"{len(steps)} steps, in an order that works: {names}."
    if slo < float("inf"):
        yield (
            f"One SLO of {slo * 1e3:g} ms for all steps: each step plans with what the later ones leave of "
            "it, which is learned."
        )
