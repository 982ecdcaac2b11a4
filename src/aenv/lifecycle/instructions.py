"""What the machine wants done. The runner carries instructions out, in order, and reports back with events."""

from enum import Enum, auto


class Instruction(Enum):
    """An order to the runner."""

    LAUNCH = auto()
    """Acquire what it needs, start, make ready; then Launched or LaunchFailed."""
    PAUSE = auto()
    """Keep its state; then Paused or PauseFailed, with the guest running."""
    RESUME = auto()
    """Start what was kept; then Resumed or ResumeFailed."""
    CAPTURE = auto()
    """Take its state for a snapshot or a fork; then Captured or CaptureFailed."""
    ROLL_BACK = auto()
    """Replace it by one of its snapshots; then RolledBack or RollbackFailed."""
    CANCEL = auto()
    """Stop what is in flight; no event follows from it."""
    RELEASE = auto()
    """End the VMM and release all it held, but keep the paused state; no event follows."""
    ARM_TIMER = auto()
    """Report the end of its TTL when that comes (replaces an armed timer)."""
    DISARM_TIMER = auto()
    """Report no end of its TTL any more."""
    TEAR_DOWN = auto()
    """End the VMM and release everything, whatever exists; then TornDown."""
