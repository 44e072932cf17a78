"""Represents a picture on its way through a pipeline whose device keeps it: what its front end knows of it.

The file stays in its slot until the request is over. Its pixels are with the device, which decoded it for
the first step, for as long as the lease behind the file stands (memory/picture_leases.py). Where the device
had no room for them, the file is decoded here, and crops are cut as for pictures that no device decodes.
"""

from __future__ import annotations

from collections.abc import Callable

from carpool.memory.arena import Slot
from carpool.memory.layout import bind_file
from carpool.memory.picture_leases import Lease
from carpool.vision.decode import Decoded


class DevicePicture:
    """Belongs to the loop's thread, but for `decoded`. Ends once, whatever becomes of its request."""

    def __init__(self, slot: Slot) -> None:
        """Takes a file with room for a lease behind it."""
        self._lease = Lease(slot.view)
        self._slot: Slot | None = slot.share()
        self.token = self._lease.token

    @property
    def kept(self) -> bool:
        """Returns whether the device keeps it, after the first step."""
        return self._lease.kept

    def borrowed(self, decode: Callable[[memoryview], Decoded]) -> tuple[Callable[[], Decoded], Slot]:
        """Returns what decodes the file, for a thread, and the slot that it lies in, to be given back after
        that."""
        assert self._slot is not None
        slot = self._slot.share()
        return lambda: decode(bind_file(slot.view, 0).data), slot

    def end(self) -> None:
        slot, self._slot = self._slot, None
        if slot is not None:
            self._lease.end()
            slot.release()
