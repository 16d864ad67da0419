"""Is anything of a draft accepted? Some shipped prompts, written with it and counted.

What counts is the first token of a draft, which needs no other to be right: the share of them that
was kept, with the upper end of its 95 % interval (Wilson, "Probable Inference, the Law of
Succession, and Statistical Inference", 1927). Below DEAD nothing that a draft costs can be paid
back, so the pair is called dead, whatever its vocabularies and sizes say.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace

from outrider.api.llm import LLM
from outrider.bench.workloads import builtin_texts
from outrider.core.config import EngineConfig
from outrider.core.params import SamplingParams
from outrider.metrics.summary import position_counts

DEAD = 0.05
_Z = 1.96
_DOMAINS = ("code", "maths", "conversation")


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Greedily, over all prompts. `first_high` bounds the share of first tokens kept from above."""

    drafter: str
    num_prompts: int
    num_tokens: int
    num_rounds: int
    num_drafted: int
    num_accepted: int
    num_first: int
    num_first_kept: int
    notes: tuple[str, ...] = ()

    @property
    def tokens_per_round(self) -> float:
        return self.num_tokens / self.num_rounds if self.num_rounds else 0.0

    @property
    def first_high(self) -> float:
        return upper_bound(self.num_first_kept, self.num_first)

    @property
    def dead(self) -> bool:
        return self.first_high < DEAD

    @property
    def text(self) -> str:
        """One sentence."""
        if not self.num_first:
            return f"measured on {self.num_prompts} prompts: drafter {self.drafter} drafted nothing"
        return (
            f"measured on {self.num_prompts} prompts: {self.num_accepted} of {self.num_drafted} "
            f"drafted tokens kept, {self.tokens_per_round:.2f} tokens a round; first tokens "
            f"{100 * self.num_first_kept / self.num_first:.0f} % "
            f"(at most {100 * self.first_high:.0f} %)"
        )


def measure(
    target: str, draft: str, config: EngineConfig, *, num_prompts: int, max_tokens: int
) -> Measured:
    """Load both and write. No watchdog ends what is to be counted. Raises OutriderError if they
    cannot be loaded together."""
    config = replace(config, watchdog="off")
    prompts = some_prompts(num_prompts)
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    with closing(LLM(target, draft=draft, config=config)) as llm:
        results = llm.generate(prompts, params)
        drafter = llm.drafter
    traces = [trace for result in results for trace in result.rounds]
    ((first, kept),) = position_counts(traces, 1)
    return Measured(
        drafter=drafter,
        num_prompts=len(prompts),
        num_tokens=sum(result.stats.num_emitted for result in results),
        num_rounds=sum(result.stats.num_rounds for result in results),
        num_drafted=sum(result.stats.num_drafted for result in results),
        num_accepted=sum(result.stats.num_accepted for result in results),
        num_first=first,
        num_first_kept=kept,
        notes=tuple(dict.fromkeys(note for result in results for note in result.notes)),
    )


def some_prompts(num: int) -> Sequence[str]:
    """Shipped ones, of several domains in turns."""
    rows = zip(*(builtin_texts(domain) for domain in _DOMAINS), strict=False)
    return [text for row in rows for text in row][:num]


def upper_bound(kept: int, tried: int) -> float:
    """Of a share, by Wilson's interval; 1 if nothing was tried."""
    if not tried:
        return 1.0
    share, z2 = kept / tried, _Z * _Z
    middle = share + z2 / (2 * tried)
    spread = _Z * math.sqrt(share * (1 - share) / tried + z2 / (4 * tried * tried))
    return min((middle + spread) / (1 + z2 / tried), 1.0)
