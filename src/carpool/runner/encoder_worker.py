"""The process of one encoder of a model that writes: `python -m carpool.runner.encoder_worker FD …`.

Started and told what to do by engine/generation/encoder_process.py, with the words and the memory that Python
models' processes have. Three messages come: what to load, where rows go, and then pictures.
"""

from __future__ import annotations

import os
import sys
import traceback
from typing import Any, cast

from carpool.backends.backend import Placement
from carpool.backends.python.python_worker import Made, connect, serve
from carpool.backends.stepper import EncoderOrder, Part, RowMemory, TextHome
from carpool.config.backend_kinds import kind_of
from carpool.link.child_process import spare_the_collector
from carpool.link.typed_json import as_json, read_document
from carpool.memory.batch_region import BatchRegion

_BROKEN = 1


class EncoderWorker:
    def __init__(self, order: EncoderOrder, inputs: BatchRegion, file: int) -> None:
        self._inputs = inputs
        self._file = file
        self._home = cast(TextHome, kind_of(order.config.backend).module())
        placement = Placement(order.instance, order.threads, order.gpu)
        self._encoder = self._home.load_text(order.config, order.version, placement, Part.ENCODER)
        self.form = self._home.row_form(self._encoder.encode([self._encoder.sample()])[0])
        self._rows: RowMemory | None = None

    def answer(self, asked: dict[str, Any]) -> dict[str, Any]:
        if self._rows is None:
            self._rows = self._home.open_rows(self.form, self._file, asked["rows"])
            return {}
        pictures = list(self._inputs.read(asked["inputs"]).values())
        try:
            return {"rows": self._rows.put(asked["pieces"], self._encoder.encode(pictures))}
        except Exception:
            if self._encoder.broken:  # so is everything that this process has on the device
                traceback.print_exc()
                os._exit(_BROKEN)
            raise


def main(arguments: list[str]) -> int:
    channel, inputs, _, (file,) = connect(arguments)

    def make(settings: dict[str, Any]) -> Made:
        (order,) = inputs.read(settings["order"]).values()
        worker = EncoderWorker(read_document(EncoderOrder, order.tobytes()), inputs, file)
        spare_the_collector()
        return {"form": as_json(worker.form)}, worker.answer

    return serve(channel, make)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
