"""What an engine must do whatever it drafts with: the same text, one pass a round, exact counts.

Also memory of whole runs, and where outcomes end: stop tokens, stop strings and budgets.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import cache

from checks.state import VOCAB, fresh_logits
from doubles.counting import CountingLM
from doubles.drafters import oracle, random_trees
from doubles.rig import Request, Rig, model_drafter
from doubles.tiny_attention import TinyAttentionLM
from doubles.toy_hybrid import ToyHybrid
from outrider.core.draft import Draft, Outcome, Verdict
from outrider.core.params import FinishReason, SamplingParams
from outrider.core.protocols import CausalLM
from outrider.engine.engine import Engine
from outrider.engine.round import LiveSequence, StopMatch, clamp
from outrider.metrics import Stats, summarise

Kind = Callable[..., CausalLM]
PROMPT = (1, 2, 3, 1, 2)


@cache
def plain(kind: Kind, prompt: tuple[int, ...], num_tokens: int) -> tuple[int, ...]:
    """Greedy decoding, token by token, by a fresh model that reads the whole text each time."""
    if num_tokens == 0:
        return ()
    before = plain(kind, prompt, num_tokens - 1)
    return (*before, int(fresh_logits(kind, [*prompt, *before]).argmax()))


def greedy(num_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=num_tokens)


def check_greedy(rig: Rig, kind: Kind, prompts: Sequence[Sequence[int]], num_tokens: int) -> None:
    """Greedy output is that of plain decoding, and the traces add up."""
    outputs = rig.outputs(prompts, greedy(num_tokens))
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output == list(plain(kind, tuple(prompt), num_tokens))
    check_traces(rig)


def check_traces(rig: Rig) -> Stats:
    """The records of a run agree with each other and with what was emitted."""
    for trace in rig.traces:
        if trace.num_emitted == 0:
            assert trace.num_prompt_tokens > 0
            assert trace.num_drafted == trace.num_accepted == 0
        else:
            assert trace.num_emitted == trace.num_accepted + 1
        assert 0 <= trace.num_accepted <= trace.num_drafted
        assert min(trace.draft_seconds, trace.verify_seconds, trace.accept_seconds) >= 0
    for seq in rig.sequences:
        own = [trace for trace in rig.traces if trace.seq_id == seq.seq_id]
        assert sum(trace.num_emitted for trace in own) == seq.num_emitted
        assert sum(trace.num_emitted > 0 for trace in own) == seq.num_rounds
        # The prompt's last token is pending in the first round, not read.
        assert sum(trace.num_prompt_tokens for trace in own) <= seq.prompt_length - 1
    for index in {trace.pass_index for trace in rig.traces}:
        shared = [trace for trace in rig.traces if trace.pass_index == index]
        assert {trace.batch_size for trace in shared} == {len(shared)}
    stats = summarise(rig.traces, drafter=rig.drafter.name, k=rig.k, total_seconds=1.0)
    assert stats.num_emitted == stats.num_accepted + stats.num_rounds
    assert stats.num_accepted <= stats.num_drafted
    return stats


def check_one_pass_a_round() -> None:
    """However many sequences decode, draft and read prompts, a job is one target pass."""
    target = CountingLM(ToyHybrid(vocab_size=VOCAB))
    prompts = [[1], [1, 2, 3], [4] * 9, [2, 0] * 6]
    rig = Rig(target, oracle((), VOCAB), k=3, chunk=4)
    rig.outputs(prompts, greedy(9))
    assert len(target.steps) == len(rig.jobs)
    assert [t.pass_index for t in rig.traces] == sorted(t.pass_index for t in rig.traces)
    assert {t.pass_index for t in rig.traces} == set(range(len(target.steps)))
    assert summarise(rig.traces, drafter="", k=3, total_seconds=1.0).num_target_passes == len(
        target.steps
    )
    assert max(len(rows) for rows in target.steps) == len(prompts)


def check_stop_anywhere(kind: Kind = ToyHybrid) -> None:
    """A stop token ends text and memory at its place, wherever in the accepted path it stands."""
    text = plain(kind, PROMPT, 12)
    for stop in sorted(set(text)):
        place = text.index(stop)
        for k in (0, 1, 3, 5):
            rig = Rig(kind(vocab_size=VOCAB), oracle((*PROMPT, *text), VOCAB), k=k)
            seq = rig.alone(Request(PROMPT, greedy(12), stop_ids=frozenset({stop})))
            assert (tuple(seq.tokens[len(PROMPT) :]), seq.finish) == (text[: place + 1], "stop")
            assert rig.target.state.length(0) == len(PROMPT) + place
            rig.end()


def check_budget_anywhere(kind: Kind = ToyHybrid) -> None:
    """No round drafts past the budget, and the text ends exactly there."""
    text = plain(kind, PROMPT, 12)
    for num_tokens in range(1, 12):
        rig = Rig(kind(vocab_size=VOCAB), oracle((*PROMPT, *text), VOCAB), k=4)
        seq = rig.alone(Request(PROMPT, greedy(num_tokens)))
        assert (tuple(seq.tokens[len(PROMPT) :]), seq.finish) == (text[:num_tokens], "length")
        assert all(t.num_accepted == t.num_drafted for t in rig.traces)
        rig.end()


def check_all_accepted() -> None:
    """Twelve tokens by drafts of three: three passes of four rows, nothing else."""
    text = plain(ToyHybrid, PROMPT, 12)
    target = CountingLM(ToyHybrid(vocab_size=VOCAB))
    rig = Rig(target, oracle((*PROMPT, *text), VOCAB), k=3)
    rig.alone(Request(PROMPT, greedy(12)))
    assert [rows[0].num_logits for rows in target.steps] == [4, 4, 4]
    assert [t.num_rows_copied for t in rig.traces] == [0, 0, 0]


def check_all_rejected() -> None:
    """Eight tokens, every draft wrong: eight passes, and the last drafts no more than may be."""
    text = plain(ToyHybrid, PROMPT, 8)
    drafter = oracle((*PROMPT, *text), VOCAB, wrong_at=lambda place: True)
    rig = Rig(ToyHybrid(vocab_size=VOCAB), drafter, k=3)
    seq = rig.alone(Request(PROMPT, greedy(8)))
    assert tuple(seq.tokens[len(PROMPT) :]) == text
    assert [t.num_drafted for t in rig.traces] == [3, 3, 3, 3, 3, 2, 1, 0]
    assert [t.num_accepted for t in rig.traces] == [0] * 8


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


def check_pre_emption(rig: Rig, sizes: Sequence[tuple[int, int]]) -> None:
    """Every text is what it would be where memory ends early and the youngest wait again.

    Requests have (prompt, budget) tokens, and the target's memory is paged.
    """
    prompts = [((1, 2, 0) * 5)[start % 3 :][:length] for start, (length, _) in enumerate(sizes)]
    budgets = [budget for _, budget in sizes]
    asked = [Request(*one) for one in zip(prompts, map(greedy, budgets), strict=True)]
    for got, prompt, budget in zip(rig.run(asked), prompts, budgets, strict=True):
        assert tuple(got) == plain(TinyAttentionLM, prompt, budget)
    assert not any(seq.error for seq in rig.sequences)
    assert rig.counts.preempted == sum(seq.num_preempted for seq in rig.sequences)
    assert rig.reserve < 1 or rig.counts.preempted == 0


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


# A branch is accepted: nodes 1, 2 and 4 of a tree, then the target's own token 9.
DRAFT = Draft((7, 5, 6, 8, 4), (-1, -1, 1, 1, 2))
OUTCOME = Outcome(3, DRAFT, Verdict((1, 2, 4), 9))
TOKENS = (5, 6, 4, 9)


def ended(
    room: int, stop_ids: Sequence[int] = (), match: StopMatch | None = None
) -> tuple[Outcome, FinishReason | None]:
    seq = LiveSequence(
        seq_id=3,
        tokens=[1, 2, 0],
        prompt_length=2,
        params=SamplingParams(),
        limit=room + 1,
        stop_ids=frozenset(stop_ids),
        match=match,
    )
    return clamp(OUTCOME, seq)


def expect(found: tuple[Outcome, FinishReason | None], num: int, why: FinishReason | None) -> None:
    outcome, reason = found
    assert outcome.tokens == TOKENS[:num]
    assert outcome.verdict.path == (1, 2, 4)[: num - 1]
    assert outcome.num_accepted == num - 1
    assert (outcome.seq_id, outcome.draft) == (3, DRAFT)
    assert reason == why


def check_budget() -> None:
    for room in range(1, 4):
        expect(ended(room), room, "length")
    expect(ended(4), 4, "length")
    expect(ended(5), 4, None)


def check_stop_tokens() -> None:
    for place, token in enumerate(TOKENS):
        expect(ended(9, [token]), place + 1, "stop")
        expect(ended(9, [token, 9]), place + 1, "stop")
    expect(ended(9, [7, 8]), 4, None)


def check_stop_and_budget() -> None:
    """A stop token within the budget wins, its last place included; one beyond is not seen."""
    expect(ended(2, [6]), 2, "stop")
    expect(ended(2, [5]), 1, "stop")
    expect(ended(2, [4]), 2, "length")


def check_stop_strings() -> None:
    """The matcher is told only of what would be emitted, and its answer is where the text ends."""
    told: list[tuple[int, ...]] = []

    def ends_at(num: int | None) -> StopMatch:
        def match(tokens: Sequence[int]) -> int | None:
            told.append(tuple(tokens))
            return num

        return match

    expect(ended(9, match=ends_at(2)), 2, "stop")
    expect(ended(9, match=ends_at(None)), 4, None)
    expect(ended(3, match=ends_at(None)), 3, "length")
    expect(ended(3, match=ends_at(3)), 3, "stop")
    expect(ended(9, [6], match=ends_at(None)), 2, "stop")
    expect(ended(9, [6], match=ends_at(1)), 1, "stop")
    assert told == [TOKENS, TOKENS, TOKENS[:3], TOKENS[:3], TOKENS[:2], TOKENS[:2]]


def check_clamp() -> None:
    check_budget()
    check_stop_tokens()
    check_stop_and_budget()
    check_stop_strings()
