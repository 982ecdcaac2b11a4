"""The transition table and the one function that reads it.

``step(life, event)`` is pure: the same log of events always gives the same lives. A pair that is not in the table
is a fault of the caller and raises IllegalTransition; events that may arrive late are in the table and change nothing.
"""

from collections.abc import Iterable

from aenv.lifecycle.events import (
    Adopted,
    CreateRequested,
    DeleteRequested,
    DiskLost,
    Event,
    Expired,
    Faulted,
    HostRestarted,
    Launched,
    LaunchFailed,
    Orphaned,
    TornDown,
    TtlChanged,
    VmmExited,
)
from aenv.lifecycle.instructions import Instruction as Do
from aenv.lifecycle.states import CREATING, ENDED, KILLING, NEW, RUNNING, Life, Operation, Position, Stable


class IllegalTransition(Exception):
    """The event makes no sense in this position."""


Row = tuple[Position, tuple[Do, ...]]

TABLE: dict[tuple[Position, type[Event]], Row] = {
    # from, event                 -> to, orders
    (NEW, CreateRequested): (CREATING, (Do.LAUNCH,)),
    #
    (CREATING, Launched): (RUNNING, (Do.ARM_TIMER,)),
    (CREATING, LaunchFailed): (KILLING, (Do.TEAR_DOWN,)),
    (CREATING, DeleteRequested): (KILLING, (Do.CANCEL_LAUNCH, Do.TEAR_DOWN)),
    (CREATING, Faulted): (KILLING, (Do.CANCEL_LAUNCH, Do.TEAR_DOWN)),
    (CREATING, HostRestarted): (KILLING, (Do.TEAR_DOWN,)),
    (CREATING, Orphaned): (KILLING, (Do.CANCEL_LAUNCH, Do.TEAR_DOWN)),
    #
    (RUNNING, TtlChanged): (RUNNING, (Do.ARM_TIMER,)),
    (RUNNING, Adopted): (RUNNING, (Do.ARM_TIMER,)),
    (RUNNING, DeleteRequested): (KILLING, (Do.DISARM_TIMER, Do.TEAR_DOWN)),
    (RUNNING, Expired): (KILLING, (Do.DISARM_TIMER, Do.TEAR_DOWN)),
    (RUNNING, VmmExited): (KILLING, (Do.DISARM_TIMER, Do.TEAR_DOWN)),
    (RUNNING, DiskLost): (KILLING, (Do.DISARM_TIMER, Do.TEAR_DOWN)),
    (RUNNING, Faulted): (KILLING, (Do.DISARM_TIMER, Do.TEAR_DOWN)),
    (RUNNING, HostRestarted): (KILLING, (Do.TEAR_DOWN,)),
    (RUNNING, Orphaned): (KILLING, (Do.TEAR_DOWN,)),
    #
    (KILLING, TornDown): (ENDED, ()),
    # The previous server ended in the middle of the killing: finish it.
    (KILLING, HostRestarted): (KILLING, (Do.TEAR_DOWN,)),
    (KILLING, Orphaned): (KILLING, (Do.TEAR_DOWN,)),
}

# What may still arrive once the end has begun, because it was under way at that moment.
LATE: tuple[type[Event], ...] = (
    Launched,
    LaunchFailed,
    DeleteRequested,
    Expired,
    TtlChanged,
    VmmExited,
    DiskLost,
    Faulted,
)
TABLE.update({(position, event): (position, ()) for position in (KILLING, ENDED) for event in LATE})


def step(life: Life, event: Event) -> tuple[Life, tuple[Do, ...]]:
    """The life after `event`, and what is to be done. Raises IllegalTransition."""
    try:
        position, orders = TABLE[life.position, type(event)]
    except KeyError:
        raise IllegalTransition(f"{type(event).__name__} in {life.position}") from None
    if position.stable is Stable.ENDED and life.reason is None:
        return Life(position, event.reason, event.detail), orders
    return Life(position, life.reason, life.detail), orders


def replay(events: Iterable[Event]) -> Life:
    """The life that a log of events leads to."""
    life = Life()
    for event in events:
        life, _ = step(life, event)
    return life


def check(life: Life) -> None:
    """Invariants of every reachable life; tests call it after each step."""
    ended = life.position.stable is Stable.ENDED
    assert (life.reason is not None) == ended, "a reason exactly when the end has begun"
    assert life.position.operation is not Operation.KILLING or ended, "killing is an end"
    assert not (life.visible and ended), "what has ended is not shown"
