"""Running the distribution's command-line tools without blocking the event loop."""

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Mapping
from pathlib import Path

from aenv.errors import DeadlineExceeded, InsufficientStorage, ProvisionError

_TAIL = 20
"""Lines of a failed tool's output that go into the error message."""


async def run(
    *argv: str | Path,
    deadline: float,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    on_line: Callable[[str], None] | None = None,
) -> str:
    """Run a tool to its end and return what it wrote to standard output.

    `deadline` in seconds; `env` is added to the environment (messages are always English); `on_line` sees each line
    of standard error as it comes. On cancellation or a missed deadline the tool and its children are killed.

    Raises ProvisionError (the tool is missing, or failed: with the end of its output), InsufficientStorage,
    DeadlineExceeded.
    """
    name = str(argv[0])
    try:
        process = await asyncio.create_subprocess_exec(
            *argv,
            cwd=cwd,
            env={**os.environ, "LC_ALL": "C.UTF-8", **(env or {})},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            limit=1 << 20,
            start_new_session=True,
        )
    except FileNotFoundError:
        raise ProvisionError(
            f"{name} is not installed; `make quickstart` or `aenv doctor` says which package"
        ) from None
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        async with asyncio.timeout(deadline):
            output, errors, _ = await asyncio.gather(
                process.stdout.read(), _lines(process.stderr, on_line), process.wait()
            )
    except TimeoutError:
        raise DeadlineExceeded(f"{name} did not finish within {deadline:.0f} s") from None
    finally:
        await _end(process)
    text = output.decode(errors="replace")
    if process.returncode:
        tail = "\n".join((errors or text.splitlines())[-_TAIL:])
        if "No space left on device" in tail:
            raise InsufficientStorage(f"{name}: the disk is full:\n{tail}")
        raise ProvisionError(f"{' '.join(map(str, argv))[:200]} failed with status {process.returncode}:\n{tail}")
    return text


async def _lines(stream: asyncio.StreamReader, on_line: Callable[[str], None] | None) -> list[str]:
    lines: list[str] = []
    async for raw in stream:
        line = raw.decode(errors="replace").rstrip()
        lines.append(line)
        del lines[:-_TAIL]
        if on_line is not None and line:
            on_line(line)
    return lines


async def _end(process: asyncio.subprocess.Process) -> None:
    """Kill what is left of the tool's process group; the tool itself is always waited for."""
    if process.returncode is not None:
        return
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    await asyncio.shield(process.wait())
