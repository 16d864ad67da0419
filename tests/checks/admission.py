"""Memory of whole runs: whatever is let in fits, and whatever ends gives everything back."""

from __future__ import annotations

import random

from checks.engine import PROMPT, Kind, greedy, plain
from checks.state import VOCAB
from doubles.drafters import random_trees
from doubles.rig import Request, Rig, model_drafter
from doubles.tiny_attention import TinyAttentionLM
from outrider.engine.engine import Engine


def run_down(engine: Engine, *, limit: int = 500) -> None:
    for _ in range(limit):
        if not engine.has_work:
            return
        engine.step()
    raise AssertionError("the engine does not come to an end")


def check_tight_arena(sizes: list[tuple[int, int]], rig: Rig) -> None:
    """Requests of (prompt, budget) tokens all finish: no round ever meets a full arena."""
    prompts = [((1, 2, 0) * 4)[:length] for length, _ in sizes]
    outputs = rig.run(
        [
            Request(prompt, greedy(budget))
            for prompt, (_, budget) in zip(prompts, sizes, strict=True)
        ]
    )
    for prompt, (_, budget), output in zip(prompts, sizes, outputs, strict=True):
        assert output == list(plain(TinyAttentionLM, prompt, budget))
    assert max(trace.batch_size for trace in rig.traces) <= rig.batch_size
    assert not any(seq.num_preempted for seq in rig.sequences)


def check_admission() -> None:
    rng = random.Random(1)
    for num_slots in range(28, 60, 4):
        target = TinyAttentionLM(vocab_size=VOCAB, page_size=4, num_slots=num_slots)
        rig = Rig(target, random_trees(VOCAB), k=3, batch_size=3, chunk=4, spare=4)
        check_tight_arena([(rng.randint(1, 12), rng.randint(1, 9)) for _ in range(8)], rig)
        target.state.check()
    # All reach their end together, where siblings stand past what the sequences finally keep.
    target = TinyAttentionLM(vocab_size=VOCAB, page_size=1, num_slots=42)
    rig = Rig(target, random_trees(VOCAB), k=3, batch_size=4, page_size=1, spare=4)
    check_tight_arena([(4, 6)] * 4, rig)


def check_cancelling(kind: Kind = TinyAttentionLM) -> None:
    """Cancelling waiting and running requests, at any moment, disturbs nobody."""
    for after in range(6):
        draft_model = kind(vocab_size=VOCAB, seed=5)
        rig = Rig(kind(vocab_size=VOCAB), model_drafter(draft_model), batch_size=2, chunk=3)
        engine = rig.engine()
        seqs = [rig.live(i, Request(PROMPT[i:] + PROMPT, greedy(12))) for i in range(3)]
        for seq in seqs:
            engine.submit(seq)
        for _ in range(after):
            engine.step()
        for seq_id in (0, 2, 77, 0):
            engine.cancel(seq_id)
        run_down(engine)
        prompt = PROMPT[1:] + PROMPT
        assert tuple(seqs[1].tokens) == prompt + plain(kind, prompt, 12)
        assert [seq.finish for seq in seqs] == [None, "length", None]
        assert rig.target.state.num_free_tokens == 256
        assert draft_model.state.num_free_tokens == 256
