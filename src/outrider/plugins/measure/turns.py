"""Comparison of two ways to write a text on this machine: turns, their ratio, what disturbed them,
and the prompts of a file.

Every contestant runs every piece of work once before the next piece begins, in an order that
rotates, so that drift of the machine (clock, neighbours, caches) falls on all alike. Contestants
suffer unequally from other programs all the same, so the CPU share of these is recorded too.

A speed-up is the ratio of median seconds a token of plain decoding over those of the other side,
over the same pieces of work. Its 95 % interval comes from drawing as many pieces again, with
replacement, many times (Efron, "Bootstrap Methods: Another Look at the Jackknife", 1979; percentile
interval), with a fixed seed. With few pieces the draws are too much alike: intervals from two
pieces hold the true value about half of the time and from three 75 %; from five on they hold it
95 % of the time, so fewer pieces get no interval. The lab builds its studies on these parts.
"""

from __future__ import annotations

import datetime
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from time import perf_counter
from typing import Any, TypeVar, cast

import numpy as np

from outrider.core.errors import ConfigError
from outrider.core.files import FileKind, parse_json, read_text

MIN_PAIRS = 5
_NUM_DRAWS = 4000
_PERCENTILES = (2.5, 97.5)


@dataclass(frozen=True, slots=True)
class Ratio:
    """A ratio. `low` and `high` bound its 95 % interval; they are None below MIN_PAIRS."""

    value: float
    low: float | None
    high: float | None
    num_pairs: int

    def __post_init__(self) -> None:
        """Raises ValueError for values that only an edited results file can have."""
        if not self.value > 0:
            raise ValueError(f"a ratio is {self.value!r:.40}")
        if (self.low is None) != (self.high is None):
            raise ValueError("an interval has one end only")

    @property
    def verdict(self) -> str:
        """The verdict by the interval alone; above 1 is better."""
        if self.low is None or self.high is None:
            return "not judged"
        return "gain" if self.low > 1 else "loss" if self.high < 1 else "no measurable difference"


def ratio_of_medians(over: Sequence[float], under: Sequence[float]) -> Ratio:
    """median(over) / median(under); values of one index belong to one piece of work."""
    above, below = np.asarray(over, dtype=np.float64), np.asarray(under, dtype=np.float64)
    value = float(np.median(above) / np.median(below))
    num = len(above)
    if num < MIN_PAIRS:
        return Ratio(value, None, None, num)
    picks = np.random.default_rng(0).integers(num, size=(_NUM_DRAWS, num))
    drawn = np.median(above[picks], axis=1) / np.median(below[picks], axis=1)
    low, high = np.percentile(drawn, _PERCENTILES)
    return Ratio(value, float(low), float(high), num)


# Beginning of the sentence on other programs of the machine.
OTHERS_USED = "Other programs used"
PACKAGES = ("outrider", "torch", "numpy", "transformers", "tokenizers", "safetensors")


