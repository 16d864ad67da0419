"""What an engine must do whatever it drafts with: the same text, one pass a round, exact counts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

from checks.state import VOCAB, fresh_logits
from doubles.counting import CountingLM
from doubles.drafters import oracle
from doubles.rig import Request, Rig
from doubles.toy_hybrid import ToyHybrid
from outrider.core.params import SamplingParams
from outrider.core.protocols import CausalLM
from outrider.metrics.summary import Stats, summarise

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
