"""Builder of the executor for a schedule's lanes: inline, or a thread and a stream each."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from threading import Lock

from outrider.core.config import EngineConfig
from outrider.core.draft import Budget, RoundTrace
from outrider.core.protocols import Controller
from outrider.drafters.common.context import LaneTarget, Machine
from outrider.engine.lanes import Executor, InlineLanes, LaneRunner, Lanes
from outrider.engine.native_round import NativeRound, native_round
from outrider.engine.round import Round, StepwiseLM
from outrider.engine.stages import Stages
from outrider.plugins.lanes.lane_order import order_named
from outrider.plugins.lanes.schedules import schedule_for
from outrider.plugins.lanes.threads import ThreadLanes, lane_streams
from outrider.sched.jobs import DECODE, PREFILL, VERIFY
from outrider.verify.rules import exact_rules, rule_for

_log = logging.getLogger(__name__)

# The lane that may use the loaded target's buffers; other lanes have their own.
MAIN_LANE = DECODE


@dataclass(slots=True)
class _Shared:
    """A controller that several lanes may call at any time."""

    controller: Controller
    lock: Lock = field(default_factory=Lock)

    def budgets(self, seq_ids: Sequence[int]) -> list[Budget]:
        with self.lock:
            return self.controller.budgets(seq_ids)

    def observe(self, trace: RoundTrace) -> None:
        with self.lock:
            self.controller.observe(trace)


def build_lanes(
    config: EngineConfig,
    stages: Stages,
    make_round: Callable[[Stages], Round],
    machine: Machine | None,
) -> Lanes:
    """Return threads where the target can serve several lanes at once, else lanes in turns.

    `make_round` makes the fastest round over the stages of a lane that drafts and verifies.
    """
    schedule = schedule_for(config)
    order = order_named(config.lane_order, margin=config.verify_margin, target_ms=config.target_ms)
    lanes = schedule.lanes
    if config.concurrent_lanes and machine is not None:
        twins = {lane: machine.twin() for lane in lanes if lane != MAIN_LANE}
        if all(twin is not None for twin in twins.values()):
            executor, deliver = _threads(config, lanes, stages, make_round, machine, twins)
            return Lanes(schedule, executor, order, deliver)
        _log.warning("Lanes take turns: this model cannot run two passes at once.")
    runner = LaneRunner(make_round(stages), stages)
    return Lanes(schedule, InlineLanes(dict.fromkeys(lanes, runner)), order)


def _threads(
    config: EngineConfig,
    lanes: Sequence[str],
    stages: Stages,
    make_round: Callable[[Stages], Round],
    machine: Machine,
    twins: dict[str, LaneTarget | None],
) -> tuple[Executor, Callable[[], None]]:
    left: deque[RoundTrace] = deque()
    sink = stages.sink
    stages = replace(stages, sink=left.append, controller=_Shared(stages.controller))

    def deliver() -> None:
        while left:
            sink(left.popleft())

    calls = {lane: _runner(config, stages, make_round, twins.get(lane), lane) for lane in lanes}
    threads = [_num_threads(config, lane, machine.num_threads) for lane in lanes]

    def setup(number: int) -> None:
        if machine.join_lane is not None:
            machine.join_lane(number, threads[number])

    streams = lane_streams(lanes, machine.device, config.lane_streams, sync=config.lane_sync)
    return ThreadLanes(calls, setup, streams), deliver


def _runner(
    config: EngineConfig,
    stages: Stages,
    make_round: Callable[[Stages], Round],
    twin: LaneTarget | None,
    lane: str,
) -> LaneRunner:
    if twin is None:
        return LaneRunner(make_round(stages), stages)
    target = StepwiseLM(twin.target) if isinstance(stages.target, StepwiseLM) else twin.target
    own = replace(
        stages,
        target=target,
        argmax=twin.argmax,
        sampling=twin.sampling,
        rule=rule_for(config.sampler, config.leniency, twin.sampling),
        rules=exact_rules(twin.sampling),
    )
    if lane != VERIFY or not config.fused_round:
        return LaneRunner(own, own)
    native = native_round(
        own,
        None,
        rule=config.sampler,
        pick=stages.sampling.pick,
        batch_size=config.most_batch,
        drafted=True,
    )
    return LaneRunner(native if isinstance(native, NativeRound) else own, own)


def _num_threads(config: EngineConfig, lane: str, cores: int) -> int:
    """Return a lane's number of threads. A lane that runs in parallel with others, for prompts or
    for drafts ahead of verdicts, gets half of the cores. A lane that others wait for gets all of
    them; a thread of its team that another lane displaces only does less of the team's work."""
    if config.lane_threads:
        return config.lane_threads
    is_parallel = lane == PREFILL or (config.schedule == "ssd" and lane == DECODE)
    return max(cores // 2, 1) if is_parallel else cores
