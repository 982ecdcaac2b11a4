"""The state machine: every path keeps the invariants, every end has a reason, nothing late does harm."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aenv.lifecycle.events import (
    EVENTS,
    Adopted,
    Captured,
    CaptureFailed,
    CreateRequested,
    DeleteRequested,
    Event,
    Expired,
    ForkRequested,
    Launched,
    LaunchFailed,
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
from aenv.lifecycle.instructions import Instruction
from aenv.lifecycle.machine import LATE, TABLE, IllegalTransition, check, replay, step
from aenv.lifecycle.states import (
    CREATING,
    ENDED,
    KILLING,
    NEW,
    PAUSED,
    PAUSING,
    RESUMING,
    RUNNING,
    EndReason,
    Life,
    Operation,
    Stable,
)

RUNS: list[Event] = [CreateRequested(), Launched()]
RESTS: list[Event] = [*RUNS, PauseRequested(), Paused()]


def test_the_ordinary_life() -> None:
    life, orders = step(Life(), CreateRequested())
    assert (life.position, orders) == (CREATING, (Instruction.LAUNCH,))
    assert not life.visible
    life, orders = step(life, Launched())
    assert (life.position, orders) == (RUNNING, (Instruction.ARM_TIMER,))
    assert life.visible
    life, orders = step(life, Expired("at noon"))
    assert (life.position, orders) == (KILLING, (Instruction.DISARM_TIMER, Instruction.TEAR_DOWN))
    assert not life.visible
    life, orders = step(life, TornDown())
    assert (life.position, life.reason, life.detail, orders) == (ENDED, EndReason.TIMEOUT, "at noon", ())


def test_delete_during_creation_cancels_the_launch_before_tearing_down() -> None:
    life = replay([CreateRequested()])
    life, orders = step(life, DeleteRequested())
    assert orders == (Instruction.CANCEL, Instruction.TEAR_DOWN)
    assert life.reason is EndReason.KILLED


def test_the_first_cause_of_the_end_stays_its_reason() -> None:
    life = replay([CreateRequested(), Launched(), VmmExited("signal 9"), DeleteRequested(), Expired(), TornDown()])
    assert (life.reason, life.detail) == (EndReason.VMM_DIED, "signal 9")


def test_a_pause_and_a_resume() -> None:
    life, orders = step(replay(RUNS), PauseRequested("a client asked"))
    assert (life.position, orders) == (PAUSING, (Instruction.DISARM_TIMER, Instruction.PAUSE))
    life, orders = step(life, Paused())
    assert (life.position, orders, life.visible) == (PAUSED, (Instruction.RELEASE,), True)
    life, orders = step(life, ResumeRequested())
    assert (life.position, orders) == (RESUMING, (Instruction.RESUME,))
    assert step(life, Resumed()) == (replay(RUNS), (Instruction.ARM_TIMER,))


def test_what_fails_leaves_it_where_it_was() -> None:
    assert step(replay([*RUNS, PauseRequested()]), PauseFailed()) == (replay(RUNS), (Instruction.ARM_TIMER,))
    assert step(replay([*RESTS, ResumeRequested()]), ResumeFailed()) == (replay(RESTS), (Instruction.RELEASE,))


@pytest.mark.parametrize("log", [RUNS, RESTS], ids=["running", "paused"])
@pytest.mark.parametrize(
    ("begins", "ends"),
    [
        (SnapshotRequested, Captured),
        (SnapshotRequested, CaptureFailed),
        (ForkRequested, Captured),
        (ForkRequested, CaptureFailed),
        (RollbackRequested, RolledBack),
        (RollbackRequested, RollbackFailed),
    ],
)
def test_work_on_a_sandbox_ends_where_it_began(log: list[Event], begins: type[Event], ends: type[Event]) -> None:
    life = replay([*log, begins()])
    assert life.position.operation in (Operation.SNAPSHOTTING, Operation.FORKING, Operation.ROLLING_BACK)
    after, orders = step(life, ends())
    assert after == replay(log)
    assert (Instruction.ARM_TIMER in orders) == (after.position == RUNNING), "a running sandbox has a timer, no other"
    for other in (PauseRequested, ResumeRequested, SnapshotRequested, ForkRequested, RollbackRequested):
        with pytest.raises(IllegalTransition):
            step(life, other())


def test_a_new_server_finds_each_sandbox_where_it_rests() -> None:
    for position in {position for position, _ in TABLE}:
        if position.stable is Stable.RUNNING and position.operation:
            assert TABLE[position, Adopted][0] == RUNNING
        if position.stable is Stable.PAUSED:
            assert TABLE[position, Adopted][0] == PAUSED
            assert TABLE[position, StateLost][0] == KILLING


def test_a_ttl_may_change_at_any_time_and_interrupts_nothing() -> None:
    for position in {position for position, _ in TABLE} - {NEW, CREATING}:
        assert TABLE[position, TtlChanged][0] == position
    assert step(replay([*RESTS, ResumeRequested()]), TtlChanged())[0].position == RESUMING


@pytest.mark.parametrize("position", [KILLING, ENDED])
@pytest.mark.parametrize("late", LATE)
def test_late_events_order_nothing(position: object, late: type[Event]) -> None:
    log: list[Event] = [CreateRequested(), LaunchFailed("no kernel")]
    if position == ENDED:
        log.append(TornDown())
    life, orders = step(replay(log), late())
    assert orders == ()
    assert life == replay(log)


def test_every_position_before_the_end_can_be_deleted() -> None:
    for position in {position for position, _ in TABLE} - {NEW, ENDED}:
        target, _ = TABLE[position, DeleteRequested]
        assert target == KILLING, position


def test_what_makes_no_sense_is_refused() -> None:
    with pytest.raises(IllegalTransition, match="Launched in new"):
        step(Life(), Launched())


@given(st.lists(st.sampled_from(sorted(EVENTS)), max_size=30))
def test_any_order_of_events_keeps_the_invariants_and_replays_to_the_same_life(names: list[str]) -> None:
    life, log, torn_down_ordered = Life(), [], False
    for name in names:
        event = EVENTS[name](f"{name} happened")
        try:
            life, orders = step(life, event)
        except IllegalTransition:
            continue
        log.append(event)
        check(life)
        torn_down_ordered |= Instruction.TEAR_DOWN in orders
        if life.position in (KILLING, ENDED):
            assert torn_down_ordered, "an end without a teardown leaks"
    assert replay(log) == life
