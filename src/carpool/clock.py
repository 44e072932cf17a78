"""The one clock: seconds that never go back, the same for every process of a machine."""

from time import monotonic

now = monotonic
