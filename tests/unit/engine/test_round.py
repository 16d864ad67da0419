"""The reference round: what its trace says of prompts and of drafting."""

from __future__ import annotations

from checks.engine import greedy
from checks.state import VOCAB
from doubles.drafters import EMPTY
from doubles.rig import Request, Rig
from doubles.tiny_attention import TinyAttentionLM
from outrider.engine.drafting import DrafterHandle, Proposals
from outrider.engine.round import Chunk


def test_a_pass_may_read_prompts_only() -> None:
    rig = Rig(TinyAttentionLM(vocab_size=VOCAB), EMPTY)
    seq = rig.live(4, Request((1, 2, 3, 4), greedy(3)))
    rig.target.state.open(4, ())
    stages = rig.stages()
    assert stages.run([], [Chunk(seq, 2)]) == []
    assert rig.target.state.length(4) == 2
    assert seq.tokens == [1, 2, 3, 4]
    (trace,) = rig.traces
    assert (trace.num_prompt_tokens, trace.num_emitted, trace.batch_size) == (2, 0, 1)
    assert stages.run([seq], [])[0].seq_id == 4
    assert rig.traces[1].num_prompt_tokens == 1
    assert rig.traces[1].pass_index == 1
    assert rig.target.state.length(4) == 4
    assert seq.num_rounds == 1


def test_a_drafting_job_counts_once_in_each_verification() -> None:
    """Two jobs that took equally long are two."""
    rig = Rig(TinyAttentionLM(vocab_size=VOCAB), EMPTY)
    first, second, third = (rig.live(i, Request((1, 2), greedy(3))) for i in range(3))
    handle = DrafterHandle(rig.drafter)
    handle.drafted([first, second], Proposals({}, {}, 0.25))
    handle.drafted([third], Proposals({}, {}, 0.25))
    assert handle.take_seconds([first, second, third]) == 0.5
    assert handle.take_seconds([first, second, third]) == 0.0
