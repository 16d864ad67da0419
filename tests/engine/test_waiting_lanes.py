"""Lanes that may wait: the engine tells schedules what jobs took, and nobody waits for ever."""

from __future__ import annotations

from dataclasses import replace

import pytest

from checks.engine import PROMPT, plain
from checks.state import VOCAB
from doubles.rig import Request, Rig, model_drafter
from doubles.tiny_attention import TinyAttentionLM
from outrider.core.draft import JobTrace
from outrider.core.params import SamplingParams
from outrider.engine.engine import Engine
from outrider.engine.lanes import InlineLanes
from outrider.plugins.lanes.lane_order import FixedOrder
from outrider.plugins.lanes.schedules import PrefillDraftVerify
from outrider.sched.jobs import Job, LaneSizes, ReadyQueues

PARAMS = SamplingParams(max_tokens=9)
PROMPTS = [PROMPT, PROMPT[2:], (4,), (0, 0, 0, 0)]


class Reluctant(PrefillDraftVerify):
    """Waits whenever it may, and collects the traces of jobs."""

    def __init__(self) -> None:
        super().__init__(LaneSizes(chunk=3, decode=2), threshold=0)
        self.traces: list[JobTrace] = []
        self.num_waits = 0

    def next_job(self, lane: str, pool: ReadyQueues, num_live: int) -> Job | None:
        if lane != "prefill" and pool.patient and (pool.verifying or pool.drafting or pool.verify):
            self.num_waits += 1
            return None
        return super().next_job(lane, pool, num_live)

    def observe(self, trace: JobTrace) -> None:
        self.traces.append(trace)
        super().observe(trace)


def lanes_of(rig: Rig, schedule: PrefillDraftVerify) -> Engine:
    """The rig's engine with that schedule, whose lanes take turns."""
    engine = rig.engine()
    assert isinstance(engine.executor, InlineLanes)
    runner = engine.executor.runners["main"]
    lanes = InlineLanes(dict.fromkeys(schedule.lanes, runner))
    return replace(engine, executor=lanes, schedule=schedule, order=FixedOrder())


def served(engine: Engine, rig: Rig) -> list[list[int]]:
    sequences = [rig.live(seq_id, Request(one, PARAMS)) for seq_id, one in enumerate(PROMPTS)]
    for seq in sequences:
        engine.submit(seq)
    for _ in range(500):
        if not engine.has_work:
            break
        engine.step()
    assert not engine.has_work
    return [seq.tokens[seq.prompt_length :] for seq in sequences]


@pytest.mark.parametrize("batch_size", [2, 4])
def test_lanes_that_would_rather_wait_still_write_the_text_of_plain_decoding(
    batch_size: int,
) -> None:
    drafter = model_drafter(TinyAttentionLM(vocab_size=VOCAB))
    rig = Rig(TinyAttentionLM(vocab_size=VOCAB), drafter, k=3, chunk=3, batch_size=batch_size)
    schedule = Reluctant()
    texts = served(lanes_of(rig, schedule), rig)
    assert texts == [list(plain(TinyAttentionLM, prompt, 9)) for prompt in PROMPTS]
    assert schedule.num_waits > 0
    kinds = {trace.kinds for trace in schedule.traces}
    assert {("prefill",), ("draft",), ("verify",)} <= kinds
    num_judged = sum(len(job.seq_ids) for job in schedule.traces if job.kinds == ("verify",))
    assert num_judged == sum(trace.num_emitted > 0 for trace in rig.traces)
