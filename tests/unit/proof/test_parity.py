"""Parity on the embedded pair: equal as shipped, and each way of being unequal is reported."""

from __future__ import annotations

from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest

from outrider.core.config import EngineConfig
from outrider.core.draft import common_prefix
from outrider.core.errors import ConfigError
from outrider.core.params import SamplingParams
from outrider.models.loading import resolve
from outrider.plugins.proof.check import Check, Effort
from outrider_lab.models.gguf_export import GgufOptions, export
from outrider_lab.proof.mutants import ROUNDS, planted
from outrider_lab.proof.parity import (
    BATCH,
    PROMPTS,
    CellTexts,
    ParityCell,
    ParitySubject,
    ParityTask,
    differences,
    fingerprint,
    subject_of,
    task,
)
from outrider_lab.proof.parity_part import NearTie, parity

EMBEDDED = "outrider/embedded"
SMALL = Effort(greedy_tokens=10)
CELL = ParityCell(
    drafter="ngram", k=2, chunk=64, together=1, params=SamplingParams(), sampler="block"
)


def embedded(config: EngineConfig | None = None, **params: object) -> ParitySubject:
    config = config or EngineConfig(threads=1)
    return subject_of(EMBEDDED, "auto", config, SamplingParams(**({"seed": 0} | params)))  # pyright: ignore[reportArgumentType]


def checks_of(subject: ParitySubject) -> tuple[Check, ...]:
    part = parity(task(subject, max_tokens=SMALL.greedy_tokens))
    while True:
        try:
            next(part)
        except StopIteration as end:
            return end.value


@pytest.fixture
def half_the_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider_lab.proof.parity.PROMPTS", PROMPTS[::2])


@pytest.mark.wide
@pytest.mark.weights
@pytest.mark.slow
@pytest.mark.usefixtures("half_the_prompts")
def test_the_embedded_pair_writes_the_same_text() -> None:
    texts, acceptance = checks_of(embedded())
    assert texts.holds is True
    assert acceptance.holds is True
    assert texts.facts["num_equal"] == texts.facts["num_tokens"] > 500
    assert len(texts.facts["runs"]) == 16
    assert texts.facts["num_known_tokens"] > 100
    assert acceptance.facts["num_settings"] == 8
    assert texts.problems == texts.warnings == ()


@pytest.fixture
def few_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider_lab.proof.parity.PROMPTS", PROMPTS[::4])


@pytest.mark.wide
@pytest.mark.weights
@pytest.mark.slow
@pytest.mark.usefixtures("few_prompts")
def test_users_settings_are_what_is_compared() -> None:
    config = EngineConfig(threads=1, drafter="ngram", sampler="match", k=3, prefill_chunk=32)
    texts, _ = checks_of(embedded(config, temperature=0.5, repetition_penalty=1.3))
    assert texts.holds is True
    runs = " | ".join(texts.facts["runs"])
    assert "ngram K=3, batch 1, chunks of 32" in runs
    assert "match at 0.5" in runs
    assert "model" not in runs


@pytest.mark.wide
@pytest.mark.weights
@pytest.mark.slow
@pytest.mark.usefixtures("half_the_prompts")
def test_a_bug_of_the_engine_fails_with_every_difference_called_a_bug() -> None:
    subject = embedded(EngineConfig(threads=1, drafter="ngram", k=1))
    with planted(ROUNDS[1]):
        texts, _ = checks_of(subject)
    assert texts.holds is False
    assert texts.facts["num_differences"] > 0
    assert texts.facts["num_equal"] < texts.facts["num_tokens"]
    assert texts.facts["num_near_ties"] == 0
    assert "BUG: margin" in texts.problems[0]


@pytest.mark.wide
@pytest.mark.weights
@pytest.mark.slow
@pytest.mark.usefixtures("few_prompts")
def test_all_that_drafter_auto_takes_is_compared_and_so_are_known_prompts() -> None:
    params = SamplingParams(seed=0)
    hybrid = subject_of("outrider/embedded-hybrid", "auto", EngineConfig(threads=1), params)
    assert hybrid.drafters == ("suffix", "ngram", "mtp")
    texts, acceptance = checks_of(hybrid)
    assert texts.holds is True
    assert texts.warnings == ()
    runs = texts.facts["runs"]
    assert {
        f"greedy, mtp K={k}, batch {size}, chunks of 512" for k in (1, 4) for size in (1, 4)
    } < {*runs}
    assert sum("auto" in run for run in runs) == 6
    assert [run for run in runs if "known" in run] == [
        "greedy, auto auto to 4, batch 4, chunks of 512, prompts known",
        "greedy, auto auto to 4, batch 4, chunks of 512, prompts known after a restart",
    ]
    num_ids = sum(map(len, task(hybrid, max_tokens=4).prompts))
    assert num_ids // 2 < texts.facts["num_known_tokens"] < 2 * num_ids
    assert acceptance.holds is True


