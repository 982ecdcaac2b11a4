"""Short turns of the event loop, whatever is sent: parsers are fed in slices, with a pause when slices are dense.

Why: one read brings up to 256 KiB. As one piece of a body that costs microseconds; as chunks of one byte, tiny frames
or headers it is tens of thousands of callbacks, during which nobody else is served.
"""

import asyncio
from collections.abc import Callable

SLICE = 8 * 1024
"""Bytes parsed at a time where pieces may be tiny; the smallest (a chunk of one byte, a header) take 4 to 6 bytes."""
MOST_CALLBACKS = 1000
"""Callbacks of a parser in one turn, before the slice that goes beyond: some 0.3 ms, and 1 ms at the very most."""
BREATHER = 0.005
"""Seconds that dense data waits between turns, so that it takes a fraction of the processor, not all that is left."""
FRAMING_PER_BYTE = 16
"""Bytes on the wire that one byte of body pays for; one byte in a chunk of its own takes 6."""


class Pacer:
    """Feeds a parser. `feed` gets one slice; its callbacks are counted in `callbacks` by whoever gets them.

    `paced` is called when a turn is over; with `behind`, no more should be read.
    """

    def __init__(self, feed: Callable[[memoryview], None], paced: Callable[[], None], *, size: int = SLICE) -> None:
        self.callbacks = 0
        self.plain = 0
        """Bytes to come that are one piece, however many: the rest of a body with a length."""
        self.stopped = False
        self._feed = feed
        self._paced = paced
        self._size = size
        self._rest = memoryview(b"")
        self._timer: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()

    @property
    def behind(self) -> bool:
        return len(self._rest) > 0

    def take(self, data: bytes) -> None:
        if self.stopped:
            return
        if self._timer is not None:  # Reading was stopped too late for this.
            self._rest = memoryview(bytes(self._rest) + data)
            return
        self._rest = memoryview(data)
        self._turn()

    def stop(self) -> None:
        """Feed nothing more, of what is there neither."""
        self.stopped = True
        self._rest = memoryview(b"")
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _turn(self) -> None:
        self._timer = None
        self.callbacks = 0
        while self._rest and self.callbacks < MOST_CALLBACKS:
            size = max(self._size, self.plain)
            piece, self._rest = self._rest[:size], self._rest[size:]
            self.plain = max(0, self.plain - size)
            self._feed(piece)
        if self._rest:
            self._timer = self._loop.call_later(BREATHER, self._turn)
        self._paced()
