"""What a guest's console tells of its end."""

PANIC = "Kernel panic"
"""Begins the line in which Linux says why; after it come registers, a trace and an ``end`` line of the same words."""
MOST = 400
"""Characters quoted."""


def last_words(console: bytes, lines: int) -> str:
    """Half a sentence that quotes the kernel's panic, else the last `lines` lines; empty if there are none.

    They are the guest's own words: quoted as a literal, so that they cannot pass for ours.
    """
    said = [line.strip() for line in console.decode(errors="replace").splitlines() if line.strip()]
    panics = [line for line in said if PANIC in line and f"end {PANIC}" not in line]
    if panics:
        return f"its console says {panics[-1][:MOST]!r}"
    tail = " | ".join(said[-lines:])
    return f"its console ends with {tail[-MOST:]!r}" if tail else ""
