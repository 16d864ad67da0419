"""Wiring of an engine from settings and models: sizes, round, controller, schedule, lanes."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from outrider.control.goodput import GoodputController
from outrider.control.heuristics import FixedController, GuardedController, Watchdog
from outrider.control.scored import ScoredController
from outrider.core.config import OTHER_CONTROLLERS, EngineConfig
from outrider.core.draft import Budget, Choice, JobTrace, RoundTrace
from outrider.core.errors import ConfigError, within_memory
from outrider.core.plugins import drafter_named
from outrider.core.protocols import (
    CacheStore,
    CausalLM,
    Controller,
    DraftAhead,
    Drafter,
    HasMembers,
)
from outrider.core.resolve import ResolvedConfig
from outrider.core.spec import DraftCapacity, RecurrentCapacity
from outrider.core.tree import MAX_WIDTH
from outrider.drafters.common.context import BuildContext, LoadedModels
from outrider.drafters.portfolio import PortfolioDrafter
from outrider.engine.drafting import DrafterHandle, RequestDrafters
from outrider.engine.engine import Engine
from outrider.engine.lanes import InlineLanes, LaneRunner, Lanes
from outrider.engine.native_round import NativeRound, native_round
from outrider.engine.requests import KneeOnceNeeded, RequestTable
from outrider.engine.round import FixedLengths, Round, StepwiseLM
from outrider.engine.stages import Stages
from outrider.kernels.operators import pick_device
from outrider.models.decoder import ModelCapacity
from outrider.sched.admission import BatchLimit, Limit, PromptPace, observed
from outrider.sched.jobs import Ledger, Limits, single_lane
from outrider.verify.rules import exact_rules, rule_for

if TYPE_CHECKING:
    from outrider.plugins.compaction import Compaction

# A draft model's memory is sized from a fixed cap, not from what the target happens to leave.
DRAFT_CONTEXT = 4096

# Matrix products per second of a core, roughly: a guess until the first prompt was read.
FLOPS_A_THREAD = 25e9

_log = logging.getLogger(__name__)


def resolve_window(config: EngineConfig, target_tokens: int, *, has_draft: bool, k: int) -> int:
    """Return the tokens that a sequence may hold: bounded by the target's window and by the
    context. Drafts get shorter near its end and that of a draft model's window: see `Stages.depth`.

    `has_draft` says that a draft model shares the vocabulary; `k` is the number of tokens to draft,
    0 if nothing is drafted.

    Raises ConfigError when not even a prompt of one token would leave space for a round.
    """
    window = target_tokens
    if config.context:
        window = min(window, config.context)
    elif has_draft:
        window = min(window, DRAFT_CONTEXT)
    if k + 2 >= window:
        raise ConfigError(
            f"k={k} leaves no space in a window of {window} tokens.",
            hint="lower --k or raise --context",
        )
    return window


def draft_capacity(resolved: ResolvedConfig) -> DraftCapacity:
    """Return the additional memory that the draft model needs for drafting ahead or for trees."""
    config = resolved.settings
    if resolved.ahead:
        from outrider.plugins.lanes.ahead.choices import capacity_needed

        return capacity_needed(config.most_k, config.fan_out, config.most_batch)
    if not resolved.wants_trees or resolved.left_to_us:
        return DraftCapacity()
    rows = config.most_batch * MAX_WIDTH
    return DraftCapacity(rows, rows, config.most_k * MAX_WIDTH)


def model_capacity(
    config: EngineConfig,
    num_slots: int,
    *,
    max_rows: int,
    max_logits: int,
    window: int = 0,
    num_staged: int = 0,
) -> ModelCapacity:
    """Return the capacity of a model that is loaded. With `num_staged`, the most staged tokens of a
    text, local layers have memory of their own: on CPUs and in one process."""
    apart = num_staged and config.tensor_parallel == 1 and pick_device(config.device).type == "cpu"
    return ModelCapacity(
        num_slots=num_slots,
        page_size=config.page_size,
        max_rows=max_rows,
        max_logits=max_logits,
        states=states_of(config),
        window=window,
        frees_pages=True,
        num_texts=config.most_batch if apart else 0,
        num_staged=num_staged,
    )


def most_staged(resolved: ResolvedConfig) -> int:
    """Return the most tokens of one text that a job reads and a round stages behind them."""
    return resolved.settings.most_chunk + resolved.staged_rows + 1


def states_of(config: EngineConfig) -> RecurrentCapacity:
    """Return the capacity for the recurrent states of a hybrid, if the model is one."""
    return RecurrentCapacity(
        rollback=config.state_rollback,
        history=config.state_history or max(1, config.most_k, config.tree_nodes),
        num_sequences=config.most_batch,
        num_checkpoints=config.state_checkpoints,
    )


def whole_pages(num_tokens: int, page_size: int) -> int:
    return -(-num_tokens // page_size) * page_size


@runtime_checkable
class FreeingStore(CacheStore, Protocol):
    """A memory that frees what no later token attends to."""

    @property
    def reach(self) -> int:
        """Tokens that the next token of a text attends to, itself included; 0 for all."""
        ...


def most_held(target: CausalLM, step: int, page_size: int) -> int:
    """Return the arena tokens that a text of any length takes at most, if a job feeds at most
    `step` tokens of it; 0 if that is not bounded."""
    reach = target.state.reach if isinstance(target.state, FreeingStore) else 0
    return reach + step + page_size if reach else 0


@runtime_checkable
class BoundedStore(CacheStore, Protocol):
    """A memory that can return to `history` nodes of a round, in addition to the pending token.

    A recurrent memory keeps the states to which a round may return. Their number is a setting, or
    is given by the free memory of a device. Longer drafts are cut to it, and the user is notified.
    """

    @property
    def history(self) -> int: ...


def within_history(config: EngineConfig, target: CausalLM) -> EngineConfig:
    """Return `config` with drafts no larger than the target's memory can return to."""
    most = _history(target)
    if most is None or most >= max(config.most_k, config.tree_nodes):
        return config
    return replace(
        config,
        k=min(config.most_k, most),
        min_k=min(config.min_k, most),
        tree_nodes=min(config.tree_nodes, most),
    )


