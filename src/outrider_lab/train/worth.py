"""What a finished drafter brings and costs on this machine, for the config.json of its folder."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from outrider.api.llm import LLM
from outrider.core.config import DEFAULT_K, EngineConfig
from outrider.core.draft import RoundTrace
from outrider.core.files import replacing, writing
from outrider.core.params import SamplingParams
from outrider.estimate.forecast import KEY, StatedWorth
from outrider.models.checkpoint import CONFIG, open_checkpoint
from outrider.models.heads import kind_of

_TOKENS = 64


@dataclass(slots=True)
class _Seen:
    """Rounds that drafted as long as they could: `longest` tokens."""

    longest: int = 0
    drafting: list[float] = field(default_factory=list[float])
    verifying: list[float] = field(default_factory=list[float])
    accepted: list[int] = field(default_factory=list[int])

    def add(self, rounds: Iterable[RoundTrace]) -> None:
        for one in rounds:
            if one.num_prompt_tokens or one.num_drafted < self.longest:
                continue
            if one.num_drafted > self.longest:
                self.longest, self.drafting, self.verifying, self.accepted = (
                    one.num_drafted, [], [], [],
                )  # fmt: skip
            self.drafting.append(one.draft_seconds)
            self.verifying.append(one.verify_seconds)
            self.accepted.append(one.num_accepted)


def state_worth(
    target: str, folder: Path, prompts: Sequence[str], *, drafter: str, device: str = "auto"
) -> StatedWorth | None:
    """Writes it into the config.json of `folder`, which has what drafts for `target` or is the
    target itself. None, and nothing is written, where there is nothing to tell from. Raises
    MachineError, and what loading raises."""
    worth = measured_worth(target, folder, prompts, drafter=drafter, device=device)
    if worth is not None:
        path = folder / CONFIG
        stated = {KEY: {"drafter": drafter, **worth.values()}}
        config = open_checkpoint(folder).document(CONFIG).values
        text = json.dumps({**config, **stated}, indent=1) + "\n"
        with writing(folder), replacing(path, alone=True) as draft:
            draft.write_text(text, encoding="utf-8")
    return worth


def measured_worth(
    target: str, folder: Path, prompts: Sequence[str], *, drafter: str, device: str = "auto"
) -> StatedWorth | None:
    """From greedy texts after `prompts`: each plain, at K = 1 and at the longest K, in turns. Heads
    that draft fewer tokens are measured at as many as they draft."""
    seen = {0: _Seen(), 1: _Seen(), DEFAULT_K: _Seen()}
    params = SamplingParams(max_tokens=_TOKENS)
    with ExitStack() as stack:
        llms: dict[int, LLM] = {}
        for k in seen:
            config = EngineConfig(
                drafter=drafter if k else "none",
                k=k,
                controller="fixed",
                watchdog="off",
                batch_size=1,
                device=device,
                profile=True,
            )
            draft = str(folder) if k and kind_of(folder) == drafter else None
            llm = LLM(target, draft=draft, config=config, weights_of=llms.get(0))
            llms[k] = stack.enter_context(closing(llm))
        for prompt in prompts:
            for k, llm in llms.items():
                seen[k].add(llm.generate([prompt], params)[0].rounds)
    longest = seen[DEFAULT_K]
    if not seen[0].accepted or not (seen[1].longest and longest.longest):
        return None
    num_rounds, depths = len(longest.accepted), range(longest.longest)
    kept = [sum(n > depth for n in longest.accepted) / num_rounds for depth in depths]
    return fitted(
        [round(share, 3) for share in kept],
        (median(seen[1].drafting), median(longest.drafting)),
        (median(seen[1].verifying), median(longest.verifying)),
        median(seen[0].verifying),
    )


def fitted(
    kept: Sequence[float], draft: tuple[float, float], verify: tuple[float, float], plain: float
) -> StatedWorth:
    """StatedWorth from seconds of drafting and verifying at the ends of K, and of a plain round."""
    steps = max(len(kept) - 1, 1)
    later = max(draft[1] - draft[0], 0.0) / steps
    row = max((verify[1] - plain) / len(kept), 0.0)
    first = max(draft[0] + verify[0] - plain - row, 0.0)
    return StatedWorth(tuple(kept), *(round(time / plain, 3) for time in (first, later, row)))
