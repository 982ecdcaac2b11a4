import platform

import pytest

from aenv.errors import ProvisionError
from aenv.guest.cmdline import kernel_cmdline
from aenv.guest.tsc import host_tsc_khz


def test_parameters_of_the_boot_contract() -> None:
    words = kernel_cmdline(hostname="sbx-1", accel="kvm", machine="x86_64").split()
    assert {
        "console=ttyS0",
        "aenv.root=/dev/vda",
        "aenv.ip=169.254.0.21/30",
        "aenv.gw=169.254.0.22",
        "aenv.dns=169.254.0.22",
        "aenv.hostname=sbx-1",
    } <= set(words)


def test_mitigations_are_given_up_only_where_nothing_speculates() -> None:
    assert "mitigations=off" not in kernel_cmdline(hostname="a", accel="kvm", machine="x86_64").split()
    assert "mitigations=off" in kernel_cmdline(hostname="a", accel="tcg", tsc_khz=1, machine="x86_64").split()


def test_freed_memory_is_cleared_only_where_that_is_asked_for() -> None:
    asked = kernel_cmdline(hostname="a", accel="kvm", machine="x86_64", zero_freed=True).split()
    assert "init_on_free=1" in asked
    assert "init_on_free=1" not in kernel_cmdline(hostname="a", accel="kvm", machine="x86_64").split()


def test_slow_string_instructions_are_avoided_only_where_they_are_slow() -> None:
    assert "clearcpuid=erms,fsrm" in kernel_cmdline(hostname="a", accel="tcg", tsc_khz=1, machine="x86_64").split()
    assert "clearcpuid" not in kernel_cmdline(hostname="a", accel="kvm", machine="x86_64")
    assert "clearcpuid" not in kernel_cmdline(hostname="a", accel="tcg", machine="aarch64")


def test_emulated_x86_guest_is_told_its_clock() -> None:
    words = kernel_cmdline(hostname="a", accel="tcg", tsc_khz=2_596_138, machine="x86_64").split()
    assert {"tsc_early_khz=2596138", "tsc=reliable"} <= set(words)
    with pytest.raises(ProvisionError, match="TSC"):
        kernel_cmdline(hostname="a", accel="tcg", machine="x86_64")


def test_arm64_has_another_console_and_no_tsc() -> None:
    words = kernel_cmdline(hostname="a", accel="tcg", machine="aarch64").split()
    assert "console=ttyAMA0" in words
    assert not [word for word in words if word.startswith("tsc")]


@pytest.mark.parametrize("hostname", ["", "a b", "a\nb", "-a", "a-", "a.b", "x" * 64, "a init=/bin/sh"])
def test_hostname_cannot_carry_parameters(hostname: str) -> None:
    with pytest.raises(ProvisionError, match="hostname"):
        kernel_cmdline(hostname=hostname, accel="kvm")


@pytest.mark.skipif(platform.machine() != "x86_64", reason="x86 has the counter")
def test_tsc_rate_agrees_with_another_measurement() -> None:
    first = host_tsc_khz()
    host_tsc_khz.cache_clear()
    second = host_tsc_khz()
    assert first is not None
    assert second is not None
    assert 100_000 < first < 10_000_000
    assert abs(first - second) / first < 1e-3
