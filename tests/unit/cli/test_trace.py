"""`outrider trace`: a file that viewers open, a page for people, and a record for programs."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from checks.documents import check_trace, nanoseconds
from doubles.command_line import Command
from doubles.timelines import job, trace
from outrider.core.config import EngineConfig
from outrider.core.draft import JobTrace
from outrider.core.params import SamplingParams
from outrider_lab.cli.trace import Recording, record

pytestmark = pytest.mark.wide

COUNTS = ("submitted", "rejected", "completed", "failed", "cancelled")
PROMPTS = ("def quicksort(items):", "Once upon a time")
SHORT = ("--max-tokens", "16")


def run_json(outrider: Command, *words: str) -> dict[str, Any]:
    shown = outrider("trace", "--json", *words)
    assert shown.code == 0, shown.err
    record: dict[str, Any] = json.loads(shown.out)
    return record


@dataclass
class ScriptedLLM:
    """Ends a request a call, the one number `failing` with an error; what it does not run waits.
    Each leaves the record of a job and of a round."""

    jobs: list[JobTrace]
    failing: int = -1
    config: EngineConfig = field(default_factory=lambda: EngineConfig(batch_size=2))
    counts: SimpleNamespace = field(
        default_factory=lambda: SimpleNamespace(**dict.fromkeys(COUNTS, 0))
    )
    waiting: list[SimpleNamespace] = field(default_factory=list[SimpleNamespace])
    free_tokens: int = 100

    @property
    def requests(self) -> Any:
        """What was planned is what the configuration says."""
        return SimpleNamespace(plan=SimpleNamespace(settings=self.config))

    def generate(self, prompts: list[str], params: SamplingParams) -> None:
        """The warm-up, whose job must not be told."""
        self.submit(prompts[0], params)
        self.advance()

    def submit(self, prompt: str, params: SamplingParams) -> SimpleNamespace:
        del prompt, params
        reader = SimpleNamespace(traces=[], seq=SimpleNamespace(error=None))
        self.waiting.append(SimpleNamespace(reader=reader, number=self.counts.submitted))
        self.counts.submitted += 1
        return self.waiting[-1]

    @property
    def has_work(self) -> bool:
        return bool(self.waiting)

    def advance(self) -> None:
        ticket = self.waiting.pop(0)
        began = float(ticket.number)
        made = job("main", "verify", began, began + 1, ticket.number)
        self.jobs.append(replace(made, num_waiting=len(self.waiting), num_free_tokens=90))
        if ticket.number == self.failing:
            ticket.reader.seq.error = ValueError("broken")
            self.counts.failed += 1
        else:
            ticket.reader.traces.append(trace(ticket.number, ticket.number))
            self.counts.completed += 1


def recorded(**changed: Any) -> Recording:
    jobs: list[JobTrace] = []
    llm: Any = ScriptedLLM(jobs, **changed)
    return record(llm, ["a", "b", "c"], SamplingParams(), jobs)


def test_a_recording_leaves_the_warm_up_out() -> None:
    found = recorded()
    assert [made.seq_ids for made in found.jobs] == [(1,), (2,), (3,)]
    assert [one.seq_id for one in found.rounds] == [1, 2, 3]
    assert found.counters is not None
    assert (found.counters.num_submitted, found.counters.num_completed) == (3, 3)
    assert (found.counters.num_waiting, found.counters.num_live) == (0, 0)
    assert (found.counters.max_waiting, found.counters.max_live) == (1000, 2)
    assert (found.num_slots, found.errors, found.interrupted) == (100, [], False)
    assert found.usage is not None
    assert found.usage.series("free_tokens") == [100.0, 100.0]


def test_a_request_that_fails_is_told_and_the_others_are_recorded() -> None:
    found = recorded(failing=2)
    assert found.errors == ["ValueError: broken"]
    assert [one.seq_id for one in found.rounds] == [1, 3]
    assert len(found.jobs) == 3


def test_an_interrupted_recording_knows_who_still_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    advance = ScriptedLLM.advance

    def interrupted(llm: ScriptedLLM) -> None:
        advance(llm)
        if llm.counts.completed == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(ScriptedLLM, "advance", interrupted)
    found = recorded()
    assert found.interrupted
    assert found.counters is not None
    assert (found.counters.num_completed, found.counters.num_waiting) == (1, 2)
    assert len(found.jobs) == 1


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--figure", "lanes.pdf"], "a figure is an SVG file"),
        (["--figure", "nowhere/lanes.svg"], "cannot be written"),
        (["--output", "nowhere/trace.json"], "cannot be written"),
        (["--figure-seconds", "-1"], "--figure-seconds"),
        (["--profile"], "--profile"),
    ],
)
def test_what_cannot_work_is_said_before_anything_runs(
    outrider: Command, words: list[str], problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider_lab.cli.trace.open_llm", None)
    shown = outrider("trace", *words)
    assert shown.code in (2, 3)
    assert problem in shown.err
    assert shown.out == ""


def test_a_figure_needs_altair(outrider: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider_lab.cli.trace.open_llm", None)
    monkeypatch.setattr("outrider_lab.cli.trace.why_not", lambda: "no figures: altair is missing")
    shown = outrider("trace", "--figure", "lanes.svg")
    assert shown.code == 3
    assert "altair is missing" in shown.err


@pytest.mark.sample(2)
@pytest.mark.weights
@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "lanes"),
    [("single", {"main"}), ("pd", {"prefill", "decode"}), ("pdv", {"prefill", "decode", "verify"})],
)
def test_a_run_leaves_a_valid_file_and_its_summary(
    outrider: Command, tmp_path: Path, schedule: str, lanes: set[str]
) -> None:
    words = (*PROMPTS * 2, *SHORT, "--schedule", schedule, "--output", "t.json")
    record = run_json(outrider, *words)
    assert record["num_emitted"] == 4 * 16
    assert record["errors"] == []
    assert (record["scheduler"]["submitted"], record["scheduler"]["completed"]) == (4, 4)
    assert (record["scheduler"]["pending"], record["scheduler"]["active"]) == (0, 0)
    assert set(record["timeline"]["lanes"]) == lanes
    assert 0 < record["timeline"]["busy_fraction"] <= 1
    assert record["usage"]["summary"]["peak_rss_bytes"] > 10_000_000
    # Logits of a batch, and of its drafts, are among them.
    assert record["memory"]["scratch_bytes"] > 8 * 5 * 8192 * 4
    events = check_trace((tmp_path / "t.json").read_text())
    whole = [event for event in events if event["ph"] == "X" and event["cat"] == "job"]
    assert len(whole) == record["num_jobs"]
    rounds = [one for event in whole for one in event["args"].get("rounds", ())]
    assert sum(one["emitted"] for one in rounds) == record["num_emitted"]
    # Times of rounds were measured apart from those of jobs, yet they lie inside.
    passes = sum(nanoseconds(e)[1] - nanoseconds(e)[0] for e in whole if "rounds" in e["args"])
    parts = [event for event in events if event["ph"] == "X" and event["cat"] == "stage"]
    inside = sum(nanoseconds(event)[1] - nanoseconds(event)[0] for event in parts)
    assert 0 < inside <= passes


@pytest.mark.weights
@pytest.mark.slow
def test_prompts_of_ours_run_when_none_is_given(outrider: Command, tmp_path: Path) -> None:
    shown = outrider("trace", "--max-tokens", "4", "--figure", "lanes.svg")
    assert shown.code == 0, shown.err
    assert shown.out.startswith("8 of 8 requests, 32 tokens in ")
    assert "schedule single · drafter model, K=4" in shown.out
    assert "open it at https://ui.perfetto.dev" in shown.out
    check_trace((tmp_path / "trace.json").read_text())
    figures = {path.name for path in tmp_path.glob("lanes*")}
    assert figures == {f"lanes{theme}.{kind}" for theme in ("", "-dark") for kind in ("svg", "png")}


@pytest.mark.weights
@pytest.mark.slow
def test_an_interrupt_keeps_what_was_recorded(
    outrider: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from outrider.api.llm import LLM

    advance, steps = LLM.advance, iter(range(3))

    def interrupted(llm: LLM) -> None:
        if next(steps, None) is None:
            raise KeyboardInterrupt
        advance(llm)

    monkeypatch.setattr(LLM, "advance", interrupted)
    monkeypatch.setattr("outrider.api.output.CONTROL_SECONDS", 0.0)
    shown = outrider("trace", *PROMPTS, "--max-tokens", "64")
    assert shown.code == 130
    assert shown.out.startswith("0 of 2 requests, ")
    events = check_trace((tmp_path / "trace.json").read_text())
    assert len([event for event in events if event.get("cat") == "job"]) == 3
