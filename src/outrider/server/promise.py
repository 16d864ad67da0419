"""Predicted speed-up of an engine before it has run: `outrider plan` from sizes alone.

The playground compares it with the measurement of a race. The planner only has the sizes of target
and drafter, the kind of device, and typical acceptance of such drafters, so its interval is wide.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from outrider.core.errors import ConfigError
from outrider.server.port import Promise

if TYPE_CHECKING:
    from outrider.api.llm import LLM

# Tokens of a typical answer in a chat, with a batch of one.
_CONTEXT, _NEW_TOKENS = 128, 128


def promise_of(llm: LLM) -> Promise | None:
    """Return the prediction; None without a drafter or without figures for this device."""
    from outrider.api.memory_parts import WEIGHTS
    from outrider.planner.advise import Question, advise
    from outrider.planner.candidates import DraftOption, Engines, PlannedJob
    from outrider.planner.suppose import Candidate, sheet_like, supposed

    if not llm.k:
        return None
    weights = {name: held for name, held in llm.memory.items() if name.startswith(WEIGHTS)}
    of_drafter = sum(weights.values()) - weights.get(f"{WEIGHTS}target", 0)
    candidate = Candidate.of(llm.drafter, llm.drafter, llm.spec, of_drafter)
    question = Question(
        job=PlannedJob(batch=1, context=_CONTEXT, new_tokens=_NEW_TOKENS),
        candidates=(DraftOption(llm.drafter, llm.k),),
        engines=Engines(names=("single",)),
    )
    gpu = None if llm.device.type == "cpu" else str(llm.device)
    try:
        sheet = sheet_like(llm.device.type, gpu)
        best = advise(supposed(llm.spec, sheet, [candidate], machine=""), question).best
    except ConfigError:
        return None
    return best and Promise(speed_up=best.speed_up, low=best.low, high=best.high)
