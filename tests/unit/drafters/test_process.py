"""A drafter's process without the process: what frames say, and what a server answers."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from checks.effort import examples
from doubles.drafters import RowDrafter
from doubles.rig import model_drafter
from doubles.toy_hybrid import ToyHybrid
from outrider.core.draft import Budget, Draft, Outcome, Verdict
from outrider.core.errors import CapacityError, DrafterError, SequenceError
from outrider.core.files import anonymous_file
from outrider.core.logits import LogitsProcessor
from outrider.core.params import SamplingParams
from outrider.core.protocols import DraftRow
from outrider.core.rng import KeyedRng, inverse_cdf
from outrider.plugins.lanes.ahead.choices import AheadChoices
from outrider.plugins.lanes.process.child import Inner, WorkerServer
from outrider.plugins.lanes.process.frames import (
    TICK_SECONDS,
    Frame,
    Kind,
    receive,
    send,
)
from outrider.plugins.lanes.process.messages import (
    Answer,
    Asked,
    AskedAhead,
    Hello,
    Proposal,
    SamplingTerms,
    about,
    asking,
    failure,
    key_of,
    read_about,
    read_asking,
    read_failure,
    read_terms,
)
from outrider.plugins.lanes.process.options import ChildOptions
from outrider.plugins.lanes.process.shared import SharedProbs, num_bytes
from outrider.testing import VOCAB, row

ids = st.integers(0, 2**31 - 1)
seq_ids = st.integers(0, 2**63 - 1)
depths = st.integers(0, 64)
budgets = st.builds(Budget, depths, st.floats(0.01, 100))
keys = st.builds(KeyedRng, st.integers(0, 2**63 - 1), st.integers(0, 255), st.integers(0, 2**31))


@st.composite
def drafts(draw: st.DrawFn) -> Draft:
    tokens = draw(st.lists(ids, max_size=6))
    parents = [draw(st.integers(-1, node - 1)) for node in range(len(tokens))]
    return Draft(tuple(tokens), tuple(parents), hit=draw(st.sampled_from([None, False, True])))


@st.composite
def asked(draw: st.DrawFn) -> Asked:
    seq_id, draft = draw(seq_ids), draw(drafts())
    draft = Draft(draft.tokens, draft.parents)
    path = draw(st.lists(st.integers(0, 5), max_size=3))
    last = Outcome(seq_id, draft, Verdict(tuple(path), draw(ids)))
    new = draw(st.lists(ids, max_size=5))
    told = draw(st.sampled_from([None, last]))
    return Asked(seq_id, draw(st.integers(0, 2**31)), new, draw(budgets), draw(keys), told)


proposals = st.builds(Proposal, drafts(), st.one_of(st.none(), st.integers(0, 2**31 - 1)))
answers = st.builds(Answer, st.lists(proposals, max_size=4), st.floats(0, 9), st.floats(0, 9))


@examples(40)
@given(rows=st.lists(asked(), max_size=3))
def test_questions_arrive_as_they_were_sent(rows: list[Asked]) -> None:
    frame = asking(Kind.PROPOSE, rows)
    assert frame.kind is Kind.PROPOSE
    assert read_asking(frame.body, Asked.take) == rows


@given(
    draft=drafts(), seq_id=seq_ids, start=st.integers(1, 99), pending=ids, budget=budgets, key=keys
)
def test_questions_ahead_arrive_as_they_were_sent(
    draft: Draft, seq_id: int, start: int, pending: int, budget: Budget, key: KeyedRng
) -> None:
    draft = Draft(draft.tokens, draft.parents)
    sent = AskedAhead(seq_id, start, pending, draft, budget, key)
    assert read_asking(asking(Kind.AHEAD, [sent]).body, AskedAhead.take) == [sent]


@given(answer=answers)
def test_answers_arrive_as_they_were_sent(answer: Answer) -> None:
    assert Answer.read(answer.frame().body) == answer


@given(answer=answers, data=st.data())
def test_an_answer_that_is_cut_or_padded_is_refused(answer: Answer, data: st.DataObject) -> None:
    body = answer.frame().body
    with pytest.raises(DrafterError):
        Answer.read(body[: data.draw(st.integers(0, len(body) - 1))])
    with pytest.raises(DrafterError):
        Answer.read(body + b"\0")


@given(body=st.binary(max_size=200))
def test_no_bytes_do_worse_than_an_error_of_ours(body: bytes) -> None:
    for read in (Answer.read, Hello.read, read_about, read_failure, read_terms):
        try:
            read(body)
        except (DrafterError, ValueError):  # a ConfigError is a ValueError
            continue


def test_terms_carry_what_shapes_a_distribution() -> None:
    params = SamplingParams(
        temperature=0.8,
        top_k=7,
        top_p=0.9,
        min_p=0.05,
        min_tokens=3,
        repetition_penalty=1.25,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        logit_bias={3: -2.5, 1: 4.0},
    )
    shaper = LogitsProcessor(params, 4, stop_ids=frozenset({2}), bad_words=((0, 1), (4,)))
    seq_id, told = read_terms(SamplingTerms(params, shaper).frame(9).body)
    assert seq_id == 9
    assert (told.params.temperature, told.params.top_k) == (0.8, 7)
    assert (told.params.top_p, told.params.min_p) == (0.9, 0.05)
    assert told.shaper is not None
    logits_NV = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(1))
    for text in ([0, 1, 2, 3, 0], [0, 1, 2, 3, 0, 4, 4, 0]):
        ours = shaper.shape(logits_NV, text, [[], [0]])
        assert torch.equal(told.shaper.shape(logits_NV, text, [[], [0]]), ours)


def test_failures_keep_their_kind_and_hint() -> None:
    full = read_failure(failure(CapacityError("no page left", hint="wait")).body)
    assert isinstance(full, CapacityError)
    assert (str(full), full.hint) == ("no page left", "wait")
    blamed = SequenceError(3)
    blamed.__cause__ = DrafterError("a bad mask")
    told = read_failure(failure(blamed).body)
    assert isinstance(told, DrafterError)
    assert str(told) == "a bad mask"


def test_options_survive_their_json() -> None:
    options = ChildOptions(
        folder="a folder",
        vocab_size=5,
        num_distributions=2,
        num_slots=8,
        page_size=4,
        max_rows=3,
        max_logits=2,
        chunk=1,
        batch_size=4,
        cores=(0, 3),
        ahead=AheadChoices(k=4, saguaro=0.5),
    )
    assert ChildOptions.from_json(options.to_json()) == options


def test_numbers_without_a_key_are_refused() -> None:
    with pytest.raises(DrafterError, match="key"):
        key_of(object())  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("sent", "match"),
    [
        (b"GET / HTTP/1.1\r\n", "an invalid message"),
        (Frame(Kind.EXIT).packed()[:5], "middle"),
        (about(Kind.CLOSE, 1).packed()[:-1], "middle"),
        (b"\x4f\x72\x07\x00\xff\xff\xff\xff", "an invalid message"),
    ],
)
def test_what_is_no_frame_is_refused(sent: bytes, match: str) -> None:
    here, there = socket.socketpair()
    with here, there:
        there.sendall(sent)
        there.close()
        with pytest.raises(DrafterError, match=match):
            receive(here)


def test_a_line_knows_its_end_and_its_limits() -> None:
    here, there = socket.socketpair()
    with here, there:
        here.settimeout(TICK_SECONDS)
        with pytest.raises(TimeoutError):
            receive(here, 0.01)
        with pytest.raises(TimeoutError):
            send(here, Frame(Kind.OPEN, bytes(1 << 22)), 0.01)
        there.close()
        with pytest.raises(ConnectionError):
            send(here, Frame(Kind.EXIT), 1.0)
    here, there = socket.socketpair()
    with here, there:
        send(there, about(Kind.OPEN, 7, [1, 2]))
        there.close()
        assert receive(here) == about(Kind.OPEN, 7, [1, 2])
        assert receive(here) is None


def test_distributions_are_seen_on_both_sides_and_copied() -> None:
    file = anonymous_file("test", num_bytes(3, 4))
    ours, theirs = SharedProbs.over(file, 3, 4), SharedProbs.over(file, 3, 4)
    os.close(file)
    probs_NV = torch.rand(2, 4)
    theirs.write(1, probs_NV)
    read_NV = ours.read(1, 2, "cpu")
    theirs.write(0, torch.zeros(3, 4))
    assert torch.equal(read_NV, probs_NV)
    for first, count in ((-1, 1), (2, 2), (4, 0), (1 << 40, 1)):
        with pytest.raises(DrafterError, match="shared memory"):
            ours.read(first, count, "cpu")


def server(drafter: RowDrafter | None = None, *, num_distributions: int = 8) -> WorkerServer:
    inner = drafter or model_drafter(ToyHybrid(vocab_size=VOCAB, seed=5), chunk=3)
    file = anonymous_file("test", num_bytes(num_distributions, VOCAB))
    distributions = SharedProbs.over(file, num_distributions, VOCAB)
    os.close(file)
    return WorkerServer(Inner(inner, VOCAB, inverse_cdf), distributions)


def question(text: Sequence[int], *, num_known: int, depth: int = 3) -> Frame:
    key = KeyedRng(0, 0, len(text))
    return asking(Kind.PROPOSE, [Asked(0, num_known, text[num_known:], Budget(depth), key, None)])


def introduced(served: WorkerServer, text: Sequence[int], params: SamplingParams) -> None:
    assert served.answer(about(Kind.OPEN, 0, text)) is None
    assert served.answer(SamplingTerms(params, None).frame(0)) is None


def test_a_server_is_told_only_what_is_new() -> None:
    served = server()
    introduced(served, [1, 2], SamplingParams())
    text = [1, 2]
    for _ in range(3):
        known = len(text)
        text += [3, 0]
        frame = served.answer(question(text, num_known=known))
        assert frame is not None
        fresh = model_drafter(ToyHybrid(vocab_size=VOCAB, seed=5))
        fresh.open(0, text)
        wanted = fresh.propose([row(0, text, depth=3)])[0]
        assert Answer.read(frame.body).proposals[0].draft.tokens == wanted.tokens
    assert served.answer(about(Kind.CLOSE, 0)) is None
    with pytest.raises(DrafterError, match="does not know"):
        served.answer(question(text, num_known=0))


def test_a_server_answers_errors_of_ours_and_goes_on() -> None:
    def draft(row: DraftRow) -> Draft:
        if len(row.tokens) == 2:
            raise CapacityError("no page left")
        return Draft.chain([1], torch.ones(1, VOCAB) / VOCAB)

    served = server(RowDrafter(draft), num_distributions=1)
    introduced(served, [1, 2], SamplingParams(temperature=1.0))
    failed = served.answer(question([1, 2], num_known=2))
    assert failed is not None
    assert isinstance(read_failure(failed.body), CapacityError)
    done = served.answer(question([1, 2, 3], num_known=2))
    assert done is not None
    assert Answer.read(done.body).proposals[0].first_distribution == 0


def test_distributions_beyond_the_room_are_an_error_and_not_written() -> None:
    probs_NV = torch.ones(2, VOCAB) / VOCAB
    served = server(RowDrafter(lambda row: Draft.chain([1, 1], probs_NV)), num_distributions=1)
    introduced(served, [1], SamplingParams(temperature=1.0))
    failed = served.answer(question([1], num_known=1))
    assert failed is not None
    assert "shared memory" in str(read_failure(failed.body))


def test_a_server_refuses_questions_out_of_order() -> None:
    served = server()
    served.answer(about(Kind.OPEN, 0, [1, 2]))
    with pytest.raises(DrafterError, match="wrong order"):
        served.answer(question([1, 2], num_known=2))
    served.answer(SamplingTerms(SamplingParams(), None).frame(0))
    with pytest.raises(DrafterError, match="wrong order"):
        served.answer(question([1, 2, 3, 4], num_known=3))
    with pytest.raises(DrafterError, match="cannot answer"):
        served.answer(Frame(Kind.HELLO))