def test_runs_that_time_does_not_allow_are_named() -> None:
    """Each run takes a second of a clock."""

    def write(job: ParityTask, group: list[ParityCell]) -> list[CellTexts]:
        texts = tuple(tuple(range(job.greedy.max_tokens)) for _ in job.prompts)
        return [CellTexts(cell, texts, ((8, 3),) * len(texts), True, 5) for cell in group]

    two = SamplingParams(max_tokens=4), SamplingParams(max_tokens=2, temperature=0.8)

    def checked(limit: float) -> Check:
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(ParityTask, "write", write)
            patched.setattr("outrider_lab.proof.parity_part.perf_counter", count().__next__)
            job = ParityTask(embedded(), ((1, 2), (3,)), *two)
            part = parity(job, limit)
            while True:
                try:
                    next(part)
                except StopIteration as end:
                    return end.value[0]

    few, most, none = checked(4), checked(24), checked(0)
    assert (few.holds, most.holds, none.holds) == (True, True, None)
    assert len(few.facts["runs"]) == 5
    assert (
        few.facts["runs_left_out"][0]
        == "greedy, model K=4, batch 4, chunks of 512, prompts known after a restart"
    )
    assert few.warnings == (f"time was up before 11 runs, from {few.facts['runs_left_out'][0]} on",)
    assert none.facts["runs"] == []


@pytest.mark.weights
def test_prompts_are_read_anew_in_every_run() -> None:
    job = task(embedded(), max_tokens=6)
    with_profile = replace(job.subject, config=replace(job.subject.config, profile=True))
    job = replace(job, subject=with_profile)
    group = next(job.groups())
    llm = job.subject.open(job.config_of(group[0]))
    for _ in range(2):
        results = llm.generate(job.prompts, job.greedy)
        read = [sum(trace.num_prompt_tokens for trace in result.rounds) for result in results]
        assert read == [len(prompt) - 1 for prompt in job.prompts]


@pytest.mark.weights
def test_prompts_that_do_not_fit_are_left_out() -> None:
    few = task(embedded(EngineConfig(context=64)), max_tokens=64)
    assert 0 < len(few.prompts) < len(PROMPTS)
    assert 16 <= few.greedy.max_tokens < 64
    with pytest.raises(ConfigError, match="no prompt"):
        task(embedded(EngineConfig(context=20)), max_tokens=64)


def written(*texts: tuple[int, ...]) -> CellTexts:
    return CellTexts(CELL, texts, ((0, 0),) * len(texts), exact_kernels=True)


def test_the_first_difference_of_each_text_is_found() -> None:
    plain = written((1, 2, 3), (4, 5), (6,), (7, 8))
    found = differences(written((1, 9, 3), (4, 5), (6, 6), (7,)), plain)
    places = [(d.prompt, d.position, d.plain, d.speculative) for d in found]
    assert places == [(0, 1, 2, 9), (2, 1, None, 6), (3, 1, 8, None)]
    assert common_prefix((), (1,)) == 0


@pytest.mark.weights
@pytest.mark.parametrize(("exact_kernels", "holds"), [(True, False), (False, True)])
def test_near_ties_are_excused_only_where_kernels_are_not_row_invariant(
    monkeypatch: pytest.MonkeyPatch, exact_kernels: bool, holds: bool
) -> None:
    """Every second text differs in its last token, and every look finds a near-tie."""

    def write(job: ParityTask, group: list[ParityCell]) -> list[CellTexts]:
        texts = [tuple(range(job.greedy.max_tokens)) for _ in job.prompts]
        if group[0].drafter == "ngram":
            texts[::2] = [(*text[:-1], 99) for text in texts[::2]]
        drafted = ((8, 3 + group[0].chunk // 64),) * len(texts)
        return [CellTexts(cell, tuple(texts), drafted, exact_kernels) for cell in group]

    def look(*_: object) -> NearTie:
        return NearTie(True, 1e-4, 1e-3, "kernels are not row-invariant here")

    monkeypatch.setattr(ParityTask, "write", write)
    monkeypatch.setattr("outrider_lab.proof.parity_part.look_into", look)
    texts, acceptance = checks_of(embedded())
    assert texts.holds is holds
    assert acceptance.holds is holds
    num_differences = texts.facts["num_differences"]
    assert num_differences == 6 * (len(PROMPTS) // 2)
    assert texts.facts["num_tokens"] - texts.facts["num_equal"] == num_differences
    notes = texts.warnings if holds else texts.problems
    assert "near-tie: margin 1.00e-04, logit error 1.00e-03" in notes[0]


def test_there_must_be_speculation_to_certify() -> None:
    for config in (EngineConfig(drafter="none"), EngineConfig(k=0)):
        with pytest.raises(ConfigError, match="nothing to certify"):
            subject_of(EMBEDDED, "auto", config, SamplingParams())


def test_which_drafters_are_compared() -> None:
    assert embedded().drafters == ("model", "ngram")
    assert subject_of(EMBEDDED, "none", EngineConfig(), SamplingParams()).drafters == ("ngram",)
    assert embedded(EngineConfig(drafter="ngram")).drafters == ("ngram",)
    assert BATCH > 1


def test_fingerprints_tell_models_apart() -> None:
    target, draft = fingerprint(EMBEDDED), fingerprint("outrider/embedded-draft")
    assert target == fingerprint(EMBEDDED) != draft
    assert len(target) == len(draft) == 12


def test_fingerprints_tell_quantisations_of_a_gguf_model_apart(tmp_path: Path) -> None:
    forms = ("bf16", "q8_0", "q4_0")
    prints = set[str]()
    for form in forms:
        path = tmp_path / "model.gguf"
        wish = GgufOptions(form=form, pre_tokenizer="gpt-2", force=True)
        for _ in export(resolve(EMBEDDED), path, wish):
            pass
        prints |= {fingerprint(str(path)), fingerprint(str(path))}
    assert len(prints) == len(forms)
