"""From a configuration and loaded models to a wired engine: the only place that resolves names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from outrider.control.fixed import FixedController
from outrider.core.budget import Budget, RoundTrace
from outrider.core.config import EngineConfig
from outrider.core.errors import ConfigError
from outrider.core.protocols import AcceptanceRule, CausalLM, Drafter
from outrider.drafters.model import ModelDrafter
from outrider.drafters.ngram import NgramDrafter
from outrider.drafters.none import NoDrafter
from outrider.engine.inline import InlineEngine
from outrider.engine.stages import Stages
from outrider.engine.stepwise import StepwiseLM
from outrider.sched.admission import Limits
from outrider.sched.ledger import Ledger
from outrider.sched.single import SingleLane
from outrider.verify.match import MatchRule
from outrider.verify.token import TokenRule

# A draft model's memory is sized from a fixed cap, not from what the target happens to leave.
DRAFT_CONTEXT = 4096

RULES: dict[str, Callable[[], AcceptanceRule]] = {
    "token": TokenRule,
    "match": MatchRule,
    "block": TokenRule,
}


@dataclass(frozen=True, slots=True)
class Parts:
    """What loading provides. `argmax` is the greedy choice: the first maximum wins."""

    target: CausalLM
    draft: CausalLM | None
    argmax: Callable[[Tensor], list[int]]


def resolve_drafter(config: EngineConfig, *, has_draft: bool) -> str:
    """The drafter that `config` means. Raises ConfigError if it needs a draft model."""
    if config.k == 0:
        return "none"
    if config.drafter == "auto":
        return "model" if has_draft else "ngram"
    if config.drafter == "model" and not has_draft:
        raise ConfigError(
            "drafter 'model' needs a draft model, and none was given.",
            hint="name one with --draft, or use --drafter ngram; `outrider pairs` lists pairs",
        )
    return config.drafter


def resolve_window(
    config: EngineConfig, target_tokens: int, draft_tokens: int | None, *, k: int
) -> int:
    """Tokens that a sequence may hold: bounded by both models' windows and by the context.

    `k` is what will be drafted, 0 if nothing is.

    Raises ConfigError when not even a prompt of one token would leave room for a round.
    """
    window = target_tokens
    if draft_tokens is not None:
        window = min(window, draft_tokens)
    if config.context:
        window = min(window, config.context)
    elif draft_tokens is not None:
        window = min(window, DRAFT_CONTEXT)
    if k + 2 >= window:
        raise ConfigError(
            f"k={k} leaves no room in a window of {window} tokens.",
            hint="lower --k or raise --context",
        )
    return window


def build_engine(
    config: EngineConfig, parts: Parts, *, num_slots: int, sink: Callable[[RoundTrace], None]
) -> InlineEngine:
    """Wire models, drafter, rule, controller and schedule together."""
    drafter = _drafter(config, parts)
    k = 0 if drafter.name == "none" else config.k
    target = parts.target if config.batched_verify else StepwiseLM(parts.target)
    stages = Stages(
        target=target,
        drafter=drafter,
        rule=RULES[config.sampler](),
        controller=FixedController(Budget(k)),
        argmax=parts.argmax,
        sink=sink,
    )
    return InlineEngine(
        target=target,
        drafter=drafter,
        round=stages,
        schedule=SingleLane(config.prefill_chunk),
        ledger=Ledger(config.prefill_chunk),
        limits=Limits(config.batch_size, num_slots),
        page_size=config.page_size,
        spare=k + 1,
    )


def _drafter(config: EngineConfig, parts: Parts) -> Drafter:
    match resolve_drafter(config, has_draft=parts.draft is not None):
        case "model":
            assert parts.draft is not None
            return ModelDrafter(parts.draft, parts.argmax, chunk=config.prefill_chunk)
        case "ngram":
            return NgramDrafter(max_n=config.max_ngram, min_n=config.min_ngram)
        case _:
            return NoDrafter()
