"""Prompts of a cell: so many texts of so many tokens, different from each other, that end as the
prompts of a domain do.

A context is what stands before: the other prompts of the domain, in an order that each text has for
itself, and those of other domains where that is too little. Before adversarial prompts it is drawn
from the vocabulary, for nothing there may repeat.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from outrider.api.tokenizer import Tokenizer
from outrider.bench.plan_cells.draw import Cell
from outrider.bench.workload import ADVERSARIAL, DOMAINS, builtin_texts

_GAP = "\n\n"


def prompts_of(cell: Cell, tokenizer: Tokenizer, vocab_size: int) -> list[list[int]]:
    """Of `cell.context` tokens each."""
    texts = builtin_texts(cell.domain)
    start = Random(cell.number).randrange(len(texts))
    if cell.domain == ADVERSARIAL:
        return [
            _drawn(tokenizer.encode(texts[(start + i) % len(texts)]), cell, i, vocab_size)
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


def _drawn(end: Sequence[int], cell: Cell, place: int, vocab_size: int) -> list[int]:
    rng = Random(1000 * cell.number + place)
    context = [rng.randrange(vocab_size) for _ in range(max(0, cell.context - len(end)))]
    return [*context, *end][-cell.context :]
