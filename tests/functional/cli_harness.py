"""The `aenv` command as its own process."""

import asyncio
import os
import sys
from dataclasses import dataclass
from pathlib import Path

AENV = Path(sys.executable).with_name("aenv")
DEADLINE = 60


@dataclass
class Ran:
    code: int
    out: str
    err: str

    @property
    def error(self) -> str:
        """Standard error, which must be one line that says `error:`."""
        assert self.err.startswith("error: "), self.err
        assert self.err.count("\n") == 1, self.err
        return self.err.removeprefix("error: ").strip()


class Cli:
    """`aenv` with an environment of its own: no variables, files or servers of the machine's owner."""

    def __init__(self, home: Path, **variables: str) -> None:
        inherited = {k: v for k, v in os.environ.items() if not k.startswith(("AENV_", "E2B_", "XDG_"))}
        places = {"HOME": str(home), "XDG_CONFIG_HOME": str(home / "config"), "AENV_HOME": str(home / "aenv")}
        self.environ = inherited | places | {"COLUMNS": "200"} | variables

    async def __call__(self, *arguments: str, stdin: bytes = b"") -> Ran:
        process = await asyncio.create_subprocess_exec(
            AENV,
            *arguments,
            env=self.environ,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            out, err = await asyncio.wait_for(process.communicate(stdin), DEADLINE)
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        assert process.returncode is not None
        return Ran(process.returncode, out.decode(), err.decode())
