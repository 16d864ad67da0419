"""Prompts of a scene: a domain's own, or made as long as asked for out of shipped text.

A long prompt ends as the domain's prompts do, and other texts of the domain stand before it; the
beginning is cut so that a given number of tokens is left. A long retrieval prompt has more notes.
Where a domain has too little text it begins again, which drafters that copy will notice.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from outrider.bench.sweep_plan import Work
from outrider.bench.workload import (
    MOST_NOTES,
    PromptDataset,
    builtin_texts,
    fingerprint,
    retrieval_prompt,
)
from outrider.core.errors import ConfigError

Count = Callable[[str], int]
_WORD = re.compile(r"(?<=\s)\S")


@dataclass(frozen=True, slots=True)
class Prompts:
    """Some prompts under their names. `print` is the fingerprint of all that the domain has, so
    that a later run may take more of them."""

    works: tuple[Work, ...]
    print: str


@dataclass(frozen=True, slots=True)
class PromptSource:
    """`saved` takes the place of the shipped prompts; `num` are taken of each domain."""

    num: int
    saved: PromptDataset | None = None

    def of(self, domain: str, num_tokens: int | None, count: Count) -> Prompts:
        """With `num_tokens`, so long by `count`. Raises ConfigError for a domain that is not there,
        or prompts that cannot be had that long."""
        if self.saved is not None:
            named = [Work(p.prompt_id, p.raw_text) for p in self.saved.get_by_domain(domain)]
        else:
            named = [
                Work(f"{domain}_{i:03d}", text) for i, text in enumerate(builtin_texts(domain))
            ]
        texts = [work.text for work in named]
        # Long prompts are made of these, so theirs is enough to tell them apart.
        mark = fingerprint(texts)
        chosen = named[: self.num]
        if num_tokens is not None:
            make = _retrieval if domain == "retrieval" and self.saved is None else _in_context
            chosen = [
                Work(f"{work.prompt_id}@{num_tokens}", make(texts, i, num_tokens, count))
                for i, work in enumerate(chosen)
            ]
        return Prompts(tuple(chosen), mark)


def _in_context(texts: Sequence[str], place: int, num_tokens: int, count: Count) -> str:
    """Text number `place` behind as many others as are needed, those before it last."""
    parts = [texts[place]]
    before = place
    while count(whole := "\n\n".join(reversed(parts))) < num_tokens:
        # Twice as much each time, so that long prompts are not counted over and over.
        for _ in range(len(parts)):
            before -= 1
            parts.append(texts[before % len(texts)])
    starts = [0, *(match.start() for match in _WORD.finditer(whole))]
    cut = bisect_left(starts, -num_tokens, key=lambda start: -count(whole[start:]))
    return whole[starts[min(cut, len(starts) - 1)] :]


def _retrieval(_: Sequence[str], place: int, num_tokens: int, count: Count) -> str:
    """With the most notes that fit."""

    def length(num_notes: int) -> int:
        return count(retrieval_prompt(place, num_notes))

    # Twice as many each time, so that short prompts are not made of long ones.
    most = 1
    while most < MOST_NOTES and length(most) <= num_tokens:
        most = min(2 * most, MOST_NOTES)
    fitting = bisect_right(range(1, most + 1), num_tokens, key=length)
    if fitting in (0, MOST_NOTES):
        raise ConfigError(
            f"no retrieval prompt of {num_tokens} tokens: they have {length(1)} to "
            f"{length(MOST_NOTES)}.",
            hint="choose another length, or another domain",
        )
    return retrieval_prompt(place, fitting)
