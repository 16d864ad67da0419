"""How many tokens a round would emit: a drafter in training, on text that it does not learn from.

The target writes greedily after held-out prompts, once. On such a text the engine's greedy rounds
need no engine: a draft is accepted as far as it is the text. So whoever knows, for every position,
how many of K drafts made there would be accepted, knows all rounds: the round whose pending token
is at p emits accepted[p] + 1 tokens, and the next one begins there. Drafts past the end of the text
count for nothing, as a request that ends clamps them.

Shapes:  T = tokens of a text, V = vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from outrider.core.clock import host_ints

# Given ids_T and K, for every position p how many of K drafts would be accepted in a round whose
# pending token is at p: accepted_T, whole numbers up to K.
Accepted: TypeAlias = Callable[[Tensor, int], Tensor]


@dataclass(frozen=True, slots=True)
class HeldOut:
    """A prompt and the target's own greedy text after it, as ids."""

    ids: tuple[int, ...]
    num_prompt: int


@dataclass(frozen=True, slots=True)
class Exam:
    texts: tuple[HeldOut, ...]
    device: torch.device
    k: int = 4

    def tokens_per_round(self, accepted: Accepted) -> float:
        """Emitted over rounds, over all texts; 1 means that no draft is ever accepted."""
        num_emitted = num_rounds = 0
        for text in self.texts:
            ids_T = torch.tensor(text.ids, device=self.device)
            kept = host_ints(accepted(ids_T, self.k))
            emitted = rounds(kept, text.num_prompt, len(text.ids))
            num_emitted, num_rounds = num_emitted + sum(emitted), num_rounds + len(emitted)
        return num_emitted / num_rounds if num_rounds else 1.0


def rounds(accepted: Sequence[int], num_prompt: int, num_tokens: int) -> list[int]:
    """What each round emits, from the last token of the prompt to the end of the text."""
    emitted: list[int] = []
    pending = num_prompt - 1
    while pending < num_tokens - 1:
        emitted.append(min(accepted[pending] + 1, num_tokens - 1 - pending))
        pending += emitted[-1]
    return emitted


def accepted_of_choices(choices_T: Tensor, ids_T: Tensor, k: int) -> Tensor:
    """accepted_T of a drafter that drafts token by token after accepted text, as a draft model
    does: `choices_T` is what it takes to follow each position. Its later drafts see its earlier
    ones, which were the text wherever they were accepted."""
    right_T = torch.zeros_like(ids_T)
    right_T[:-1] = choices_T[:-1] == ids_T[1:]
    accepted_T = torch.zeros_like(ids_T)
    going_T = torch.ones_like(ids_T)
    for ahead in range(min(k, len(ids_T))):
        later_T = torch.zeros_like(ids_T)
        later_T[: len(ids_T) - ahead] = right_T[ahead:]
        going_T = going_T * later_T
        accepted_T += going_T
    return accepted_T
