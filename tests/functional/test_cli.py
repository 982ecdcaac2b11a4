"""The `aenv` command as its own process, against a node on the fake VMM."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from cli_harness import Cli
from node_harness import KEY, Node, needs_root, running_node

UNKNOWN = "i" + "0" * 20


@pytest.fixture
def lone(tmp_path: Path) -> Cli:
    """Without any server."""
    return Cli(tmp_path, AENV_API_KEY=KEY, AENV_API_URL="http://127.0.0.1:1")


class TestNode:
    pytestmark = needs_root

    @pytest.fixture
    async def node(self, tmp_path: Path) -> AsyncIterator[Node]:
        async with running_node(tmp_path / "node") as made:
            yield made

    @pytest.fixture
    def cli(self, node: Node, tmp_path: Path) -> Cli:
        return Cli(tmp_path, AENV_API_KEY=KEY, AENV_API_URL=node.url)

    async def test_start_prints_the_id(self, node: Node, cli: Cli) -> None:
        ran = await cli("start", "-d", "-t", "77", "-e", "A=b=c", "-m", "k=v", "--no-internet")
        (sandbox_id,) = await node.ids()
        assert (ran.code, ran.out) == (0, f"{sandbox_id}\n")
        shown = (await node.http.get(f"/sandboxes/{sandbox_id}")).json()
        assert (shown["metadata"], shown["allowInternetAccess"]) == ({"k": "v"}, False)
        inside = await node.http.get(
            "/envs",
            headers={
                "E2b-Sandbox-Id": sandbox_id,
                "E2b-Sandbox-Port": "49983",
                "X-Access-Token": shown["envdAccessToken"],
            },
        )
        assert inside.json()["A"] == "b=c"
        assert json.loads((await cli("start", "base", "-o", "json")).out)["sandboxID"] in await node.ids()

    async def test_list(self, node: Node, cli: Cli) -> None:
        one = (await node.create(metadata={"k": "v", "a b": "ž/&="}))["sandboxID"]
        two = (await node.create())["sandboxID"]
        piped = await cli("ls")
        assert [row["sandboxID"] for row in json.loads(piped.out)] == [two, one]
        table = (await cli("ls", "-o", "table")).out.splitlines()
        assert table[0].split() == ["ID", "TEMPLATE", "STATE", "CPUS", "MEMORY", "ENDS", "IN", "METADATA"]
        assert table[2].split()[:6] == [one, "base", "running", "1", "128", "MiB"]
        filtered = await cli("ls", "-m", "a b=ž/&=", "-m", "k=v")
        assert [row["sandboxID"] for row in json.loads(filtered.out)] == [one]
        assert len(json.loads((await cli("ls", "--limit", "1")).out)) == 1
        assert json.loads((await cli("ls", "-s", "paused")).out) == []
        assert json.loads((await cli("ls", "--template", "none")).out) == []

    async def test_remove(self, node: Node, cli: Cli) -> None:
        ids = [(await node.create())["sandboxID"] for _ in range(3)]
        ran = await cli("rm", ids[0], UNKNOWN)
        assert (ran.code, ran.out) == (1, f"{ids[0]}\n")
        assert UNKNOWN in ran.error
        ran = await cli("rm", "--all")
        assert (ran.code, sorted(ran.out.split())) == (0, sorted(ids[1:]))
        assert await node.ids() == []
        ran = await cli("rm", "--all")
        assert (ran.code, ran.out, ran.err) == (0, "", "There are no sandboxes to delete.\n")

    async def test_timeout(self, node: Node, cli: Cli) -> None:
        sandbox_id = (await node.create(timeout=1000, autoPause=False))["sandboxID"]
        assert (await cli("timeout", sandbox_id, "3000")).code == 0
        assert "49m" in (await cli("ls", "-o", "table")).out
        assert (await cli("timeout", sandbox_id, "0")).code == 0
        assert await node.ids() == []

    async def test_auth(self, node: Node, cli: Cli) -> None:
        shown = json.loads((await cli("auth")).out)
        assert (shown["api_url"], shown["api_url_from"], shown["api_key_from"]) == (
            node.url,
            "AENV_API_URL",
            "AENV_API_KEY",
        )
        assert KEY not in str(shown)
        exported = await cli("auth", "export")
        assert exported.out.splitlines() == [
            f"export E2B_API_KEY={KEY}",
            f"export E2B_API_URL={node.url}",
            f"export E2B_SANDBOX_URL={node.url}",
        ]

    async def test_login(self, node: Node, tmp_path: Path) -> None:
        fresh = Cli(tmp_path)
        assert "aenv auth login" in (await fresh("ls")).error
        wrong = await fresh("auth", "login", "--url", node.url, "--key", "e2b_wrong")
        assert wrong.code == 1
        assert not (tmp_path / "config/aenv/credentials.json").exists()
        assert (await fresh("auth", "login", "--url", node.url + "/", stdin=f"{KEY}\n".encode())).code == 0
        saved = tmp_path / "config/aenv/credentials.json"
        assert saved.stat().st_mode & 0o777 == 0o600
        assert json.loads((await fresh("ls")).out) == []
        saved.write_text("{")
        assert "aenv auth login" in (await fresh("ls")).error

    @pytest.mark.parametrize(
        ("arguments", "code"), [(("exec", UNKNOWN, "true"), 125), (("timeout", UNKNOWN, "5"), 1)], ids=str
    )
    async def test_an_unknown_sandbox(self, cli: Cli, arguments: tuple[str, ...], code: int) -> None:
        ran = await cli(*arguments)
        assert (ran.code, ran.out) == (code, "")
        assert UNKNOWN in ran.error

    async def test_an_unknown_template(self, cli: Cli) -> None:
        ran = await cli("start", "-d", "no-such")
        assert (ran.code, ran.error) == (1, "template 'no-such' not found")

    async def test_a_wrong_key(self, node: Node, tmp_path: Path) -> None:
        ran = await Cli(tmp_path, AENV_API_URL=node.url, AENV_API_KEY="e2b_wrong")("ls")
        assert ran.code == 1
        assert "key" in ran.error.lower()


class TestAlone:
    async def test_no_server(self, lone: Cli) -> None:
        ran = await lone("ls")
        assert ran.code == 1
        assert ran.error.startswith("no server at http://127.0.0.1:1")
        assert "aenv server" in ran.error
        assert (await lone("exec", UNKNOWN, "--", "true")).code == 125

    async def test_no_key(self, tmp_path: Path) -> None:
        ran = await Cli(tmp_path)("ls")
        assert ran.code != 0
        assert "AENV_API_KEY" in ran.error

    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            (("start", "-d", "-e", "novalue"), "expected KEY=VALUE"),
            (("start", "--rm", "-d"), "--rm needs"),
            (("rm",), "--all"),
            (("connect", UNKNOWN), "needs a terminal"),
            (("cn", UNKNOWN), "needs a terminal"),
            (("pause", UNKNOWN), "no server"),
        ],
    )
    async def test_what_makes_no_sense(self, lone: Cli, arguments: tuple[str, ...], said: str) -> None:
        ran = await lone(*arguments)
        assert ran.code == 1
        assert said in ran.error

    @pytest.mark.parametrize(
        "arguments",
        [
            ("nonsense",),
            ("ls", "--nonsense"),
            ("timeout", UNKNOWN, "x"),
            ("exec",),
            ("pause",),
            ("fork", UNKNOWN, "-n", "0"),
            ("snapshot", "rm"),
        ],
    )
    async def test_wrong_usage(self, lone: Cli, arguments: tuple[str, ...]) -> None:
        ran = await lone(*arguments)
        assert ran.code == 2
        assert "Usage:" in ran.err
        assert "Traceback" not in ran.err

    async def test_a_wrong_setting(self, tmp_path: Path) -> None:
        ran = await Cli(tmp_path, AENV_API_PORT="many")("ls")
        assert "AENV_API_PORT='many'" in ran.error

    async def test_help(self, lone: Cli) -> None:
        overview = await lone("--help")
        commands = ["start", "connect", "exec", "ls", "rm", "timeout", "setup", "server", "doctor", "bench", "auth"]
        commands += ["pause", "resume", "fork", "rollback", "snapshot"]
        assert all(command in overview.out for command in commands)
        for helped in await asyncio.gather(*(lone(command, "--help") for command in [*commands, "cn"])):
            assert helped.code == 0
            assert "Usage: aenv" in helped.out
        assert (await lone("--version")).out.startswith("aenv ")

    @pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
    async def test_completion(self, lone: Cli, shell: str) -> None:
        # The shell is told here; else it is found out from the process that started the command.
        lone.environ |= {"_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
        shown = await lone("--show-completion", shell)
        assert shown.code == 0
        assert "_AENV_COMPLETE" in shown.out
        line = {"COMP_WORDS": "aenv st", "COMP_CWORD": "1", "_TYPER_COMPLETE_ARGS": "aenv st"}
        lone.environ |= {"_AENV_COMPLETE": f"complete_{shell}", "_TYPER_COMPLETE_FISH_ACTION": "get-args"} | line
        assert "start" in (await lone()).out
