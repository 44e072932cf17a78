"""How a benchmark that starts servers is run: what it says on the way, and how it ends."""

import signal
import sys
from collections.abc import Callable

from carpool.lab.load.generator import spare_the_collector


def tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def run_program(main: Callable[[], int], name: str, *errors: type[Exception]) -> None:
    """These errors are one line on stderr; servers are stopped on the way out, also after a signal."""
    spare_the_collector()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        sys.exit(main())
    except errors as error:
        sys.exit(f"{name}: {error}")
