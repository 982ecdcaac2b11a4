"""What QEMU tells of its memory, and the file a device state passes through."""

import os
from pathlib import Path

import pytest

from aenv.errors import VmmError
from aenv.images.protocol import MemoryRange
from aenv.vmm import qemu_state
from aenv.vmm.launch import STATE_BYTES
from aenv.vmm.protocol import VmHandle
from aenv.vmm.qemu_state import find_memory, take_state, write_state

HANDLE = VmHandle(pid=7, start_time=9)
SIZE = 32 << 20
TABLE = """\
              Block Name    PSize              Offset               Used              Total                HVA  RO
                 pc.bios    4 KiB  0x0000000002080000 0x0000000002000000 0x0000000002000000 0x00007f0000000000  rw
                     ram    4 KiB  0x0000000000000000 0x0000000002000000 0x0000000002000000 0x00007fbd8c000000  rw
    /rom@etc/acpi/tables    4 KiB  0x0000000002100000 0x0000000000020000 0x0000000000200000 0x00007fbd9a800000  ro
"""


def test_the_block_is_found_by_its_name_not_its_size() -> None:
    memory = find_memory(HANDLE, TABLE, SIZE)
    assert memory.ranges == (MemoryRange(0x7FBD8C000000, SIZE, 0),)
    assert (memory.pid, memory.start_time, memory.size) == (7, 9, SIZE)


@pytest.mark.parametrize(
    "table",
    [
        "",
        "ram",
        TABLE.replace(" ram ", " rom "),
        TABLE.replace("0x0000000002000000", "0x0000000004000000"),
        TABLE.replace("0x00007fbd8c000000", "0x00007fbd8c000010"),
        TABLE.replace("0x00007fbd8c000000", "(nil)"),
    ],
    ids=["nothing", "a word", "another name", "another size", "no page", "no number"],
)
def test_what_cannot_be_is_refused(table: str) -> None:
    with pytest.raises(VmmError, match="does not tell where"):
        find_memory(HANDLE, table, SIZE)


class TestStateFile:
    @pytest.fixture
    def file(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        """The one of process 7."""
        monkeypatch.setattr(qemu_state, "PROC", tmp_path)
        (tmp_path / "7" / "root").mkdir(parents=True)
        made = tmp_path / "7" / "root" / "state"
        made.touch()
        return made

    def test_it_passes_and_is_empty_again(self, file: Path) -> None:
        write_state(7, b"longer before")
        assert file.read_bytes() == b"longer before"
        write_state(7, b"state")
        assert take_state(7) == b"state"
        assert file.read_bytes() == b""

    def test_nothing_saved(self, file: Path) -> None:
        with pytest.raises(VmmError, match="of 0 bytes"):
            take_state(7)

    def test_more_than_there_can_be(self, file: Path) -> None:
        with pytest.raises(VmmError, match="at most"):
            write_state(7, bytes(STATE_BYTES + 1))
        os.truncate(file, STATE_BYTES + 1)
        with pytest.raises(VmmError, match="expected 1 to"):
            take_state(7)
        assert file.stat().st_size == 0

    def test_a_vmm_that_is_gone(self, file: Path) -> None:
        for call in (lambda: write_state(8, b"x"), lambda: take_state(8)):
            with pytest.raises(VmmError):
                call()
