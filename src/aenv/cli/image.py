"""`aenv image`: the images this machine's data plane serves, and work on layer files. Needs the extra `aenv[server]`.

What only reads or writes files is done by a daemon of one's own, so it works without a server and does not slow its
sandboxes' disks.
"""

import asyncio
import errno
import hashlib
import json
import os
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from aenv.cli.errors import CliError
from aenv.cli.output import Format, Output, out, print_json, print_rows, wants_json
from aenv.config import Settings, load
from aenv.errors import BadRequest, NotFound

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from aenv.images.client import BlockdClient, Layer

app = typer.Typer(no_args_is_help=True, help="Disk images: layers, and the data plane that serves them.")

_CHUNK = 1 << 20

T = TypeVar("T")
Source = Annotated[
    str,
    typer.Argument(
        help="A template or snapshot, a layer's digest, a file (the topmost layer), a checkpoint's folder; "
        "or the id of a sandbox here."
    ),
]
Stack = Annotated[
    str,
    typer.Argument(help="A template or snapshot, a layer's digest, a file (the topmost layer), a checkpoint's folder."),
]
Memory = Annotated[bool, typer.Option("--memory", help="The memory of a template or snapshot, instead of its disk.")]
Under = Annotated[
    list[Path] | None, typer.Option("--under", help="With a file: layers beneath it, the lowest first; repeatable.")
]
Compression = Annotated[str | None, typer.Option("--zfile", help="Compress the result: lz4 or zstd.")]


@app.command("ls")
def list_(output: Output = None) -> None:
    """List the images that are attached on this machine."""

    async def work(settings: Settings) -> list[dict[str, Any]]:
        async with _node(settings) as client:
            rows = await client.list()
            stats = await asyncio.gather(*(_stat(client, row["image"]) for row in rows))
            return [row | stat for row, stat in zip(rows, stats, strict=True) if stat]

    rows = _run(work)
    if not wants_json(output):
        for row in rows:
            upper, counters = row.get("upper") or {}, row["counters"]
            row |= {"layers": len(row["layers"]), "size": _size(row["size"]), "written": _size(upper.get("stored", 0))}
            row |= {"reads": counters["reads"], "writes": counters["writes"], "errors": counters["errors"]}
    columns = ("image", "target", "size", "layers", "extents", "written", "reads", "writes", "errors", "path")
    print_rows(rows, columns, output)


@app.command()
def inspect(source: Source, under: Under = None, memory: Memory = False, output: Output = None) -> None:
    """Show what an image is made of."""

    async def work(settings: Settings) -> dict[str, Any]:
        if (found := await _attached(settings, source)) is not None:
            return found
        async with _scratch(settings) as client:
            return await _look(client, _stack(settings, source, under, memory))

    about = _run(work)
    if wants_json(output):
        print_json(about)
        return
    layers = about.pop("layers")
    for key, value in about.items():
        shown = json.dumps(value) if isinstance(value, dict) else value
        out.print(f"{key:12} {shown}", highlight=False, soft_wrap=True)
    rows = [{"layer": number, **layer, "bytes": _size(layer["bytes"])} for number, layer in enumerate(layers)]
    print_rows(rows, ("layer", "bytes", "uuid", "file"), Format.TABLE)


@app.command()
def check(source: Stack, under: Under = None, memory: Memory = False, output: Output = None) -> None:
    """Read every byte of an image through its layers, and compare layers with the digests they are named by.

    Exits with 1 if something is wrong.
    """

    async def work(settings: Settings) -> dict[str, Any]:
        stack = _stack(settings, source, under, memory)
        for layer in stack:
            if not await asyncio.to_thread(_is_as_named, layer.path):
                raise CliError(f"{layer.path} is not what its digest says; delete it and run `aenv setup`")
        async with _scratch(settings) as client:
            attached = await client.attach("checked", stack)
            try:
                read = await asyncio.to_thread(_read_all, attached.path)
            except OSError as error:
                raise CliError(
                    f"{source} cannot be read through its layers: {error.strerror}; one of them is damaged"
                ) from None
            await client.detach("checked")
        return {"layers": len(stack), "size": attached.size, "read": read, "ok": True}

    found = _run(work)
    if wants_json(output):
        print_json(found)
    else:
        out.print(f"ok: {found['layers']} layers, {_size(found['read'])} of data", highlight=False)


@app.command()
def export(
    source: Source,
    file: Annotated[Path, typer.Argument(help="The file to make; it must not exist.")],
    under: Under = None,
    memory: Memory = False,
    format: Annotated[str, typer.Option("--format", "-f", help="raw, layer or zfile.")] = "raw",
    zfile: Compression = None,
    output: Output = None,
) -> None:
    """Write an image as one file. Of a disk in use, what is written meanwhile may be half there."""
    if format not in ("raw", "layer", "zfile"):
        raise CliError(f"--format {format}: raw, layer and zfile are known")

    async def work(settings: Settings) -> Any:
        options: dict[str, Any] = {"format": format, "zfile": _zfile(zfile)}
        if await _attached(settings, source) is not None:
            async with _node(settings) as client:
                return await client.export(file.absolute(), image=source, **options)
        async with _scratch(settings) as client:
            return await client.export(file.absolute(), layers=_stack(settings, source, under, memory), **options)

    _print_made(_run(work), file, output)


