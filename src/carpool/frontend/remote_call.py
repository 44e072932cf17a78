"""One inference under way, as the front end holds it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from carpool.core.job import INFINITY
from carpool.errors import CarpoolError
from carpool.link.door import Answer, Slot
from carpool.link.templates import Template
from carpool.memory.arena import ArenaSlot
from carpool.observe.logs import logger

if TYPE_CHECKING:
    from carpool.frontend.front_link import FrontLink

_log = logger("link")


class RemoteCall:
    """Implements `Call`. It holds the input slot until the engine has answered, the output slot until it is
    released, and both for a cancelled call until the engine says that nothing touches them.

    While inputs are still to come their slot is not the call's: it is given with `ready`.
    """

    __slots__ = ("_done", "admitted", "expires", "link", "number", "output", "slot", "template")

    template: Template  # from here on set before it is submitted
    number: int

    def __init__(
        self,
        slot: Slot | None,
        done: Callable[[Answer], None],
        admitted: Callable[[], None] | None = None,
    ) -> None:
        self.slot = slot
        self._done: Callable[[Answer], None] | None = done
        self.admitted = admitted
        self.output: ArenaSlot | None = None
        self.link: FrontLink | None = None  # while the engine has it
        self.expires = INFINITY  # when the client is answered without the engine

    def ready(self, slot: Slot) -> None:
        self.slot = slot
        if self.link is not None:
            self.link.ready(self)
        else:  # it was answered while its inputs were on their way
            slot.release()

    def cancel(self) -> None:
        wanted, self._done = self._done is not None, None
        if self.link is None:
            self.release()
        elif wanted:
            self.link.cancel(self)

    def give_up(self, error: CarpoolError) -> None:
        """Answer without the engine, which may still touch the memory: it is kept until the engine says that
        it is done with it, or is gone. Never raises."""
        done, self._done = self._done, None
        if done is not None and self.link is not None:
            self.link.cancel(self)
            try:
                done(Answer(error=error))
            except Exception:
                _log.exception("answer-failed")

    def release(self) -> None:
        if self.link is not None:
            return  # the engine has it: `finish` releases what nobody waits for
        if self.output is not None:
            self.output.release()
            self.output = None
        if self.slot is not None:
            self.slot.release()

    @property
    def wanted(self) -> bool:
        return self._done is not None

    def finish(self, answer: Answer) -> None:
        """The engine is done with it. Never raises, since others wait behind it."""
        self.link = self.admitted = None
        if self.slot is not None:
            self.slot.release()
        done, self._done = self._done, None
        if done is None:
            self.release()
            return
        try:
            done(answer)
        except Exception:
            _log.exception("answer-failed")
            self.release()