def history_note(config: EngineConfig, target: CausalLM) -> str | None:
    """Return a note for the user if drafts are cut, else None."""
    most, wanted = _history(target), max(config.most_k, config.tree_nodes)
    if most is None or most >= wanted:
        return None
    return (
        f"drafts are cut from {wanted} tokens a round to {most}, which the recurrent states can "
        "return to; --state-history raises that where memory allows"
    )


def _history(target: CausalLM) -> int | None:
    state = target.state
    return state.history if isinstance(state, BoundedStore) else None


@within_memory("making drafters and lanes")
def build_engine(
    resolved: ResolvedConfig,
    models: LoadedModels,
    *,
    num_slots: int,
    sink: Callable[[RoundTrace], None],
    jobs: Callable[[JobTrace], None] | None = None,
    controller: Controller | None = None,
) -> Engine:
    """Build an engine from models, drafter, rule, controller and schedule. A given `controller`
    replaces the one that `resolved` names; its budgets may not exceed k."""
    resolved = resolved.with_settings(within_history(resolved.settings, models.target))
    config = resolved.settings
    drafter = BuildContext(resolved, models, resolved.drafter).build()
    limit = _limit(config, models)
    sink = observed(sink, limit)
    if isinstance(drafter, PortfolioDrafter) and drafter.leads is not None:
        sink = drafter.leads.noting(sink)
    stages = _stages(resolved, models, drafter, sink)
    if controller is not None:
        most = Budget(resolved.k, num_nodes=config.tree_nodes)
        stages = replace(
            stages, controller=GuardedController(controller, most), fixed=None, trim=None
        )
    lanes = _lanes(resolved, models, stages)
    return Engine(
        residents=_residents(resolved, models, stages, limit, num_slots),
        executor=lanes.executor,
        schedule=lanes.schedule,
        order=lanes.order,
        deliver=lanes.deliver,
        jobs=jobs,
        pace=_pace(models),
    )


def _lanes(resolved: ResolvedConfig, models: LoadedModels, stages: Stages) -> Lanes:
    config, make_round = resolved.settings, partial(_round, resolved, models)
    if config.schedule != "single":
        # Imported here: the plugin of schedules with several lanes.
        from outrider.plugins.lanes.build import build_lanes

        return build_lanes(config, stages, make_round, models.machine)
    schedule = single_lane(config)
    runner = LaneRunner(make_round(stages), stages)
    return Lanes(schedule, InlineLanes(dict.fromkeys(schedule.lanes, runner)))


def _limit(config: EngineConfig, models: LoadedModels) -> Limit | None:
    if config.adaptive_batch:
        return BatchLimit(highest=config.most_batch, target_ms=config.target_ms)
    return KneeOnceNeeded(config.most_batch) if models.auto_batch else None


def _pace(models: LoadedModels) -> PromptPace | None:
    """Return the pace of reading prompts; None if the text might depend on its chunks."""
    if not models.exact:
        return None
    num_threads = 1 if models.machine is None else models.machine.num_threads
    spec = models.target.spec
    idle = 1 - spec.num_active_experts / spec.num_experts if spec.num_experts else 0.0
    flops_a_token = 2 * (spec.num_multiplied - idle * spec.expert_parameters)
    return PromptPace(flops_a_token / (FLOPS_A_THREAD * num_threads))


def _stages(
    resolved: ResolvedConfig,
    models: LoadedModels,
    drafter: Drafter,
    sink: Callable[[RoundTrace], None],
) -> Stages:
    config = resolved.settings
    controller = _controller(resolved)
    return Stages(
        target=models.target if config.batched_verify else StepwiseLM(models.target),
        drafter=drafter,
        rule=rule_for(config.sampler, config.leniency, models.sampling),
        controller=_watched(resolved, controller),
        fixed=FixedLengths(_fixed(resolved), config.sampler) if resolved.keeps_lengths else None,
        trim=controller.trim if isinstance(controller, ScoredController) else None,
        most_drafted=resolved.most_drafted,
        argmax=models.argmax,
        sink=sink,
        sampling=models.sampling,
        compaction=_compaction(config, models.target, drafter),
        draft_window=models.draft_window,
        rules=exact_rules(models.sampling),
        others=RequestDrafters(partial(_chosen, resolved, models, drafter)),
    )


