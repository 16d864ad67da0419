"""Which cells a study of predictions measures, drawn by a seed before anything is measured, and the
prompts of each.

A cell is a drafter, K, a batch, a context and a domain of prompts, no two of them alike. Strata see
to it that speculation loses in a good part of the cells: a third of them are hard, which is text
that nothing foretells (adversarial prompts, sampled at temperature 1), or long drafts for large
batches.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from outrider.api.tokenizer import Tokenizer
from outrider.core.errors import ConfigError
from outrider_lab.bench.workload import ADVERSARIAL, DOMAINS, ECHO, builtin_texts

MOST_K = 16
MOST_BATCH = 16
LEAST_CONTEXT = 100
MOST_CONTEXT = 2000
_EASY = (*DOMAINS, ECHO)
_HARD = ("text", "size")
# Long drafts for large batches: at least so deep, and so many where that many rows fit twice over.
_LARGE_K, _LARGE_BATCH = 8, 6
# Cells that are drawn in a row without one that fits, until it is clear that none will.
_MOST_MISSES = 20_000
_GAP = "\n\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """`stratum` is easy, text or size. `number` is its place in the draw."""

    number: int
    stratum: str
    drafter: str
    k: int
    batch: int
    context: int
    domain: str

    @property
    def name(self) -> str:
        return (
            f"{self.number:03d} {self.drafter} K={self.k} b={self.batch} "
            f"S={self.context} {self.domain}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """`most_context` tokens fit the window; a batch holds at most `most_tokens` in all, and a pass
    at most `most_rows` rows."""

    most_context: int
    most_tokens: int
    most_rows: int = MOST_BATCH * (MOST_K + 1)


def draw(count: int, drafters: Sequence[str], limits: Limits, *, seed: int) -> list[Cell]:
    """`count` different cells. Every third one is hard, half of these by their text; drafters take
    turns, so that all have as many. A batch whose contexts would take too long to read is drawn
    again. Raises ConfigError if hardly any cell is within `limits`."""
    rng = Random(seed)
    found: list[Cell] = []
    seen: set[tuple[object, ...]] = set()
    misses = 0
    while len(found) < count:
        if misses == _MOST_MISSES:
            raise ConfigError(
                f"no further cell fits these limits: {limits}.",
                hint=f"ask for {len(found)} cells, or take a target with a longer window",
            )
        number, misses = len(found), misses + 1
        hard = number % 3 == 2
        stratum = _HARD[number // 3 % 2] if hard else "easy"
        cell = _cell(number, stratum, drafters[_turn(number, len(drafters))], rng, limits)
        key = (cell.drafter, cell.k, cell.batch, cell.context, cell.domain)
        rows = cell.batch * (cell.k + 1)
        fits = cell.batch * cell.context <= limits.most_tokens and rows <= limits.most_rows
        if fits and cell.context <= limits.most_context and key not in seen:
            seen.add(key)
            found.append(cell)
            misses = 0
    return found


def _turn(number: int, num_drafters: int) -> int:
    """Whose turn it is. Hard cells come back every six: numbers of drafters that go into that would
    have the same ones meet them always, so their order turns."""
    turned = number // num_drafters if math.gcd(num_drafters, 6) > 1 else 0
    return (number + turned) % num_drafters


def _cell(number: int, stratum: str, drafter: str, rng: Random, limits: Limits) -> Cell:
    large = stratum == "size"
    least_batch = max(1, min(_LARGE_BATCH, limits.most_rows // (2 * (_LARGE_K + 1))))
    return Cell(
        number=number,
        stratum=stratum,
        drafter=drafter,
        k=_between(rng, _LARGE_K if large else 1, MOST_K),
        batch=_between(rng, least_batch if large else 1, MOST_BATCH),
        context=_between(rng, LEAST_CONTEXT, MOST_CONTEXT),
        domain=ADVERSARIAL if stratum == "text" else rng.choice(_EASY),
    )


def _between(rng: Random, low: int, high: int) -> int:
    """A whole number, its logarithm drawn evenly: small ones are as frequent as large ones."""
    return min(high, math.floor(low * ((high + 1) / low) ** rng.random()))


def prompts_of(cell: Cell, tokenizer: Tokenizer, vocab_size: int) -> list[list[int]]:
    """Different texts of `cell.context` tokens, each with a prompt of the domain at its end. Before
    it stand the domain's others, in an order of its own, and those of other domains where that is
    too little; before an adversarial prompt random tokens, for nothing there may repeat."""
    texts = builtin_texts(cell.domain)
    start = Random(cell.number).randrange(len(texts))
    if cell.domain == ADVERSARIAL:
        return [
            _hard_prompt(tokenizer.encode(texts[(start + i) % len(texts)]), cell, i, vocab_size)
            for i in range(cell.batch)
        ]
    own = [tokenizer.encode(text + _GAP) for text in texts]
    others = [
        token
        for domain in DOMAINS
        if domain != cell.domain
        for text in builtin_texts(domain)
        for token in tokenizer.encode(text + _GAP)
    ]
    step = max(1, len(texts) // cell.batch)
    return [
        _before(tokenizer.encode(texts[last]), _turned(own, last), others, cell.context)
        for last in ((start + i * step) % len(texts) for i in range(cell.batch))
    ]


def _before(
    end: Sequence[int], own: Sequence[Sequence[int]], others: Sequence[int], length: int
) -> list[int]:
    """The last `length` tokens of all that, `end` last."""
    text = [token for part in own for token in part]
    while len(text) + len(end) < length:
        text = [*others, *text]
    return [*text, *end][-length:]


def _turned(parts: Sequence[Sequence[int]], at: int) -> list[Sequence[int]]:
    """Those after place `at`, then those before; that at `at` is left out."""
    return [*parts[at + 1 :], *parts[:at]]


def _hard_prompt(end: Sequence[int], cell: Cell, place: int, vocab_size: int) -> list[int]:
    rng = Random(1000 * cell.number + place)
    context = [rng.randrange(vocab_size) for _ in range(max(0, cell.context - len(end)))]
    return [*context, *end][-cell.context :]
