"""Implements `carpool optimize`: a cheaper form of a model, with proof, as its next version."""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from enum import StrEnum
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from carpool.cli import show
from carpool.cli import verb_options as o
from carpool.cli.written_files import make_folder, write_file
from carpool.errors import InvalidInput

if TYPE_CHECKING:
    from carpool.extensions.optimize.optimizing import Optimized, Optimizing, Question
    from carpool.lab.evaluate.scores import Measure

Engine = StrEnum("Engine", ["onnxruntime", "openvino"])
_COLUMNS = ("form", "capacity", "with decoding", "gain", "loss", "95 %", "close calls", "result")
_LOWEST_SCORE = 0.001  # of a box that is held against labels


@dataclass(frozen=True, kw_only=True)
class OptimizeVerb(o.AsksServer):
    """Find a cheaper form of a model that answers alike, and write it as the next version.

    Other engines and int8 are tried on images of yours. The best form is written as models/detector/2:

        carpool optimize models/detector --pictures samples/ --slo-ms 250

    With labels, the loss is one of accuracy; at most 0.3 percentage points:

        carpool optimize models/animals --pictures val/ --labels val.csv --loss 0.3

    Written, and then rolled out by a running server, first as a shadow:

        carpool optimize models/detector --pictures samples/ --serve http://localhost:8000

    Nothing is written where no form is cheaper and as good. A run that was interrupted goes on where it
    was.
    """

    model: Path = o.argument("A model folder with numbered versions, or a repository with --name.")
    name: str | None = o.option(None, "Which model of a repository.")
    pictures: Path | None = o.option(
        None, "Folder of images: some for calibration, the others for the proof.", metavar="DIR"
    )
    recording: Path | None = o.option(
        None,
        "For a model that takes tensors: an .npz file with an array for each input, or a .jsonl file of v2 "
        "requests.",
        metavar="FILE",
    )
    calibration: Path | None = o.option(
        None, "Folder of images for calibration alone. Default: a part of --pictures.", metavar="DIR"
    )
    labels: Path | None = o.option(
        None, "Labels of --pictures, as carpool evaluate reads them with --data.", metavar="FILE"
    )
    names: Path | None = o.option(
        None,
        "A .csv with the model's name of each class of the labels: a line is data,model.",
        metavar="FILE",
    )
    loss: float = o.option(0.5, "Largest accepted loss, in percentage points.")
    slo_ms: float | None = o.option(None, "SLO to measure capacity by, in ms. Default: the model's.")
    held: int = o.option(300, "Number of images for the proof, at most.", min=20, max=100_000)
    engine: Engine | None = o.option(None, "Only forms for this engine. Default: all that are installed.")
    least_gain: float = o.option(1.1, "Least gain in capacity that is worth a version.")
    turns: int = o.option(5, "Number of times that each form is measured.", min=2, max=100)
    search_s: float = o.option(90.0, "Time for the search of sensitive layers, in seconds.")
    work: Path | None = o.option(
        None, "Folder for intermediate files and the reports. Default: in the cache folder.", metavar="DIR"
    )
    dry_run: bool = o.option(False, "Do not write a version.")
    serve: str | None = o.option(
        None, "A running server that rolls the version out: as a shadow first, then in steps.", metavar="URL"
    )

    def run(self) -> int:
        """Exits with 1 if nothing is written."""
        from carpool.extensions.optimize.optimize_report import headline, reports, rows
        from carpool.extensions.optimize.optimizing import Optimizing, next_version, write_version

        loss = o.number("--loss", self.loss, most=100)
        if self.serve is not None and self.dry_run:
            raise InvalidInput("--serve rolls a version out, and --dry-run writes none: give one of them")
        with show.status("reading the model") as tell, ExitStack() as stack:
            question = self._question(loss)
            optimizing = Optimizing(question, tell)
            stack.callback(optimizing.close)
            number = None if self.dry_run else next_version(optimizing.folder)
            found = optimizing.run()
        if found.winner and number is not None:
            found.written = number
        made = reports(found)
        for name, data in made.items():
            write_file(question.work / name, data)
        if found.winner and number is not None:
            write_version(optimizing.folder, number, optimizing.winner_file(found), made)
        if self.as_json:
            print(json.dumps(found.document(), indent=2, ensure_ascii=False))
        else:
            show.table(_COLUMNS, rows(found), left=("form", "result"))
            show.paragraph("")
            show.paragraph(headline(found))
            self._print(found, optimizing, question.work)
        if found.written and self.serve is not None:
            self._roll_out(found, self.serve)
        return 0 if found.winner else 1

    def _print(self, found: Optimized, optimizing: Optimizing, work: Path) -> None:
        from carpool.extensions.optimize.optimize_report import facts

        for fact in facts(found):
            show.paragraph(fact, "· ")
        if found.written:
            show.paragraph(f"Written as {optimizing.folder / str(found.written)}.", "· ")
        print(f"· Report: {work / 'optimize.html'}")

    def _roll_out(self, found: Optimized, url: str) -> None:
        from carpool.lab.load.facts import RunningServer

        asked = {"action": "start", "version": found.written, "reason": f"carpool optimize: {found.why}"}
        server = RunningServer(url, self.trust())
        state = server.send(f"/v2/models/{quote(found.model, safe='')}/rollout", asked)
        print(
            f"carpool: version {found.written} is {state.get('state', 'started')} at {url}", file=sys.stderr
        )

    # ---- what was asked -------------------------------------------------------------------------------

    def _question(self, loss: float) -> Question:
        from carpool.extensions.optimize.optimizing import Question

        if (self.pictures is None) == (self.recording is None):
            raise InvalidInput("give --pictures, or --recording for a model that takes tensors")
        if self.recording is not None and (self.labels is not None or self.calibration is not None):
            raise InvalidInput("--labels and --calibration go with --pictures")
        measure = self._measure()
        files = list(measure.files) if measure is not None else _images(self.pictures)
        work = self._work_folder()
        make_folder(work)
        return Question(
            path=self.model,
            name=self.name,
            pictures=files,
            recording=self.recording,
            calibration=_images(self.calibration),
            labels=measure,
            loss=loss,
            slo=None if self.slo_ms is None else o.number("--slo-ms", self.slo_ms, above=0, most=1e7) / 1e3,
            held=self.held,
            engines=tuple(Engine) if self.engine is None else (self.engine,),
            least_gain=o.number("--least-gain", self.least_gain, least=1.0, most=100),
            turns=self.turns,
            search_s=o.number("--search-s", self.search_s, most=86_400),
            work=work,
        )

    def _measure(self) -> Measure | None:
        from carpool.lab.evaluate.evaluation import measure_of
        from carpool.lab.evaluate.labelled_data import read_data, read_names

        if self.labels is None:
            if self.names is not None:
                raise InvalidInput("--names goes with --labels")
            return None
        try:
            names = {} if self.names is None else read_names(self.names)
            return measure_of(read_data(self.labels, self.pictures), names, _LOWEST_SCORE, None)
        except InvalidInput as error:
            raise InvalidInput(error.message.replace("--data", "--labels")) from None

    def _work_folder(self) -> Path:
        from carpool.config.server import usual_folder

        if self.work is not None:
            return self.work
        name = blake2b(f"{self.model.resolve()}\0{self.name or ''}".encode(), digest_size=6).hexdigest()
        return usual_folder("cache") / "optimize" / f"{self.name or self.model.resolve().name}-{name}"


def _images(folder: Path | None) -> list[Path]:
    from carpool.cli.predict_command import pictures

    if folder is None:
        return []
    if not folder.is_dir():
        raise InvalidInput(f"there is no folder {folder}")
    return pictures([str(folder)])
