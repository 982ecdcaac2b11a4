"""The line that stands for a guest's processor: the same on one host for ever, another where it matters."""

from pathlib import Path

import pytest

from aenv.vmm.cpu import cpu_identity
from aenv.vmm.qemu_command import Machine

TCG = Machine(arch="x86_64", accel="tcg", binary="q", data_dirs=())
CPU = "max,erms=off,fsrm=off"
KVM = Machine(arch="x86_64", accel="kvm", binary="q", data_dirs=())


def test_an_emulated_processor_has_the_hosts_clock(tmp_path: Path) -> None:
    assert cpu_identity(TCG, 2_596_138, tmp_path / "khz") == f"{CPU} tsc=2596MHz"
    assert cpu_identity(TCG, None, tmp_path / "khz") == CPU


@pytest.mark.parametrize("first", [2_595_499, 2_595_500, 2_595_501])
def test_a_rate_between_two_stays_what_it_was(tmp_path: Path, first: int) -> None:
    remembered = tmp_path / "cache" / "khz"
    told = {cpu_identity(TCG, first + error, remembered) for error in (0, -20, 20, -1000, 1000)}
    assert len(told) == 1


def test_another_host_has_another_rate(tmp_path: Path) -> None:
    remembered = tmp_path / "khz"
    assert cpu_identity(TCG, 2_596_138, remembered) != cpu_identity(TCG, 2_600_000, remembered)
    assert cpu_identity(TCG, 2_600_010, remembered) == f"{CPU} tsc=2600MHz"


def test_a_memory_that_is_damaged_or_cannot_be_kept(tmp_path: Path) -> None:
    remembered = tmp_path / "khz"
    remembered.write_text("no number")
    assert cpu_identity(TCG, 2_596_138, remembered) == f"{CPU} tsc=2596MHz"
    (tmp_path / "file").touch()
    assert cpu_identity(TCG, 2_596_138, tmp_path / "file" / "khz") == f"{CPU} tsc=2596MHz"


def test_under_kvm_it_is_the_hosts_own(tmp_path: Path) -> None:
    def told(cpuinfo: str) -> str:
        (tmp_path / "cpuinfo").write_text(cpuinfo)
        return cpu_identity(KVM, None, tmp_path / "khz", tmp_path / "cpuinfo")

    one = "processor\t: 0\nmodel name\t: Some CPU @ 2 GHz\nflags\t\t: fpu sse avx\ncpu MHz\t: 1\n"
    first = told(one)
    assert first.startswith("Some CPU @ 2 GHz ")
    assert told(one.replace("MHz\t: 1", "MHz\t: 2") + one) == first
    assert told(one.replace("fpu sse", "sse fpu")) == first
    assert told(one.replace(" avx", "")) != first
    arm = "CPU implementer\t: 0x41\nCPU part\t: 0xd0c\nFeatures\t: fp asimd\n"
    assert told(arm).startswith("0x41 0xd0c ")
    assert told(arm) != told(arm.replace(" asimd", ""))
