"""The commands for pausing, forks and snapshots, against the API on in-memory sandboxes."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import api_fakes
import pytest
import uvicorn
from api_fakes import Api
from cli_harness import Cli

from aenv.errors import TooManyRequests

UNKNOWN = "i" + "9" * 20


@pytest.fixture
async def served() -> AsyncIterator[tuple[Api, str]]:
    api = api_fakes.make()
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(api.app, log_level="warning", lifespan="off"))
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(server.serve(sockets=[listener]))
        try:
            yield api, f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True


@pytest.fixture
def api(served: tuple[Api, str]) -> Api:
    return served[0]


@pytest.fixture
def cli(served: tuple[Api, str], tmp_path: Path) -> Cli:
    return Cli(tmp_path, AENV_API_KEY=api_fakes.KEY, AENV_API_URL=served[1])


async def test_pause_and_resume(api: Api, cli: Cli) -> None:
    one, two = await api.create(timeout=500), await api.create(timeout=500)
    ran = await cli("pause", one, UNKNOWN, two)
    assert (ran.code, ran.out.split()) == (1, [one, two])
    assert UNKNOWN in ran.error
    assert "paused already" in (await cli("pause", one)).error
    table = (await cli("ls", "-o", "table")).out.splitlines()
    assert [line.split()[2:] for line in table[1:]] == [["paused", "2", "512", "MiB", "-"]] * 2
    assert f"aenv resume {one}" in (await cli("exec", one, "true")).error
    ran = await cli("resume", one, two, "--timeout", "60")
    assert (ran.code, ran.out.split(), ran.err) == (0, [one, two], "")
    assert (await cli("pause", "--no-memory", one)).code == 0
    assert api.sandboxes.get(one).pause_mode == "filesystem"
    assert (await cli("resume", "--reboot", one)).out == f"{one}\n"
    assert api.sandboxes.resumes == [(60, True), (60, True), (300, False)]


async def test_what_start_asks_for(api: Api, cli: Cli) -> None:
    await cli("start", "-d")
    await cli("start", "-d", "--on-timeout", "kill")
    await cli("start", "-d", "--on-timeout", "pause", "--auto-resume")
    assert [(spec.on_timeout, spec.auto_resume) for spec in api.sandboxes.specs] == [
        ("pause", False),
        ("kill", False),
        ("pause", True),
    ]


async def test_fork_and_the_tree(api: Api, cli: Cli) -> None:
    source = await api.create()
    first, second = (await cli("fork", source, "-n", "2", "--timeout", "99")).out.split()
    (grandchild,) = json.loads((await cli("fork", second, "-o", "json")).out)
    api.sandboxes.children_fail = TooManyRequests("this node is full")
    ran = await cli("fork", source, "-n", "5")
    assert (ran.code, len(ran.out.split())) == (1, 3)
    assert ran.error == "2 of 5 children could not be started: this node is full"
    assert "max_fork_count" in (await cli("fork", source, "-n", "17")).error
    await cli("rm", *ran.out.split())
    listed = json.loads((await cli("ls", "--tree")).out)
    assert [row.get("parentID") for row in listed] == [second, source, source, None]
    table = (await cli("ls", "--tree", "-o", "table")).out.splitlines()
    assert [line.split("base")[0].rstrip() for line in table[1:]] == [
        source,
        f"├─ {second}",
        f"│  └─ {grandchild['sandboxID']}",
        f"└─ {first}",
    ]


async def test_snapshots(api: Api, cli: Cli) -> None:
    source = await api.create()
    unnamed = (await cli("snapshot", "create", source)).out.strip()
    named = json.loads((await cli("snapshot", "create", source, "--name", "team/a:v1", "-o", "json")).out)
    assert named["snapshotID"] == "team/a:v1"
    assert [row["snapshotID"] for row in json.loads((await cli("snapshot", "ls")).out)] == ["team/a:v1", unnamed]
    assert json.loads((await cli("snapshot", "ls", "--sandbox", UNKNOWN)).out) == []
    table = (await cli("snapshot", "ls", "--name", "team/a", "-o", "table")).out.splitlines()
    assert table[0].split() == ["SNAPSHOT", "SANDBOX", "CREATED", "MEMORY", "NAMES"]
    assert [line.split()[0] for line in table[1:]] == ["team/a:v1"]
    assert (await cli("start", "-d", "team/a:v1")).code == 0
    assert (await cli("rollback", source, unnamed)).code == 0
    assert "nope" in (await cli("rollback", source, "nope")).error
    ran = await cli("snapshot", "rm", "team/a:v1", "nope", unnamed)
    assert (ran.code, ran.out.split()) == (1, ["team/a:v1", unnamed])
    assert "nope" in ran.error
    assert "not a snapshot" in (await cli("snapshot", "rm", "base")).error
    assert json.loads((await cli("snapshot", "ls")).out) == []


async def test_nothing_to_delete(cli: Cli) -> None:
    ran = await cli("rm", "--all")
    assert (ran.code, ran.out, ran.err) == (0, "", "There are no sandboxes to delete.\n")


async def test_help(cli: Cli) -> None:
    for command in (("create",), ("ls",), ("rm",)):
        helped = await cli("snapshot", *command, "--help")
        assert helped.code == 0
        assert "Usage: aenv snapshot" in helped.out
