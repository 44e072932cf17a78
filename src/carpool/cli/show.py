"""Shows tables and sentences on stdout, and progress on stderr."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from carpool.cli.terminal_text import printable

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

_SOON_S = 2.0
_SAY_EVERY_S = 5.0
_UNWRAPPED = 10_000  # columns


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def count_label(name: str) -> str:
    """Returns the word that is printed for a count; --json keeps the name of the field."""
    return "rejected" if name == "refused" else name


def count(number: int, thing: str) -> str:
    """Returns "1 replica" or "2 replicas"."""
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


def console() -> Console:
    """Returns a console as wide as the terminal, or one that wraps nothing in a pipe without COLUMNS."""
    from rich.console import Console

    wraps = sys.stdout.isatty() or "COLUMNS" in os.environ
    return Console() if wraps else Console(width=_UNWRAPPED)


def table(titles: Sequence[str], rows: Iterable[Sequence[str]], *, left: Collection[str] = ()) -> None:
    """Prints it: figures to the right, words in the columns named `left`."""
    console().print(made_table(titles, rows, left=left))


def made_table(
    titles: Sequence[str], rows: Iterable[Sequence[str]], *, left: Collection[str] = ()
) -> RenderableType:
    """Returns the same, to be shown with other things."""
    from rich.table import Table
    from rich.text import Text

    made = Table(box=None, pad_edge=False, header_style="bold", show_header=any(titles))
    for title in titles:
        made.add_column(printable(title), justify="left" if title in left else "right")
    for row in rows:
        made.add_row(*(Text(printable(cell)) for cell in row))
    return made


def paragraph(text: str, bullet: str = "") -> None:
    """Prints a paragraph, wrapped to the terminal and indented behind its bullet."""
    from rich.padding import Padding
    from rich.text import Text

    shown, text = console(), printable(text)
    if not bullet:
        shown.print(Text(text))
        return
    wrapped = Text(text).wrap(shown, max(20, shown.width - len(bullet)))
    for number, line in enumerate(wrapped):
        indent = Text(bullet if number == 0 else " " * len(bullet))
        shown.print(Padding(indent + line, 0, expand=False))


class _Lines:
    """Shows progress in a log or a pipe: a line now and then, and none for what is soon over."""

    def __init__(self) -> None:
        self._next = time.monotonic() + _SOON_S

    def say(self, text: str) -> None:
        now = time.monotonic()
        if now >= self._next:
            self._next = now + _SAY_EVERY_S
            print(f"carpool: {text}", file=sys.stderr, flush=True)


@contextmanager
def steps(what: str, total: int) -> Iterator[Callable[[], None]]:
    """Call what it yields once for every finished part of the work."""
    if not sys.stderr.isatty():
        lines, done = _Lines(), 0

        def finished() -> None:
            nonlocal done
            done += 1
            if done < total:
                lines.say(f"{what}: {done} of {total}")

        yield finished
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(what, total=total)
        yield lambda: progress.advance(task)


@contextmanager
def status(what: str) -> Iterator[Callable[[str], None]]:
    """Shows work whose length is not known: call what it yields with what is being done now."""
    if not sys.stderr.isatty():
        yield _Lines().say
        return
    from rich.console import Console

    with Console(stderr=True).status(what) as spinner:
        yield spinner.update
