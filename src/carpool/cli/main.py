"""`carpool`: the verbs, and errors that fit on one line."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable
from dataclasses import fields
from typing import Annotated, Any, get_type_hints

import typer
from typer.core import TyperGroup

from carpool import __version__
from carpool.cli.cache_command import CacheVerb
from carpool.cli.cascade_command import CascadeVerb
from carpool.cli.demo_command import Demo
from carpool.cli.deploy_command import DeployVerb
from carpool.cli.doctor_command import Doctor
from carpool.cli.drift_command import DriftVerb
from carpool.cli.evaluate_command import Evaluate
from carpool.cli.init_command import Init
from carpool.cli.inspect_command import Inspect
from carpool.cli.label_command import LabelVerb
from carpool.cli.load_command import Load
from carpool.cli.models_command import ModelsVerb
from carpool.cli.pipeline_command import PipelineVerb
from carpool.cli.plan_command import PlanVerb
from carpool.cli.predict_command import Predict
from carpool.cli.profile_command import ProfileVerb
from carpool.cli.registry_command import RegistryVerb
from carpool.cli.rollout_command import RolloutVerb
from carpool.cli.serve_command import Serve, plain_flags
from carpool.cli.simulate_command import Simulate
from carpool.cli.sweep_command import Sweep
from carpool.cli.verb_options import LISTED_LAST
from carpool.cli.watch_command import WatchVerb
from carpool.errors import CarpoolError

_PLAINER = {  # typer's words, old and new, and ours
    r"'[^']*' is not a valid float": "it must be a number",
    r"'[^']*' is not a valid int(eger)?": "it must be a whole number",
    "Input should be a valid number, unable to parse string as a number": "it must be a number",
    "Input should be a valid integer, unable to parse string as an integer": "it must be a whole number",
    "Value error, ": "",
}


class OneLineErrors(TyperGroup):
    """Whatever was wrong: one line on stderr, no traceback; exit code 2 if it was the command, else 1."""

    def main(self, args: Any = None, *, standalone_mode: bool = True, **extra: Any) -> Any:  # type: ignore[override]
        try:
            words = list(sys.argv[1:] if args is None else args)
            words = plain_flags(words) if words[:1] == ["serve"] else words
            result = super().main(words, standalone_mode=False, **extra)
        except Exception as error:
            if not standalone_mode or (message := _one_line(error)) is None:
                raise
            print(f"carpool: {message}", file=sys.stderr)
            sys.exit(getattr(error, "exit_code", 2) if isinstance(error, CarpoolError) else 2)
        if standalone_mode:
            sys.exit(result if isinstance(result, int) else 0)
        return result


def _one_line(error: Exception) -> str | None:
    """What to tell the user; nothing for an error that is ours, which must not be hidden."""
    if isinstance(error, CarpoolError):
        return error.message
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
    """The function that typer expects. A verb is a frozen dataclass: its fields are the options, and `run`
    does the work and may return an exit code."""

    def command(**given: Any) -> None:
        code = verb(**given).run()
        if code:
            raise typer.Exit(code)

    hints: dict[str, Any] = get_type_hints(verb, include_extras=True)
    for one in fields(verb):
        if "option" in one.metadata:
            hints[one.name] = Annotated[hints[one.name], one.metadata["option"]]
    parameters = inspect.signature(verb).parameters.values()
    typed = [parameter.replace(annotation=hints[parameter.name]) for parameter in parameters]
    typed.sort(key=lambda parameter: parameter.name in LISTED_LAST)
    command.__signature__ = inspect.Signature(typed)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in typed}
    command.__doc__ = verb.__doc__
    return command


app = typer.Typer(
    cls=OneLineErrors, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="markdown"
)
app.command("serve")(_as_command(Serve))
app.command("inspect")(_as_command(Inspect))
app.command("init")(_as_command(Init))
app.command("predict")(_as_command(Predict))
app.command("watch")(_as_command(WatchVerb))
app.command("evaluate")(_as_command(Evaluate))
app.command("models")(_as_command(ModelsVerb))
app.command("pipeline")(_as_command(PipelineVerb))
app.command("registry")(_as_command(RegistryVerb))
app.command("drift")(_as_command(DriftVerb))
app.command("label")(_as_command(LabelVerb))
app.command("cache")(_as_command(CacheVerb))
app.command("cascade")(_as_command(CascadeVerb))
app.command("rollout")(_as_command(RolloutVerb))
app.command("demo")(_as_command(Demo))
app.command("load")(_as_command(Load))
app.command("profile")(_as_command(ProfileVerb))
app.command("sweep")(_as_command(Sweep))
app.command("simulate")(_as_command(Simulate))
app.command("plan")(_as_command(PlanVerb))
app.command("deploy")(_as_command(DeployVerb))
app.command("doctor")(_as_command(Doctor))


def _show_version(asked: bool) -> None:
    if asked:
        print(f"carpool {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def carpool(
    context: typer.Context,
    version: Annotated[  # noqa: ARG001 - its callback does the work
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Serve vision models within the latency you promise.

    Answer within 50 ms, or say no early:

        carpool serve resnet50.onnx --slo-ms 50

    What is this model, and how would it be served?

        carpool inspect yolov8n.onnx

    Send a picture to a running server, or traffic:

        carpool predict street.jpg

        carpool load http://localhost:8000 --rate 500 --slo-ms 50

    Show it videos and cameras, five frames a second from each:

        carpool watch recordings/ rtsp://10.0.0.7/stream1 --fps 5

    Is the new version worse than the old one on labelled pictures?

        carpool evaluate models/detector --data val.json --pictures val --version 2 --against 1

    How long do its batches take here, and what could be promised?

        carpool profile resnet50.onnx --slo-ms 30,50,100

    What does it carry in time at which rate, under a promise and under fixed knobs? A report with pictures:

        carpool sweep resnet50.onnx --slo-ms 50

    What would happen at three times the traffic that a model can carry? (4 ms a batch, 1 ms an image)

        carpool simulate --curve 4+1 --slo-ms 50 --load 3 --compare

    How many GPUs for 500 requests a second that triple now and then?

        carpool plan --curve 4+1 --slo-ms 50 --rate 500 --surge 3 --surge-seconds 10
    """
    if context.invoked_subcommand is None:
        print(context.get_help())


main = app
