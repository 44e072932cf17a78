"""Implements `carpool`: the verbs, and errors that fit on one line."""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from collections.abc import Callable
from dataclasses import fields
from typing import Annotated, Any, get_type_hints

import typer
from typer.core import TyperGroup

from carpool import __version__
from carpool.cli.help_page import Verb, option_rows, page
from carpool.cli.terminal_text import guard_terminal
from carpool.cli.verb_options import LISTED_LAST
from carpool.compiling import form, other_form
from carpool.errors import CarpoolError

_PLAINER = {  # typer's words, old and new, and ours
    r"'[^']*' is not a valid float": "it must be a number",
    r"'[^']*' is not a valid int(eger)?": "it must be a whole number",
    "Input should be a valid number, unable to parse string as a number": "it must be a number",
    "Input should be a valid integer, unable to parse string as an integer": "it must be a whole number",
    "Value error, ": "",
}


_PANELS = {  # each verb in a file of its own, which is read when somebody asks for it
    "Serve models": {"serve": "Serve", "doctor": "Doctor", "demo": "Demo"},
    "Prepare a model": {
        "inspect": "Inspect",
        "init": "Init",
        "pipeline": "PipelineVerb",
        "cascade": "CascadeVerb",
        "compile": "CompileVerb",
        "registry": "RegistryVerb",
    },
    "Use a running server": {
        "predict": "Predict",
        "watch": "WatchVerb",
        "top": "TopVerb",
        "models": "ModelsVerb",
        "rollout": "RolloutVerb",
        "cache": "CacheVerb",
    },
    "Choose an SLO and plan capacity": {
        "profile": "ProfileVerb",
        "load": "Load",
        "sweep": "Sweep",
        "simulate": "Simulate",
        "plan": "PlanVerb",
        "deploy": "DeployVerb",
    },
    "Check the results": {"evaluate": "Evaluate", "drift": "DriftVerb", "label": "LabelVerb"},
}
_VERBS = {verb: name for panel in _PANELS.values() for verb, name in panel.items()}


class Verbs(TyperGroup):
    """Whatever was wrong: one line on stderr, no traceback; exit code 2 if it was the command, else 1.

    A verb becomes a command when it is asked for: to make all of them takes longer than most of them run.
    """

    def list_commands(self, ctx: Any) -> list[str]:  # noqa: ARG002
        return list(_VERBS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in _VERBS:  # one of them may have been meant
            self.commands.update({name: self.get_command(ctx, name) for name in _VERBS})
        elif cmd_name not in self.commands:
            module = importlib.import_module(f"carpool.cli.{cmd_name}_command")
            alone = typer.Typer(add_completion=False, rich_markup_mode=None)
            alone.command(cmd_name, cls=Verb)(_as_command(getattr(module, _VERBS[cmd_name])))
            self.commands[cmd_name] = typer.main.get_command(alone)
        return self.commands.get(cmd_name)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        panels = {title: [self._first_line(ctx, verb) for verb in verbs] for title, verbs in _PANELS.items()}
        panels["Options"] = option_rows(self, ctx)
        formatter.write(page(self, ctx, panels))

    def _first_line(self, ctx: Any, verb: str) -> tuple[str, str]:
        said = (self.get_command(ctx, verb).help or "").split("\n\n")[0]
        return verb, " ".join(said.split())

    def main(self, args: Any = None, *, standalone_mode: bool = True, **extra: Any) -> Any:  # type: ignore[override]
        guard_terminal()
        try:
            words = list(sys.argv[1:] if args is None else args)
            if words[:1] == ["serve"]:
                from carpool.cli.serve_command import plain_flags

                words = plain_flags(words)
            result = super().main(words, standalone_mode=False, **extra)
        except Exception as error:
            if not standalone_mode or (message := _one_line(error)) is None:
                raise
            print(f"carpool: {message}", file=sys.stderr)
            usual = 1 if isinstance(error, OSError) else 2
            sys.exit(getattr(error, "exit_code", usual) if isinstance(error, CarpoolError) else usual)
        if standalone_mode:
            sys.exit(result if isinstance(result, int) else 0)
        return result


def _one_line(error: Exception) -> str | None:
    """Returns what to tell the user; nothing for an error that is ours, which must not be hidden."""
    if isinstance(error, CarpoolError):
        return error.message
    if isinstance(error, OSError) and error.strerror:  # a full disk, a read-only folder, a closed pipe
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    if isinstance(error, typer.Abort):
        return "stopped"
    # Newer typers bring click along under a name of their own, so its errors are known by what they can do.
    explain = getattr(error, "format_message", None)
    if explain is None:
        return None
    message = " ".join(str(explain()).split())
    for formal, plain in _PLAINER.items():
        message = re.sub(formal, plain, message)
    context = getattr(error, "ctx", None)
    asking = context.command_path if context is not None else "carpool"
    return f"{message.rstrip('.')}. Try: {asking} --help"


def _as_command(verb: type[Any]) -> Callable[..., None]:
    """Returns the function that typer expects. A verb is a frozen dataclass: its fields are the options, and
    `run` does the work and may return an exit code."""

    def command(**given: Any) -> None:
        code = verb(**given).run()
        if code:
            raise typer.Exit(code)

    hints: dict[str, Any] = get_type_hints(verb, include_extras=True)
    for one in fields(verb):
        option = one.metadata.get("option")
        if option is not None:
            if hints[one.name] is bool and not option.param_decls:  # a flag without its --no-
                option.param_decls = (f"--{one.name.replace('_', '-')}",)
            hints[one.name] = Annotated[hints[one.name], option]
    parameters = inspect.signature(verb).parameters.values()
    typed = [parameter.replace(annotation=hints[parameter.name]) for parameter in parameters]
    late = {name for base in LISTED_LAST if issubclass(verb, base) for name in base.__annotations__}
    typed.sort(key=lambda parameter: parameter.name in late)
    command.__signature__ = inspect.Signature(typed)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in typed}
    command.__doc__ = verb.__doc__
    return command


app = typer.Typer(cls=Verbs, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


def _show_version(asked: bool) -> None:
    if asked:
        print(f"carpool {__version__} ({form()})\n{other_form()}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def carpool(
    context: typer.Context,
    version: Annotated[  # noqa: ARG001 - its callback does the work
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Serve vision models within a latency SLO.

    Answer within 50 ms, or reject early:

        carpool serve resnet50.onnx --slo-ms 50

    Show what a model is, and how it would be served:

        carpool inspect yolov8n.onnx

    Send an image to a running server, or load:

        carpool predict street.jpg

        carpool load http://localhost:8000 --rate 500 --slo-ms 50

    Measure batch times on this machine, and which SLO they allow:

        carpool profile resnet50.onnx --slo-ms 30,50,100

    Simulate three times the traffic that a model can sustain (4 ms per batch, 1 ms per image):

        carpool simulate --curve 4+1 --slo-ms 50 --load 3 --compare

    Plan the replicas for 500 requests/s that triple now and then:

        carpool plan --curve 4+1 --slo-ms 50 --rate 500 --surge 3

    carpool COMMAND --help explains a command, with examples.
    """
    if context.invoked_subcommand is None:
        print(context.get_help())


main = app
