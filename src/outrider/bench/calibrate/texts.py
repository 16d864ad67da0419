"""Prompts to time rounds on: texts that go on as they went, so that lookups draft as deep as asked.

A model that writes greedily soon repeats itself. What it wrote last, again and again, is a prompt
that it goes on with; what it says does not matter, only that every drafter has something to draft.
Prompts differ in their first token, so that no sequence finds its beginning in another's memory.
"""

from __future__ import annotations

from collections.abc import Sequence

from outrider.api.llm import LLM
from outrider.bench.workload import ECHO, builtin_texts
from outrider.core.params import SamplingParams

# Tokens that it writes, and those of them that are repeated.
_WRITTEN, _REPEATED = 128, 32


def repetition(llm: LLM) -> list[int]:
    """The last tokens of what `llm` wrote after a text with a copy in it."""
    ids = llm.tokenizer.encode(builtin_texts(ECHO)[0])
    params = SamplingParams(max_tokens=_WRITTEN, ignore_eos=True)
    (result,) = llm.generate([ids], params)
    return [*ids, *result.token_ids][-_REPEATED:]


def prompts_of(piece: Sequence[int], *, length: int, count: int) -> list[list[int]]:
    """`count` prompts of `length` tokens that end as `piece` does."""
    copies = list(piece) * (length // len(piece) + 1)
    return [[number + 1, *copies[len(copies) - length + 1 :]] for number in range(count)]
