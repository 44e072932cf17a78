"""Chooses which model answers for a task, where a request names none."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from carpool.config.model import Task, task_names
from carpool.errors import NotFound
from carpool.frontend.access.keys import Principal
from carpool.frontend.demands import NotLoaded
from carpool.frontend.documents import task_of
from carpool.link.catalog import Catalog, ModelEntry


def task_routes() -> Mapping[str, str]:
    """Returns where any model of a task can be asked. Tasks are imported only where packages bring others."""
    if len(task_names()) == len(Task):
        return {task: task.route for task in Task if task.route}
    from carpool.vision.tasks import kinds

    return {name: kind.route for name, kind in kinds().items() if kind.route}


_MOST_MAYBE = 3  # models that an error names


def default_model(catalog: Catalog, task: str, who: Principal | None = None) -> ModelEntry:
    """Returns the first that was configured for a task, of those that the key is for; failing that, the
    first."""
    found = [entry for entry in in_order(catalog) if task_of(entry) == task]
    if task == Task.READ:  # most models read one line, and a client that names none sends a page
        found.sort(key=lambda entry: entry.vision is None or not entry.vision.get("pages"))
    for entry in found:
        if who is None or who.may_use(entry.name):
            return entry
    if found:
        return found[0]
    for name, declared in catalog.server.on_demand.items():
        if declared == task and name not in catalog.newest and (who is None or who.may_use(name)):
            raise NotLoaded(f"{name}, which is for {task}, is not loaded", name)
    there = {str(found): None for found in map(task_of, in_order(catalog)) if found is not None}
    tasks = f"there are models for {', '.join(there)}" if there else "no model takes images"
    asks = [
        f"; {name} is not loaded: name it" for name in catalog.server.on_demand if name not in catalog.newest
    ]
    asks += [
        f"; {entry.name} may be: {entry.published.ask}" for entry in in_order(catalog) if entry.published.ask
    ]
    maybe = "".join(asks[:_MOST_MAYBE])
    raise NotFound(f"no model is for {task}; {tasks}{maybe}", reason="no-task")


def usable(catalog: Catalog, who: Principal | None) -> list[tuple[ModelEntry, str]]:
    """Returns the models that take images and that a key is for, each with its task."""
    found = [(entry, task) for entry in in_order(catalog) if (task := task_of(entry)) is not None]
    return [(entry, task) for entry, task in found if who is None or who.may_use(entry.name)]


def usable_tasks(catalog: Catalog, who: Principal | None) -> dict[str, str]:
    """Returns the tasks of those models by their names, with those that are loaded when they are asked for;
    the task of such a model may be unknown, and is empty then."""
    found = {entry.name: task for entry, task in usable(catalog, who)}
    later = {name: task for name, task in catalog.server.on_demand.items() if name not in catalog.newest}
    return found | {name: task for name, task in later.items() if who is None or who.may_use(name)}


def in_order(catalog: Catalog) -> Iterable[ModelEntry]:
    """Returns the newest version of each model, in the order in which they were configured."""
    names_in_order = dict.fromkeys(line.name for line in catalog.index)
    return [catalog.newest[name] for name in names_in_order if name in catalog.newest]
