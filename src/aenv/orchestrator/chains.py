"""Keeps the chains of layers short: every capture adds one, and each further one would be slower than the last."""

import asyncio
from pathlib import Path

from aenv.images.protocol import ImageStore
from aenv.orchestrator.run import Run

FOLD_AT = 16
"""Layers of an image from which they are folded in the background."""
MOST = 32
"""Layers that an image never exceeds: a capture waits for the folding then."""


async def shorten(images: ImageStore, run: Run, *, at_most: bool = False) -> list[Path]:
    """Fold what is long of a run's disk and memory; return the layer files that it no longer uses. The caller holds
    `run.layers`.

    The lowest layer, which all sandboxes of a template share, stays. With `at_most` only what would exceed `MOST`.
    Of memory, what the VMM maps and what was captured since are folded apart. Raises what `ImageStore.compact` does.
    """
    limit = MOST if at_most else FOLD_AT
    unused: list[Path] = []
    if len(run.disk) >= limit:
        last, output = len(run.disk), run.new_layer("disk")
        await images.compact_disk(run.directory, 1, last, output)
        unused += run.disk[1:last]
        run.disk[1:last] = [output]
    if len(run.memory) >= limit:
        since = len(run.memory)
        if since - run.mapped > 1:
            unused += await _fold_memory(images, run, run.mapped, since)
        if run.mapped > 2:
            unused += await _fold_memory(images, run, 1, run.mapped)
            run.mapped = 2
    return unused


async def _fold_memory(images: ImageStore, run: Run, first: int, last: int) -> list[Path]:
    output, folded = run.new_layer("memory"), run.memory[first:last]
    await asyncio.shield(images.compact(folded, output, base=first == 0))
    run.memory[first:last] = [output]
    return folded