def provenance() -> dict[str, object]:
    """Everything needed to repeat a run on a like machine."""
    import torch

    from outrider.kernels.native.cpu import num_physical_cores

    return {
        "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "utc": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        **_sources(),
        "python": platform.python_version(),
        "packages": {name: version for name in PACKAGES if (version := _version(name))},
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "physical_cores": num_physical_cores(),
        "torch_threads": torch.get_num_threads(),
        "isa": torch.backends.cpu.get_cpu_capability(),
        "cuda": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def _sources() -> dict[str, object]:
    """The commit that this file belongs to; None if it is in no repository, as when installed."""
    if _git("ls-files", "--error-unmatch", Path(__file__).name) is None:
        return {"commit": None, "dirty": None}
    changed = _git("status", "--porcelain", "--untracked-files=no", ":/")
    return {"commit": _git("rev-parse", "HEAD"), "dirty": bool(changed)}


def _git(*arguments: str) -> str | None:
    """The output of git for the folder of this file; None if it fails."""
    try:
        done = subprocess.run(
            ["git", "-C", str(Path(__file__).parent), *arguments],
            capture_output=True,
            text=True,
            check=True,
            timeout=10,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def cpu_name() -> str:
    """The processor's own name."""
    try:
        lines = read_text(Path("/proc/cpuinfo"), FileKind.SYSTEM).splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


# Share of the CPUs above which concurrent times are not reliable.
BUSY_SHARE = 0.05


def is_busy(share: float | None) -> bool:
    """True if other programs used so much of the machine that times say little."""
    return share is not None and share > BUSY_SHARE


def said_of(share: float | None) -> str | None:
    """A sentence about `share`, None if it is unknown."""
    if share is None:
        return None
    warning = ": do not rely on these times" if is_busy(share) else ""
    return f"{OTHERS_USED} {100 * share:.1f} % of the CPUs meanwhile{warning}."


class Neighbours:
    """Watches the machine while entered; `share` is foreign CPU time over all CPU time, or None if
    the system does not report it."""

    def __init__(self) -> None:
        self.share: float | None = None
        self._before: tuple[float, float, float] | None = None

    def __enter__(self) -> Neighbours:
        self._before = _times()
        return self

    def __exit__(self, *error: object) -> None:
        self.share = self.so_far()

    def so_far(self) -> float | None:
        """The share until now, or that of the whole time after leaving."""
        after = _times()
        if self.share is not None or self._before is None or after is None:
            return self.share
        busy, total, own = (b - a for a, b in zip(self._before, after, strict=True))
        return round(max(busy - own, 0.0) / total, 4) if total > 0 else None


def cpu_seconds() -> tuple[float, float] | None:
    """Busy and total seconds of all CPUs; None if the system does not report them."""
    try:
        fields = read_text(Path("/proc/stat"), FileKind.SYSTEM).split("\n", 1)[0].split()[1:]
    except OSError:
        return None
    ticks = [int(field) for field in fields[:8]]
    per_second = os.sysconf("SC_CLK_TCK")
    return (sum(ticks) - ticks[3] - ticks[4]) / per_second, sum(ticks) / per_second


def _times() -> tuple[float, float, float] | None:
    """Busy and total seconds of all CPUs, and busy seconds of this process and its children."""
    found = cpu_seconds()
    return None if found is None else (*found, sum(os.times()[:4]))


T = TypeVar("T")
W = TypeVar("W")
# The token ids of each prompt of a piece of work.
Texts = Sequence[Sequence[int]]


def rotated(items: Sequence[T], turn: int) -> list[T]:
    """The items in rotated order, beginning with number `turn`."""
    return [items[(turn + offset) % len(items)] for offset in range(len(items))]


@dataclass(slots=True)
class Score:
    """One contestant's tokens and seconds, a value per piece of work."""

    tokens: list[int] = field(default_factory=list[int])
    seconds: list[float] = field(default_factory=list[float])

    @property
    def tokens_per_second(self) -> float:
        return sum(self.tokens) / sum(self.seconds)

    def to_dict(self) -> dict[str, float]:
        rates = [t / s for t, s in zip(self.tokens, self.seconds, strict=True)]
        return {
            "tokens_per_second": round(self.tokens_per_second, 2),
            "median_tokens_per_second": round(statistics.median(rates), 2),
            "tokens": sum(self.tokens),
            "seconds": round(sum(self.seconds), 3),
        }


def race(
    contestants: Mapping[str, Callable[[W], Texts]],
    work: Sequence[W],
    *,
    start: int = 0,
    tick: Callable[[], None] = lambda: None,
) -> dict[str, Score]:
    """Scores by name; a contestant maps a piece of work to the ids it emitted.

    The first piece of work is run once untimed, as a warm-up, unless this continues a race of
    `start` pieces; `tick` is called after each.
    """
    for run in contestants.values() if not start else ():
        run(work[0])
    scores = {name: Score() for name in contestants}
    for turn, piece in enumerate(work, start):
        for name in rotated(list(contestants), turn):
            started = perf_counter()
            emitted = contestants[name](piece)
            scores[name].seconds.append(perf_counter() - started)
            scores[name].tokens.append(sum(map(len, emitted)))
        tick()
    return scores


def prompts_in(path: Path) -> list[str]:
    """The prompts of a text file, one a line, or of a .jsonl file: `prompt` of a line, or the first
    of its `turns`. Raises ConfigError, with the number of the line, for one that has none."""
    found = [
        _prompt_of(path, number, line) if path.suffix == ".jsonl" else line
        for number, line in lines_in(path)
    ]
    if not found:
        raise ConfigError(f"{path} holds no prompt.", hint="write one a line")
    return found


def lines_in(path: Path) -> Iterator[tuple[int, str]]:
    """Lines that are not blank, counted from 1. Raises ConfigError."""
    try:
        text = read_text(path, FileKind.PROMPTS)
    except OSError as error:
        raise ConfigError(
            f"{path}: {error.strerror or error}.", hint="name a text file that you may read"
        ) from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: not UTF-8 text.") from None
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip():
            yield number, line


def _prompt_of(path: Path, number: int, line: str) -> str:
    try:
        row = parse_json(line)
    except ValueError as error:
        why = str(error)
    else:
        found = cast("dict[str, Any]", row) if isinstance(row, dict) else {}
        turns: object = found.get("turns", [found.get("prompt")])
        first = cast("list[object]", turns)[0] if isinstance(turns, list) and turns else None
        if isinstance(first, str) and first:
            return first
        why = "neither turns nor a prompt"
    raise ConfigError(
        f"{path}, line {number}: {why}.", hint='a line is {"prompt": "..."} or {"turns": ["..."]}'
    )
