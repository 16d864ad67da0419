"""A mask that is slow delays its own request, and records say whose it was."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from torch import Tensor

from checks.engine import PROMPT, greedy
from checks.state import VOCAB
from doubles.clocks import FakeClock
from doubles.drafters import REPEATS_LAST
from doubles.rig import Request, Rig
from doubles.toy_hybrid import ToyHybrid
from outrider import LLM, EngineConfig, SamplingParams
from outrider.core.draft import RoundTrace
from outrider.core.logits import AllowedTokens, LogitsProcessor
from outrider.metrics import profile

NUM = 12


def slow(clock: FakeClock, seconds: float) -> AllowedTokens:
    def allowed(text: Sequence[int]) -> Tensor | None:
        del text
        clock.advance(seconds)
        return None

    return allowed


def run(seconds: float, num_tokens: int = NUM) -> tuple[Rig, list[list[int]]]:
    """The second of three requests has a mask that takes so long."""
    clock = FakeClock()
    rig = Rig(ToyHybrid(vocab_size=VOCAB), REPEATS_LAST, k=2)
    params = greedy(num_tokens)
    shaper = LogitsProcessor(params, len(PROMPT), allowed=slow(clock, seconds), clock=clock)
    requests = [Request(PROMPT, params), Request(PROMPT, params, shaper=shaper)]
    rig.sequences = [rig.live(i, one) for i, one in enumerate([*requests, requests[0]])]
    engine = rig.engine()
    engine.residents.clock = clock
    for seq in rig.sequences:
        engine.submit(seq)
    while engine.has_work:
        engine.step()
    return rig, [seq.tokens[seq.prompt_length :] for seq in rig.sequences]


def rounds_of(traces: Sequence[RoundTrace], seq_id: int) -> list[RoundTrace]:
    return [t for t in traces if t.seq_id == seq_id and t.num_emitted]


def test_others_go_on_while_one_with_a_slow_mask_pays_for_its_time() -> None:
    """No time but the mask's goes by here, so after one round the others run to their end."""
    rig, texts = run(1.0)
    wanted = Rig(ToyHybrid(vocab_size=VOCAB), k=0).outputs([PROMPT], greedy(NUM))[0]
    assert texts == [wanted] * 3
    mine = rounds_of(rig.traces, 1)
    last_of_others = max(t.pass_index for i in (0, 2) for t in rounds_of(rig.traces, i))
    assert [t.pass_index < last_of_others for t in mine] == [True] + [False] * (len(mine) - 1)


def test_others_of_a_mask_that_is_quick_run_beside_it() -> None:
    rig, texts = run(0.001)
    assert texts[0] == texts[1] == texts[2]
    passes = [[t.pass_index for t in rounds_of(rig.traces, i)] for i in range(3)]
    assert passes[0] == passes[1] == passes[2]


def test_records_name_the_mask_and_nobody_elses_time() -> None:
    rig, _ = run(1.0)
    # One answer for each node and the root.
    assert [t.mask_seconds for t in rounds_of(rig.traces, 1)] == [
        1 + t.num_drafted for t in rounds_of(rig.traces, 1)
    ]
    assert {t.mask_seconds for i in (0, 2) for t in rounds_of(rig.traces, i)} == {0}
    shown = profile(rounds_of(rig.traces, 1), k=2)["rounds"]
    assert isinstance(shown, list)
    assert shown[0]["mask_ms"] == 1000 * rounds_of(rig.traces, 1)[0].mask_seconds


@pytest.mark.weights
@pytest.mark.parametrize("schedule", ["single", "pd", "pdv", "ssd"])
def test_everybody_comes_to_an_end_under_every_schedule(schedule: str) -> None:
    """With the time of a real clock, and nobody else to run in the end."""
    llm = LLM(config=EngineConfig(schedule=schedule, k=2, device="cpu", profile=True))
    params = SamplingParams(max_tokens=10, ignore_eos=True)
    (wanted,) = llm.generate("def f(x):", params)
    clock = FakeClock()
    llm._engine.residents.clock = clock  # pyright: ignore[reportPrivateUsage]
    tickets = [llm.submit("def f(x):", params, allowed=masked) for masked in (None, slow(clock, 9))]
    for ticket in tickets:
        shaper = ticket.reader.seq.shaper
        if shaper is not None:
            shaper.clock = clock
    for _ in range(500):
        if all(ticket.done for ticket in tickets):
            break
        llm.advance()
        clock.advance(0.01)
    results = [ticket.result() for ticket in tickets]
    assert [r.token_ids for r in results] == [wanted.token_ids] * 2
    assert sum(t.mask_seconds for t in results[1].rounds) >= 9 * 10
    assert any("mask took" in note for note in results[1].notes)
    assert not any("mask took" in note for note in results[0].notes)
    llm.close()
