"""What is quoted of a guest's console."""

from aenv.vmm.console import MOST, last_words

PANIC = b"""
[    0.51] VFS: Cannot open root device "vda" or unknown-block(0,0): error -6\r
[    0.52] Kernel panic - not syncing: VFS: Unable to mount root fs on unknown-block(0,0)\r
[    0.53] CPU: 0 PID: 1 Comm: swapper/0 Not tainted 6.1.0-cloud-amd64\r
[    0.54] Call Trace:\r
[    0.55]  <TASK>\r
[    0.56] Kernel Offset: disabled\r
[    0.57] ---[ end Kernel panic - not syncing: VFS: Unable to mount root fs on unknown-block(0,0) ]---\r
"""


def test_a_panic_is_quoted_not_what_follows_it() -> None:
    words = "[    0.52] Kernel panic - not syncing: VFS: Unable to mount root fs on unknown-block(0,0)"
    assert last_words(PANIC, 3) == f"its console says {words!r}"


def test_else_the_last_lines_are() -> None:
    assert last_words(b"one\n\n two \r\nthree\n", 2) == "its console ends with 'two | three'"
    assert last_words(b"\n \n", 2) == ""
    assert last_words(b"", 2) == ""


def test_a_guest_cannot_pass_its_words_for_ours_nor_fill_a_message() -> None:
    assert "\\x1b[2J\\x00" in last_words(b"\x1b[2J\x00'; all is well", 1)
    assert len(last_words(b"Kernel panic" + b"x" * 100_000, 1)) < MOST + 50
    assert len(last_words(b"x" * 100_000, 1)) < MOST + 50
    assert "\ufffd" in last_words(b"\xff\xfe", 1)
