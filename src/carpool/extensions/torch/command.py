"""Implements `carpool compile`: torch.compile ahead of the first start, into a file that servers find."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from carpool.cli import show
from carpool.cli import verb_options as o


@dataclass(frozen=True, kw_only=True)
class CompileVerb:
    """Compile a PyTorch model for the device of this machine, and write the result beside it.

    A server with the same model, settings, torch and device is then at full speed within seconds:

        carpool compile models/resnet50
        carpool serve models

    The file is code: a server opens it only beside a model whose own code it runs, or in its cache folder.
    """

    model: Path = o.argument("A model folder, or a repository with --name.")
    name: str | None = o.option(None, "Which model of a repository.")
    out: Path | None = o.option(None, "Folder for the file. Default: the folder of the model's version.")

    def run(self) -> None:
        from carpool.extensions.torch.compiled_model import compile_model
        from carpool.lab.batch_profile import ProfileQuestion, the_model

        source = the_model(ProfileQuestion(self.model, self.name))
        with show.status("reading the model") as tell:
            done = compile_model(source, self.out, tell)
        for one in done.sizes:
            what = f"not compiled: {one.why_not}" if one.why_not else _faster(one.before, one.after)
            print(f"batches of {one.size}: {what}")
        print(f"{done.file}: {done.file.stat().st_size / 1e6:.1f} MB")


def _faster(before: float, after: float) -> str:
    if not after:
        return "compiled"
    return f"{before * 1e3:.3g} ms, compiled {after * 1e3:.3g} ms"
