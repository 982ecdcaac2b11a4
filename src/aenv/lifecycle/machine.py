"""The transition table and the one function that reads it.

``step(life, event)`` is pure: the same log of events always gives the same lives. A pair that is not in the table
is a fault of the caller and raises IllegalTransition; events that may arrive late are in the table and change nothing.
"""

from collections.abc import Iterable

from aenv.lifecycle.events import (
    Adopted,
    Captured,
    CaptureFailed,
    CreateRequested,
    DeleteRequested,
    DiskLost,
    Event,
    Expired,
    Faulted,
    ForkRequested,
    HostRestarted,
    Launched,
    LaunchFailed,
    Orphaned,
    Paused,
    PauseFailed,
    PauseRequested,
    Resumed,
    ResumeFailed,
    ResumeRequested,
    RollbackFailed,
    RollbackRequested,
    RolledBack,
    SnapshotRequested,
    StateLost,
    TornDown,
    TtlChanged,
    VmmExited,
)
from aenv.lifecycle.instructions import Instruction as Do
from aenv.lifecycle.states import (
    AT_WORK,
    CREATING,
    ENDED,
    KILLING,
    NEW,
    PAUSED,
    PAUSING,
    RESUMING,
    RUNNING,
    Life,
    Operation,
    Position,
    Stable,
)


class IllegalTransition(Exception):
    """The event makes no sense in this position."""


Row = tuple[Position, tuple[Do, ...]]
Table = dict[tuple[Position, type[Event]], Row]

TABLE: Table = {
    # from, event                 -> to, orders
    (NEW, CreateRequested): (CREATING, (Do.LAUNCH,)),
    #
    (CREATING, Launched): (RUNNING, (Do.ARM_TIMER,)),
    (CREATING, LaunchFailed): (KILLING, (Do.TEAR_DOWN,)),
    #
    (RUNNING, TtlChanged): (RUNNING, (Do.ARM_TIMER,)),
    (RUNNING, Adopted): (RUNNING, (Do.ARM_TIMER,)),
    (RUNNING, Expired): (KILLING, (Do.DISARM_TIMER, Do.TEAR_DOWN)),
    #
    (RUNNING, PauseRequested): (PAUSING, (Do.DISARM_TIMER, Do.PAUSE)),
    (PAUSING, Paused): (PAUSED, (Do.RELEASE,)),
    (PAUSING, PauseFailed): (RUNNING, (Do.ARM_TIMER,)),
    (PAUSING, Adopted): (RUNNING, (Do.ARM_TIMER,)),
    #
    (PAUSED, Adopted): (PAUSED, ()),
    (PAUSED, ResumeRequested): (RESUMING, (Do.RESUME,)),
    (RESUMING, Resumed): (RUNNING, (Do.ARM_TIMER,)),
    (RESUMING, ResumeFailed): (PAUSED, (Do.RELEASE,)),
    (RESUMING, Adopted): (PAUSED, ()),
    #
    (KILLING, TornDown): (ENDED, ()),
}


def _work(stable: Stable, back: Row) -> Table:
    """What begins and ends at a stable position: snapshots, forks, rollbacks."""
    table: Table = {}
    begins = {
        SnapshotRequested: (Operation.SNAPSHOTTING, Do.CAPTURE),
        ForkRequested: (Operation.FORKING, Do.CAPTURE),
        RollbackRequested: (Operation.ROLLING_BACK, Do.ROLL_BACK),
    }
    for event, (operation, order) in begins.items():
        disarm = (Do.DISARM_TIMER,) if stable is Stable.RUNNING else ()
        at_work = AT_WORK[stable][operation]
        table[back[0], event] = (at_work, (*disarm, order))
        ends = (RolledBack, RollbackFailed) if order is Do.ROLL_BACK else (Captured, CaptureFailed)
        # Adopted: the server ended meanwhile, and nothing of it has happened.
        table.update({(at_work, ended): back for ended in (*ends, Adopted)})
    return table


TABLE |= _work(Stable.RUNNING, (RUNNING, (Do.ARM_TIMER,)))
TABLE |= _work(Stable.PAUSED, (PAUSED, ()))
_POSITIONS = {position for position, _ in TABLE} - {NEW, KILLING}

# What a client may change at any time: the timer is armed again when the operation in flight has ended.
for _position in _POSITIONS - {RUNNING, CREATING}:
    TABLE[_position, TtlChanged] = (_position, ())

# What ends a sandbox wherever it is. The host's restart spares what is at rest: a paused one is judged by what was kept
# of it. A paused one has no VMM and no disk to lose.
for _position in _POSITIONS:
    _stop = ((Do.CANCEL,) if _position.operation else ()) + ((Do.DISARM_TIMER,) if _position == RUNNING else ())
    _fatal: set[type[Event]] = {DeleteRequested, Faulted, Orphaned}
    if _position.stable is Stable.RUNNING:
        _fatal |= {VmmExited, DiskLost}
    _fatal.add(StateLost if _position.stable is Stable.PAUSED else HostRestarted)
    for _event in _fatal:
        TABLE[_position, _event] = (KILLING, (*_stop, Do.TEAR_DOWN))

# The previous server ended in the middle of the killing: finish it.
for _event in (HostRestarted, Orphaned):
    TABLE[KILLING, _event] = (KILLING, (Do.TEAR_DOWN,))

# What may still arrive later, because it was under way when something else was decided.
_ENDS: tuple[type[Event], ...] = (Launched, LaunchFailed, Paused, PauseFailed, Resumed, ResumeFailed)
_ENDS += (Captured, CaptureFailed, RolledBack, RollbackFailed)
LATE = (*_ENDS, DeleteRequested, Expired, PauseRequested, TtlChanged, VmmExited, DiskLost, Faulted)
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
