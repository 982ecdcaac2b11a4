"""Deciding on an acceleration: what a trial proves, and that it is made once."""

import asyncio
from pathlib import Path

import pytest

from aenv.config import VmmSettings
from aenv.errors import VmmError
from aenv.guest.provision import GuestBundle
from aenv.vmm import accel
from aenv.vmm.accel import Accel, AccelProver, judge
from aenv.vmm.launch import Program
from aenv.vmm.qemu_command import Machine

BANNER = "[    0.000000] Linux version 6.12\n"
USER = "[    1.0] Run /init as init process\n"
NOWHERE = Path("/nonexistent")
BUNDLE = GuestBundle(kernel=NOWHERE, initramfs=NOWHERE, kernel_version="6", envd_version="0", digest="d1")


@pytest.mark.parametrize(
    ("console", "ended", "name"),
    [
        ("", True, "tcg"),
        ("", False, "tcg"),
        (BANNER, False, "tcg"),
        (BANNER + USER, False, "tcg"),
        (BANNER + USER + "Attempted to kill init! exitcode=0x0000000b", True, "tcg"),
        (BANNER + USER + "Attempted to kill init! exitcode=0x00000100", True, "kvm"),
        (BANNER + USER + "reboot: Power down", True, "kvm"),
    ],
    ids=["qemu fails", "silent", "hangs in kernel", "hangs in init", "init dies by signal", "init exits", "powers off"],
)
def test_judgement(console: str, ended: bool, name: str) -> None:
    decided = judge(console, ended=ended, deadline=10)
    assert decided.name == name
    assert "KVM" in decided.reason


def test_a_refusal_shows_the_last_line() -> None:
    assert "'qemu: no'" in judge("qemu: no\n", ended=True, deadline=10).reason


class Trials:
    """Stands for QEMU: counts, and answers as told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, answer: Accel) -> None:
        self.count = 0
        self.running = 0
        self.answer = answer
        machine = Machine(arch="x86_64", accel="kvm", binary="q", data_dirs=())
        program = Program(machine=machine, version="10", binds=(), links=())
        monkeypatch.setattr(accel, "find_program", lambda *_: program)
        monkeypatch.setattr(accel, "try_kvm", self.run)

    async def run(self, program: Program, bundle: GuestBundle, *, uid: int) -> Accel:
        self.count += 1
        self.running += 1
        assert self.running == 1, "one trial at a time"
        await asyncio.sleep(0)
        self.running -= 1
        return self.answer


@pytest.fixture
def trials(monkeypatch: pytest.MonkeyPatch) -> Trials:
    return Trials(monkeypatch, Accel("tcg", "it hung"))


def prover(
    home: Path, *, setting: str = "auto", bundle: GuestBundle = BUNDLE, kvm: Path = Path("/dev/null")
) -> AccelProver:
    assert setting in ("auto", "kvm", "tcg")
    return AccelProver(home=home, settings=VmmSettings(accel=setting), bundle=bundle, kvm=kvm)  # type: ignore[arg-type]


async def test_one_trial_for_all(tmp_path: Path, trials: Trials) -> None:
    one, other = prover(tmp_path), prover(tmp_path)
    assert set(await asyncio.gather(one.decide(), one.decide(), other.decide())) == {trials.answer}
    assert trials.count == 1


async def test_the_answer_is_remembered_for_the_same_guest_only(tmp_path: Path, trials: Trials) -> None:
    await prover(tmp_path).decide()
    assert await prover(tmp_path).decide() == trials.answer
    assert trials.count == 1
    newer = GuestBundle(kernel=NOWHERE, initramfs=NOWHERE, kernel_version="7", envd_version="0", digest="d2")
    await prover(tmp_path, bundle=newer).decide()
    assert trials.count == 2


@pytest.mark.parametrize("damage", ["", "{", "[]", '{"key": 1}', '{"accel": {"name": "magic"}}', "[" * 10**5])
async def test_a_damaged_memory_is_a_new_trial(tmp_path: Path, trials: Trials, damage: str) -> None:
    await prover(tmp_path).decide()
    (tmp_path / "cache" / "accel.json").write_text(damage)
    assert await prover(tmp_path).decide() == trials.answer
    assert trials.count == 2


async def test_without_kvm_nothing_is_tried(tmp_path: Path, trials: Trials) -> None:
    decided = await prover(tmp_path, kvm=tmp_path / "none").decide()
    assert (decided.name, trials.count) == ("tcg", 0)
    assert "has no" in decided.reason


async def test_tcg_is_believed(tmp_path: Path, trials: Trials) -> None:
    assert (await prover(tmp_path, setting="tcg").decide()).name == "tcg"
    assert trials.count == 0


async def test_kvm_is_not_believed(tmp_path: Path, trials: Trials) -> None:
    with pytest.raises(VmmError, match=r"vmm\.accel is 'kvm', but it hung"):
        await prover(tmp_path, setting="kvm").decide()


async def test_kvm_that_works(tmp_path: Path, trials: Trials) -> None:
    trials.answer = Accel("kvm", "it booted")
    assert await prover(tmp_path, setting="kvm").decide() == trials.answer
    assert await prover(tmp_path).decide() == trials.answer
