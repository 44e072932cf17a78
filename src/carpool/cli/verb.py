"""A verb with many options is a frozen dataclass: its fields are the options, and `run` does the work."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Protocol, get_type_hints


class Verb(Protocol):
    def run(self) -> None: ...


def as_command(verb: Callable[..., Verb]) -> Callable[..., None]:
    """The function that typer expects, with the fields of the dataclass as its parameters."""

    def command(**given: Any) -> None:
        verb(**given).run()

    hints = get_type_hints(verb, include_extras=True)
    parameters = inspect.signature(verb).parameters.values()
    typed = [parameter.replace(annotation=hints[parameter.name]) for parameter in parameters]
    command.__signature__ = inspect.Signature(typed)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in typed}
    command.__doc__ = verb.__doc__
    return command
