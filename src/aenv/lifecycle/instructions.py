"""What the machine wants done. The runner carries instructions out, in order, and reports back with events."""

from enum import Enum, auto


class Instruction(Enum):
    """An order to the runner."""

    LAUNCH = auto()
    """Acquire what it needs, boot, make ready; then Launched or LaunchFailed."""
    CANCEL_LAUNCH = auto()
    """Stop a launch in flight; no event follows from it."""
    ARM_TIMER = auto()
    """Report Expired when its TTL runs out (replaces an armed timer)."""
    DISARM_TIMER = auto()
    """Report no expiry any more."""
    TEAR_DOWN = auto()
    """End the VMM and release everything, whatever exists; then TornDown."""
