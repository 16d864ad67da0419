"""What is asked of an engine under load: requests, and the moments at which they arrive.

Arrivals of independent users are a Poisson process: the gaps between them are drawn from an
exponential distribution with the mean 1 / rate. A recorded trace is replayed from a file of JSON
lines, each with `arrival_seconds` since the beginning, `prompt` and `max_tokens`.

Prompts come from the shipped workloads, from a `question.jsonl` in the format of Spec-Bench (Xia et
al., "Unlocking Efficiency in LLM Inference", 2024; the first of a row's `turns` is the prompt), or
from any other file as text, one prompt a line.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from outrider.core.errors import ConfigError, ContractError
from outrider.plugins.measure.turns import lines_in, prompts_in
from outrider_lab.bench.workload import DOMAINS, MIXED, builtin_texts
from outrider_lab.measure.store import RecordError, made, parse


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """`arrival_seconds` counts from the beginning of the run; a closed loop does not read it."""

    name: str
    prompt: str
    max_tokens: int
    arrival_seconds: float = 0.0


def poisson_arrivals(
    rate: float, *, seed: int, num: int | None = None, duration: float | None = None
) -> tuple[float, ...]:
    """Seconds since the beginning, in order: `num` of them, or all before `duration` seconds, or
    whichever ends first. `rate` is requests a second."""
    if not rate > 0:
        raise ContractError("a rate is above 0")
    if num is None and duration is None:
        raise ContractError("arrivals end by their number or by time")
    rng = np.random.default_rng(seed)
    found: list[float] = []
    now = 0.0
    while num is None or len(found) < num:
        now += float(rng.exponential(1 / rate))
        if duration is not None and now >= duration:
            break
        found.append(now)
    return tuple(found)


def requests_from(texts: Sequence[str], *, max_tokens: int, start: int = 0) -> Iterator[Request]:
    """Requests without end: the texts in their order from number `start` on, again and again."""
    for i in count(start):
        place = i % len(texts)
        yield Request(name=f"prompt_{place:03d}", prompt=texts[place], max_tokens=max_tokens)


def arriving(
    texts: Sequence[str], arrivals: Sequence[float], *, max_tokens: int, start: int = 0
) -> list[Request]:
    """A request for each arrival."""
    source = requests_from(texts, max_tokens=max_tokens, start=start)
    return [
        Request(name=r.name, prompt=r.prompt, max_tokens=r.max_tokens, arrival_seconds=moment)
        for r, moment in zip(source, arrivals, strict=False)
    ]


def replay(path: Path) -> list[Request]:
    """The requests of a recorded trace, in order of arrival. Raises ConfigError, with the number of
    the line, for one that cannot be read."""
    found: list[Request] = []
    for number, row in _rows(path):
        try:
            line = made(Request, {"name": f"line_{number:03d}", **row})
        except RecordError as error:
            raise _unreadable(path, number, error) from None
        if line.max_tokens < 1:
            raise _unreadable(path, number, RecordError("max_tokens is below 1"))
        found.append(line)
    if not found:
        raise ConfigError(f"{path} holds no request.")
    return sorted(found, key=lambda request: request.arrival_seconds)


def texts_of(source: str) -> list[str]:
    """Prompts of a domain, of all domains in turns (`mixed`), or of a file. Raises ConfigError."""
    if source in (MIXED, *DOMAINS):
        return builtin_texts(source)
    path = Path(source)
    if not path.exists():
        raise ConfigError(
            f"{source!r} is neither a domain nor a file of prompts.",
            hint=f"--prompts takes {', '.join((MIXED, *DOMAINS))}, or a file",
        )
    return prompts_in(path)


def _rows(path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    for number, line in lines_in(path):
        try:
            yield number, parse(line)
        except RecordError as error:
            raise _unreadable(path, number, error) from None


def _unreadable(path: Path, number: int, error: RecordError) -> ConfigError:
    return ConfigError(
        f"{path}, line {number}: {error}.",
        hint='a line is {"arrival_seconds": 0.5, "prompt": "...", "max_tokens": 64}',
    )
