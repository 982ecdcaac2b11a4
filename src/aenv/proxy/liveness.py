"""Whether the path to a sandbox still carries anything. A path that is dead says nothing: its streams hang for ever.

The kernel's keepalives find out while nothing is under way. Not while data waits for an acknowledgement: it is then
repeated for 15 minutes. TCP_USER_TIMEOUT would shorten that, but also cuts a sandbox that is well and slow to read
(measured on Linux 6.18: a closed window counts, although each probe is acknowledged). So that case is looked at here.
"""

import asyncio
import socket
import struct

KEEPALIVE = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 15),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
)
SILENCE = 30.0
"""Seconds without a sign of life, as it takes the keepalives: 15 + 3 * 5."""

# struct tcp_info of linux/tcp.h: probes, 4 u8 bytes, 4 u32, unacked, 7 u32, last_ack_recv (ms).
_TCP_INFO = struct.Struct("=3xB4x16xI28xI")


def keep_alive(transport: asyncio.Transport) -> None:
    for option in KEEPALIVE:
        transport.get_extra_info("socket").setsockopt(*option)


def is_dead(transport: asyncio.Transport) -> bool:
    """Whether the other end owes an acknowledgement and has sent none for `SILENCE`. One that is slow owes none: its
    window is closed, and it acknowledges the probes, which may be minutes apart; so a single one says nothing yet."""
    if transport.is_closing():
        return False
    info = transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
    probes, unacked, last_ack_ms = _TCP_INFO.unpack(info)
    return bool(unacked or probes > 1) and last_ack_ms > SILENCE * 1000