@app.command()
def compact(
    source: Stack,
    file: Annotated[Path, typer.Argument(help="The layer to make; it must not exist.")],
    under: Under = None,
    memory: Memory = False,
    zfile: Compression = None,
    output: Output = None,
) -> None:
    """Fold the layers of an image into one that reads the same."""

    async def work(settings: Settings) -> Any:
        async with _scratch(settings) as client:
            stack = _stack(settings, source, under, memory)
            return await client.compact(file.absolute(), layers=stack, base=True, zfile=_zfile(zfile), digest=True)

    _print_made(_run(work), file, output)


def _print_made(made: Any, file: Path, output: Format | None) -> None:
    row = {"file": str(file), **{key: value for key, value in asdict(made).items() if value is not None}}
    if wants_json(output):
        print_json(row)
    else:
        print_rows([row | {"size": _size(made.bytes)}], ("file", "size", "extents", "digest"), Format.TABLE)


def _run(work: Callable[[Settings], Awaitable[T]]) -> T:
    try:
        import structlog  # noqa: F401
    except ModuleNotFoundError:
        raise CliError("this is the client alone; install the server with: pip install 'aenv[server]'") from None
    from aenv.observability import logs

    settings = load()
    logs.configure(replace(settings.log, level="error"))

    async def main() -> T:
        return await work(settings)

    return asyncio.run(main())


@asynccontextmanager
async def _node(settings: Settings) -> "AsyncIterator[BlockdClient]":
    """The daemon that serves this machine's sandboxes."""
    from aenv.images.client import BlockdClient
    from aenv.images.daemon import Places

    socket = Places.of_home(settings.home).socket
    if not socket.exists():
        raise CliError(f"no data plane runs on {settings.home}; start `aenv server`")
    client = BlockdClient(socket)
    try:
        yield client
    finally:
        await client.aclose()


@asynccontextmanager
async def _scratch(settings: Settings) -> "AsyncIterator[BlockdClient]":
    from aenv.images.store import scratch_daemon

    async with scratch_daemon(settings) as client:
        yield client


async def _attached(settings: Settings, source: str) -> dict[str, Any] | None:
    """What the node's daemon says of an image; None if there is no daemon or no such image."""
    from aenv.images.daemon import Places

    if not Places.of_home(settings.home).socket.exists():
        return None
    async with _node(settings) as client:
        return await _stat(client, source)


async def _stat(client: "BlockdClient", image: str) -> dict[str, Any] | None:
    try:
        return await client.stat(image)
    except NotFound:
        return None


async def _look(client: "BlockdClient", stack: "list[Layer]") -> dict[str, Any]:
    """What a daemon says of a stack."""
    await client.attach("inspected", stack)
    about = await client.stat("inspected")
    await client.detach("inspected")
    for layer, described in zip(stack, about["layers"], strict=True):
        described["file"] = str(layer.path)
    return {key: about[key] for key in ("size", "extents", "layers")}


def _stack(settings: Settings, source: str, under: list[Path] | None, memory: bool = False) -> "list[Layer]":
    """The layers that the argument means, the lowest first."""
    from aenv.images.client import Layer, layers_of
    from aenv.images.layers import LayerStore
    from aenv.snapshots.checkpoint import read
    from aenv.templates.store import TemplateStore

    layers = LayerStore(settings.layers_dir)
    if Path(source).is_file():
        return [Layer(path=path.absolute()) for path in [*(under or []), Path(source)]]
    if under:
        raise CliError(f"--under goes with a file, and {source} is none")
    digest = source.removeprefix("sha256:")
    if layers.path(digest).is_file():
        return [Layer(path=layers.path(digest))]
    try:
        folder = Path(source).absolute()
        if not folder.is_dir():
            templates = TemplateStore(settings.templates_dir)
            folder = templates.checkpoint(templates.resolve(source).id)
        found = read(folder)
    except (NotFound, BadRequest):
        raise CliError(
            f"{source} is no attached image, template, snapshot, layer, file or folder of a checkpoint here"
        ) from None
    if not memory:
        return layers_of(found.disk)
    if found.memory is None:
        raise CliError(f"{source} has no memory: only its disk was kept")
    return layers_of(found.memory)


def _is_as_named(path: Path | None) -> bool:
    """Whether a layer file that is named by a digest has it; True for other names."""
    from aenv.images.layers import digest_of_name

    if path is None or (wanted := digest_of_name(path)) is None:
        return True
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == wanted


def _read_all(path: Path) -> int:
    """Read all data of an attached image; return how many bytes there were. Raises OSError."""
    total, at = 0, 0
    with path.open("rb", buffering=0) as file:
        while True:
            try:
                at = os.lseek(file.fileno(), at, os.SEEK_DATA)
            except OSError as error:
                if error.errno == errno.ENXIO:  # only a hole is left
                    return total
                raise
            end = os.lseek(file.fileno(), at, os.SEEK_HOLE)
            while at < end:
                got = len(os.pread(file.fileno(), min(end - at, _CHUNK), at))
                if got == 0:
                    return total
                at, total = at + got, total + got


def _zfile(algorithm: str | None) -> dict[str, str] | None:
    if algorithm not in (None, "lz4", "zstd"):
        raise CliError(f"--zfile {algorithm}: lz4 and zstd are known")
    return None if algorithm is None else {"algorithm": algorithm}


def _size(count: int) -> str:
    """Bytes for people: ``12.3 MiB``."""
    value, units = float(count), ("B", "KiB", "MiB", "GiB")
    for unit in units:
        if value < 1024 or unit == units[-1]:
            break
        value /= 1024
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
