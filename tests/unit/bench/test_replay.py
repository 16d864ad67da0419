"""Drafts counted by replay of a known text are those that an engine drafts while it writes it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from outrider.core.config import EngineConfig
from outrider.core.draft import Draft
from outrider.core.params import SamplingParams
from outrider.core.protocols import DraftNeeds, DraftRow
from outrider_lab.bench.calibrate.counting import Counting, Text, can_replay, replayed
from outrider_lab.bench.calibrate.engines import Dial, TimedEngine, TimedEngines, TimedLLM
from outrider_lab.bench.calibrate.extent import Bounds, Extent
from outrider_lab.bench.calibrate.probe import Probe, written_until
from outrider_lab.bench.studies.drafters_lineup import OFF, Contestant
from outrider_lab.bench.workload import builtin_texts

DEEPEST = 6
GREEDY = SamplingParams(max_tokens=48, ignore_eos=True)


def always(*_: object) -> bool:
    return True


def engine_of(drafter: str, draft: str | None = None) -> TimedEngine:
    dial = Dial()
    config = EngineConfig(drafter=drafter, k=DEEPEST, controller="fixed", profile=True)
    llm = TimedLLM("outrider/embedded", draft=draft, config=config, controller=dial)
    name = OFF if drafter == "none" else drafter
    return TimedEngine(Contestant(name=name, drafter=drafter, draft=draft), llm, dial, {})


@pytest.mark.parametrize(
    ("drafter", "draft"),
    [("ngram", None), ("suffix", None), ("model", "outrider/embedded-draft")],
)
def test_a_replay_counts_what_the_engine_counts(drafter: str, draft: str | None) -> None:
    engine = engine_of(drafter, draft)
    with closing(engine.llm):
        prompt = engine.llm.encode(builtin_texts("code")[0])
        (result,) = written_until(engine, [prompt], GREEDY, (DEEPEST,), at_once=1, go_on=always)
        first, *written = result.token_ids
        found = replayed(
            engine,
            [Text((*prompt, first), written)],
            GREEDY,
            deepest=DEEPEST,
            at_once=1,
            go_on=always,
        )
    (text,) = found.texts
    assert len(text) == len(written)
    # What reads the prompt may draft as well: a replay begins after the first token.
    start = -1
    traces = [trace for trace in result.rounds if trace.num_emitted]
    for trace in traces:
        if start >= 0:
            assert min(text[start].kept, trace.num_drafted) == trace.num_accepted
        start += trace.num_emitted
    assert start == len(written)
    assert sum(trace.num_accepted for trace in traces) > 0
    assert (found.miss_seconds > 0) == any(not trace.num_drafted for trace in traces[1:-1])


@dataclass
class Scripted:
    """Drafts `DEEPEST` tokens that are wrong at multiples of `wrong_at`, counted over the text."""

    wrong_at: int
    name: str = "scripted"
    needs: DraftNeeds = field(default_factory=DraftNeeds)
    opened: list[int] = field(default_factory=list[int])
    closed: list[int] = field(default_factory=list[int])
    num_rows: list[int] = field(default_factory=list[int])

    def open(self, seq_id: int, prompt: Sequence[int]) -> None:
        del prompt
        self.opened.append(seq_id)

    def close(self, seq_id: int) -> None:
        self.closed.append(seq_id)

    def propose(self, rows: Sequence[DraftRow]) -> list[Draft]:
        self.num_rows.append(len(rows))
        return [Draft.chain(self._tokens(row)) for row in rows]

    def _tokens(self, row: DraftRow) -> list[int]:
        places = range(len(row.tokens), len(row.tokens) + row.budget.depth)
        return [-1 if place % self.wrong_at == 0 else place for place in places]


def scripted_engine(drafter: Scripted, kind: str) -> TimedEngine:
    llm = SimpleNamespace(
        proposer=drafter, config=EngineConfig(), kernels=SimpleNamespace(exact=True)
    )
    contestant = Contestant(name=kind, drafter=kind)
    return TimedEngine(contestant, cast("Any", llm), Dial(), {})


def texts(num: int) -> list[Text]:
    """Each token is its own place."""
    return [Text((0,), range(1, 10 * number)) for number in range(1, num + 1)]


def test_texts_of_a_model_go_on_together_and_those_of_lookups_one_by_one() -> None:
    model = Scripted(wrong_at=3)
    every = replayed(
        scripted_engine(model, "model"), texts(3), GREEDY, deepest=4, at_once=2, go_on=always
    )
    lookup = Scripted(wrong_at=3)
    others = replayed(
        scripted_engine(lookup, "ngram"), texts(3), GREEDY, deepest=4, at_once=2, go_on=always
    )
    assert [len(text) for text in every.texts] == [9, 19, 29]
    assert max(model.num_rows) == 2
    assert set(lookup.num_rows) == {1}
    for drafter in (model, lookup):
        assert sorted(drafter.opened) == sorted(drafter.closed)
    for one, other in zip(every.texts, others.texts, strict=True):
        assert [ahead.kept for ahead in one[:6]] == [2, 1, 0, 2, 1, 0]
        assert [ahead.kept for ahead in other[:6]] == [2, 1, 0, 2, 1, 0]
    assert every.miss_seconds == 0
    # What a lookup takes is known by then; a model's draft takes what its depth is.
    assert every.hit_seconds == 0 < others.hit_seconds


def test_a_replay_that_has_no_time_counts_nothing() -> None:
    for kind in ("model", "ngram"):
        engine = scripted_engine(Scripted(wrong_at=3), kind)
        found = replayed(engine, texts(2), GREEDY, deepest=4, at_once=1, go_on=lambda: False)
        assert not any(found.texts)


@pytest.mark.parametrize(
    ("kind", "temperature", "replays"),
    [
        ("ngram", 0.0, True),
        ("ngram", 1.0, True),
        ("model", 0.0, True),
        # What it draws depends on numbers that the text does not tell.
        ("model", 1.0, False),
        ("eagle", 0.0, False),
        ("quantised-self", 0.0, False),
    ],
)
def test_only_who_chooses_by_the_text_is_replayed(
    kind: str, temperature: float, replays: bool
) -> None:
    engine = scripted_engine(Scripted(wrong_at=3), kind)
    assert can_replay(engine, replace(GREEDY, temperature=temperature)) == replays


def test_who_reads_more_than_the_text_is_not_replayed() -> None:
    reads = Scripted(wrong_at=3, needs=DraftNeeds(num_likely=4))
    assert not can_replay(scripted_engine(reads, "recycling"), GREEDY)


@pytest.fixture(scope="module")
def engines() -> Iterator[list[TimedEngine]]:
    found = [engine_of("none"), engine_of("recycling"), engine_of("ngram")]
    yield found
    for engine in found:
        engine.llm.close()


def extent(*, is_large: bool) -> Extent:
    return Extent(
        batches=(1,),
        ks=(1, 3),
        deepest=DEEPEST,
        least_ks=(3,),
        room=2048,
        chunk=256,
        batch_size=2,
        is_large=is_large,
    )


@pytest.mark.covering(1)
@pytest.mark.parametrize("compares", [False, True])
@pytest.mark.parametrize("is_large", [False, True])
def test_every_drafter_is_counted_by_writing_or_by_replay(
    engines: list[TimedEngine], *, compares: bool, is_large: bool
) -> None:
    plain = engines[0]
    counting = Counting(
        engines=TimedEngines(engines, cast("Any", None)),
        prompts=[plain.llm.encode(text) for text in builtin_texts("code")[:2]],
        params=replace(GREEDY, max_tokens=24),
        extent=extent(is_large=is_large),
        bounds=Bounds(),
        compares=compares,
        goes_on=lambda until: True,
    )
    heard: list[str] = []

    def hear(what: str, share: float) -> None:
        assert 0 <= share <= 1
        heard.append(what)

    counted = list(counting.run(hear))
    found = {one.name: one for one in counted}
    assert heard == ["counting"] * len(found)
    # Replays come first.
    assert list(found) == [OFF, "ngram", "recycling"]
    probes = {name: one.probe for name, one in found.items() if one.probe is not None}
    assert set(probes) == {"ngram", "recycling"}
    for probe in probes.values():
        assert isinstance(probe, Probe)
        assert [len(text) for text in probe.texts] == [23, 23]
    # A drafter that wrote something is compared; one that was only replayed wrote nothing.
    assert probes["recycling"].same is True
    assert probes["ngram"].same is (True if is_large else None)
    assert bool(found["recycling"].timed) == is_large
    # It writes when all else is done, if texts are to be compared.
    later = list(counting.compared(counted, hear))
    assert [(one.name, one.same) for one in later] == [("ngram", True)] * (
        compares and not is_large
    )


@dataclass
class Ticking:
    """A clock that goes on a second whenever somebody looks whether to go on."""

    now: float = 0.0
    untils: list[float] = field(default_factory=list[float])

    def __call__(self) -> float:
        return self.now

    def goes_on(self, until: float) -> bool:
        self.now += 1
        self.untils.append(until)
        return self.now < until


def endless_engine() -> TimedEngine:
    """Plain decoding that never ends a text."""
    reader = SimpleNamespace(traces=[])
    result = SimpleNamespace(token_ids=(1, 2, 3), rounds=())
    handle = SimpleNamespace(done=False, reader=reader, result=lambda: result)

    def submitted(prompt: object, params: object) -> object:
        del prompt, params
        return handle

    def cancelled(_handle: object) -> None: ...

    llm = SimpleNamespace(
        config=EngineConfig(),
        delay=1.0,
        forget=lambda: None,
        submit=submitted,
        advance=lambda: None,
        cancel=cancelled,
    )
    return TimedEngine(Contestant(name=OFF, drafter="none"), cast("Any", llm), Dial(), {})


def test_counting_keeps_to_its_share_of_the_time() -> None:
    """Half of 100 seconds, whatever plain decoding would take."""
    clock = Ticking()
    lookups = [scripted_engine(Scripted(wrong_at=3), name) for name in ("ngram", "suffix")]
    counting = Counting(
        engines=TimedEngines([endless_engine(), *lookups], cast("Any", None)),
        prompts=[[0]],
        params=GREEDY,
        extent=extent(is_large=False),
        bounds=Bounds(seconds=100, clock=clock),
        compares=False,
        goes_on=clock.goes_on,
        share=0.5,
    )
    found = list(counting.run(lambda _what, _share: None))
    assert [one.name for one in found] == [OFF, "ngram", "suffix"]
    assert [one.probe is None for one in found] == [True, False, False]
    assert 20 < clock.untils[0] < 40
    assert clock.now < 0.5 * 98
    assert max(clock.untils) <= 0.5 * 98
