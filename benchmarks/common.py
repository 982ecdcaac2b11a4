"""What every scenario shares: the shape of a result, percentiles, the description of this machine, a Markdown table."""

import math
import os
import platform
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One measured quantity: `n` samples and their percentiles, in `unit`. A single one has n = 1.

    `goal` is the service level in words (``<= 1.5 ms``), `met` whether this run kept it; None when there is none.
    """

    name: str
    n: int
    p50: float
    p95: float
    p99: float
    unit: str
    goal: str | None = None
    met: bool | None = None

    @classmethod
    def of(
        cls, name: str, samples: Sequence[float], unit: str, *, goal: str | None = None, met: bool | None = None
    ) -> "Result":
        """Summarise `samples` (at least one)."""
        ordered = sorted(samples)
        p50, p95, p99 = (percentile(ordered, share) for share in (0.50, 0.95, 0.99))
        return cls(name=name, n=len(ordered), p50=p50, p95=p95, p99=p99, unit=unit, goal=goal, met=met)

    @classmethod
    def goal_of(cls, name: str, samples: Sequence[float], unit: str, *, p50: float, p99: float) -> "Result":
        """As `of`; the goal is that median and 99th percentile are at most these."""
        found = cls.of(name, samples, unit)
        goal, met = f"p50 <= {p50:g}, p99 <= {p99:g} {unit}", found.p50 <= p50 and found.p99 <= p99
        return replace(found, goal=goal, met=met)


def rounds(n: int, *, seconds: float, least: int = 3) -> Iterator[int]:
    """Count up to `n`, but begin no further round after so many seconds, unless there were fewer than `least`."""
    end = time.monotonic() + seconds
    for number in range(max(n, least)):
        if number >= least and time.monotonic() > end:
            return
        yield number


def percentile(ordered: Sequence[float], share: float) -> float:
    """The nearest-rank percentile of an ascending sequence; `share` in (0, 1]. Raises ValueError when it is empty."""
    if not ordered:
        raise ValueError("no samples to take a percentile of")
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def hardware() -> str:
    """CPU model, cores, memory, kernel and how busy the machine was, in one line."""
    model = next((v for k, v in _pairs("/proc/cpuinfo") if k == "model name"), platform.machine())
    memory_kib = next((int(v.split()[0]) for k, v in _pairs("/proc/meminfo") if k == "MemTotal"), 0)
    load = os.getloadavg()[0]
    return (
        f"{model}, {os.cpu_count()} cores, {memory_kib / (1 << 20):.0f} GiB, Linux {platform.release()}, "
        f"Python {platform.python_version()}, load average {load:.1f}"
    )


def rss_bytes(pid: int, *, peak: bool = False) -> int:
    """Resident memory of a process, now or at its highest. Raises OSError when it has ended."""
    key = "VmHWM" if peak else "VmRSS"
    return next(int(v.split()[0]) for k, v in _pairs(f"/proc/{pid}/status") if k == key) * 1024


def markdown(results: Iterable[Result]) -> str:
    """The results as a Markdown table."""
    lines = ["| what | n | p50 | p95 | p99 | unit | goal |", "|---|---:|---:|---:|---:|---|---|"]
    for r in results:
        goal = "" if r.goal is None else f"{r.goal} ({'met' if r.met else 'missed'})"
        lines.append(f"| {r.name} | {r.n} | {r.p50:.4g} | {r.p95:.4g} | {r.p99:.4g} | {r.unit} | {goal} |")
    return "\n".join(lines)


def _pairs(path: str) -> Iterable[tuple[str, str]]:
    for line in Path(path).read_text().splitlines():
        key, separator, value = line.partition(":")
        if separator:
            yield key.strip(), value.strip()