def _compaction(config: EngineConfig, target: CausalLM, drafter: Drafter) -> Compaction | None:
    """Return the compaction of --kv-budget; None without it. Raises ConfigError if this target or
    drafter does not support it."""
    if not config.kv_budget:
        return None
    from outrider.plugins.compaction import compaction_of

    return compaction_of(config, target, drafter)


def _chosen(resolved: ResolvedConfig, models: LoadedModels, drafter: Drafter, name: str) -> Drafter:
    """Return the drafter of a request that chose `name`: a part of the engine's own `drafter`, or
    one that needs no model."""
    part = drafter.member(name) if isinstance(drafter, HasMembers) else None
    return BuildContext(resolved, models, drafter_named(name)).build() if part is None else part


def _residents(
    resolved: ResolvedConfig,
    models: LoadedModels,
    stages: Stages,
    limit: Limit | None,
    num_slots: int,
) -> RequestTable:
    config, drafter = resolved.settings, stages.drafter
    spare = resolved.staged_rows + 1
    step = max(config.most_chunk, spare)
    # A draft model's arena is as large as the target's, and may have to hold whole texts.
    held = most_held(models.target, step, config.page_size) if models.draft is None else 0
    ahead = resolved.ahead and isinstance(drafter, DraftAhead)
    timeout = math.inf if drafter.needs.shares_memory else config.drafter_timeout
    return RequestTable(
        target=stages.target,
        drafting=DrafterHandle(drafter, ahead=ahead, timeout=timeout, others=stages.others),
        ledger=Ledger(drafts_ahead=ahead),
        limits=Limits(
            config.most_batch,
            num_slots,
            page_size=config.page_size,
            spare=spare,
            reserve=config.reserve,
            max_waiting=config.max_waiting,
            beyond=resolved.rows_past_end(captures=models.device != "cpu"),
            held=held,
        ),
        batch_limit=limit,
        compaction=stages.compaction,
    )


def _round(resolved: ResolvedConfig, models: LoadedModels, stages: Stages) -> Round:
    """Return the fastest round that fits the configuration; all rounds emit the same tokens."""
    config = resolved.settings
    if not config.fused_round:
        return stages
    if models.device != "cpu":
        from outrider.plugins.gpu.rounds.build import captured_round

        captured = captured_round(
            config, stages, draft=models.draft, window=lambda: _window(resolved, models)
        )
        if not isinstance(captured, str):
            return captured
        _log.info("Rounds are not captured: %s.", captured)
    native = native_round(
        stages,
        models.draft,
        rule=config.sampler,
        pick=models.sampling.pick,
        batch_size=config.most_batch,
    )
    if isinstance(native, NativeRound):
        return native
    _log.info("Rounds run stage by stage: %s.", native)
    return stages


def _window(resolved: ResolvedConfig, models: LoadedModels) -> int:
    """Return the window as loading resolved it, up to the reach of the draft model."""
    reach, most = models.draft_window, models.target.spec.max_tokens
    window = resolve_window(resolved.settings, most, has_draft=reach is not None, k=resolved.k)
    return window if reach is None else min(window, reach)


def _watched(resolved: ResolvedConfig, controller: Controller) -> Controller:
    """Return the controller, with a watchdog unless goodput decides alone."""
    config = resolved.settings
    decides = config.controller == "goodput" and not resolved.keeps_lengths
    if config.watchdog == "off" or decides or config.most_k == 0:
        return controller
    return Watchdog(controller, shared=config.watchdog == "engine")


def _fixed(resolved: ResolvedConfig) -> Budget:
    return Budget(resolved.k, num_nodes=resolved.num_nodes, choice=Choice("fixed"))


def _controller(resolved: ResolvedConfig) -> Controller:
    """Return the configured controller. Raises ConfigError if min_k is above k."""
    config, k, num_nodes = resolved.settings, resolved.k, resolved.num_nodes
    name = config.controller
    if k == 0 or name == "fixed":
        return FixedController(_fixed(resolved))
    if name == "goodput" and resolved.drafter.scores:
        return ScoredController(k=k, num_nodes=num_nodes, most_drafted=resolved.most_drafted)
    if name == "goodput":
        return GoodputController(k=k, num_nodes=num_nodes)
    if name not in OTHER_CONTROLLERS.built_in:
        most = Budget(k, num_nodes=num_nodes)
        own = OTHER_CONTROLLERS.build(OTHER_CONTROLLERS.load(name), most)
        return GuardedController(own, most)
    from outrider.plugins.controllers import controller_of

    return controller_of(config, k=k, num_nodes=num_nodes)
