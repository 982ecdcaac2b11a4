"""Processes by pidfd, marks, cgroups: on plain processes and folders."""

import asyncio
import os
from pathlib import Path

import pytest

from aenv.errors import DeadlineExceeded, VmmError
from aenv.vmm import cgroup
from aenv.vmm.launch import OUTPUT_BYTES, Output
from aenv.vmm.process import Process, find, mark, read_mark, read_start_time
from aenv.vmm.protocol import VmHandle


def spawned(*argv: str) -> Process:
    return Process.spawned(os.posix_spawn(argv[0], argv, {}))


def sleeper() -> Process:
    return spawned("/bin/sleep", "1000")


def reap(pid: int, flags: int = 0) -> None:
    os.waitpid(pid, flags)


async def test_an_end_is_seen_with_its_status() -> None:
    exiting = spawned("/bin/sh", "-c", "exit 7")
    async with asyncio.timeout(10):
        await exiting.wait()
    assert exiting.status == 7
    exiting.close()


async def test_a_kill_reaps() -> None:
    process = sleeper()
    await process.kill(10)
    assert process.status == -9
    assert read_start_time(process.handle.pid) is None
    with pytest.raises(ChildProcessError):
        reap(process.handle.pid, os.WNOHANG)
    await process.kill(10)
    process.close()
    process.close()


async def test_opened_by_handle() -> None:
    process = sleeper()
    again = Process.opened(process.handle)
    await again.kill(10)
    again.close()
    await process.kill(10)
    process.close()


async def test_another_start_time_is_another_process() -> None:
    handle = VmHandle(pid=os.getpid(), start_time=1)
    with pytest.raises(VmmError, match="another process now"):
        Process.opened(handle)


async def test_no_process() -> None:
    process = sleeper()
    await process.kill(10)
    with pytest.raises(VmmError, match="gone"):
        Process.opened(process.handle)
    process.close()


async def test_a_kill_has_a_deadline() -> None:
    """A process in uninterruptible sleep does not end; here one whose end is not looked at."""
    process = sleeper()
    asyncio.get_running_loop().remove_reader(process._pidfd)
    with pytest.raises(DeadlineExceeded):
        await process.kill(0.01)
    reap(process.handle.pid)
    process.close()


def test_an_ordinary_process_has_no_mark() -> None:
    assert read_mark(os.getpid()) is None
    assert find(Path("/nonexistent")) == []


def test_marks_of_different_homes_never_match() -> None:
    homes = [Path("/a"), Path("/a:b"), Path("/a b"), Path("/a%20b"), Path("/ä"), Path("/a\\040b")]
    marks = [mark(home, "sb") for home in homes]
    assert len(set(marks)) == len(homes)
    assert not [a for a in marks for b in marks if a != b and b.startswith(a.removesuffix("sb"))]
    assert all(text.isascii() and not set(text) & set(" \\\n\t") for text in marks)


def test_output_is_bounded_and_its_end_is_kept_after_closing() -> None:
    output = Output()
    assert os.write(output.fd, b"x" * 10) == 10
    assert output.tail() == "x" * 10
    os.write(output.fd, b"y" * (OUTPUT_BYTES - 10))
    with pytest.raises(PermissionError):
        os.write(output.fd, b"z")
    output.close()
    output.close()
    assert output.tail(5) == "yyyyy"


class TestCgroup:
    def mountinfo(self, tmp_path: Path, mount: Path) -> Path:
        path = tmp_path / "mountinfo"
        path.write_text(f"1 0 8:1 / / rw - ext4 /dev/x rw\n2 1 0:5 / {mount} rw shared:1 - cgroup2 cgroup2 rw\n")
        return path

    def test_no_mount(self, tmp_path: Path) -> None:
        (tmp_path / "mountinfo").write_text("1 0 8:1 / / rw - ext4 /dev/x rw\n")
        support = cgroup.probe(tmp_path, tmp_path / "mountinfo")
        assert support.root is None
        assert cgroup.create(support, "sb", memory_max=1, pids_max=1) is None
        cgroup.remove(support, "sb")
        cgroup.prune(support)

    def test_a_mount_that_is_no_cgroup_is_said_so(self, tmp_path: Path) -> None:
        support = cgroup.probe(tmp_path, self.mountinfo(tmp_path, tmp_path / "absent" / "x"))
        assert "without a cgroup" in support.detail
        assert support.root is None

    def test_limits_where_there_are_controllers(self, tmp_path: Path) -> None:
        root = tmp_path / "home"
        root.mkdir()
        (root / "cgroup.controllers").write_text("cpu memory pids\n")
        support = cgroup.CgroupSupport(root, frozenset({"memory", "pids"}), "")
        group = cgroup.create(support, "sb", memory_max=1 << 29, pids_max=130)
        assert group == root / "sb"
        assert (group / "memory.max").read_text() == str(1 << 29)
        assert (group / "pids.max").read_text() == "130"
        assert (root / "cgroup.subtree_control").exists()

    def test_none_where_there_are_not(self, tmp_path: Path) -> None:
        support = cgroup.CgroupSupport(tmp_path / "home", frozenset(), "")
        group = cgroup.create(support, "sb", memory_max=1, pids_max=1)
        assert group is not None
        assert list(group.iterdir()) == []
        cgroup.create(support, "left", memory_max=1, pids_max=1)
        cgroup.prune(support)
        assert list(tmp_path.iterdir()) == []

    def test_the_homes_group_is_there_until_it_is_left(self) -> None:
        """On the real file system of cgroups: what else is in such a folder is no obstacle."""
        support = cgroup.probe(Path("/nonexistent/home/of/a/test"))
        if support.root is None:
            pytest.skip(support.detail)
        for name in ("a", "b"):
            cgroup.create(support, name, memory_max=1 << 30, pids_max=100)
        cgroup.remove(support, "a")
        assert [entry.name for entry in support.root.iterdir() if entry.is_dir()] == ["b"]
        cgroup.remove(support, "b")
        cgroup.remove(support, "b")
        assert support.root.exists(), "the next VMM may be starting at this moment"
        cgroup.leave(support)
        assert not support.root.exists()
