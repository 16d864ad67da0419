"""The reference round: what its trace says of prompts."""

from __future__ import annotations

from checks.engine import greedy
from checks.state import VOCAB
from doubles.drafters import EMPTY
from doubles.rig import Request, Rig
from doubles.tiny_attention import TinyAttentionLM
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
