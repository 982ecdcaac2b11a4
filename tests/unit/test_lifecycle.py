"""The state machine: every path keeps the invariants, every end has a reason, nothing late does harm."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aenv.lifecycle.events import (
    EVENTS,
    CreateRequested,
    DeleteRequested,
    Event,
    Expired,
    Launched,
    LaunchFailed,
    TornDown,
    VmmExited,
)
from aenv.lifecycle.instructions import Instruction
from aenv.lifecycle.machine import LATE, TABLE, IllegalTransition, check, replay, step
from aenv.lifecycle.states import CREATING, ENDED, KILLING, NEW, RUNNING, EndReason, Life


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
    assert orders == (Instruction.CANCEL_LAUNCH, Instruction.TEAR_DOWN)
    assert life.reason is EndReason.KILLED


def test_the_first_cause_of_the_end_stays_its_reason() -> None:
    life = replay([CreateRequested(), Launched(), VmmExited("signal 9"), DeleteRequested(), Expired(), TornDown()])
    assert (life.reason, life.detail) == (EndReason.VMM_DIED, "signal 9")


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
