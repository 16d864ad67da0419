"""A result: its figures by their definitions, its record there and back. No model is needed."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import accumulate
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.api.result import GenerationResult
from outrider.core.draft import RoundTrace, TokenLogprobs
from outrider.core.errors import ConfigError
from outrider.metrics import MemoryTrace, Stats

SECONDS = {"prefill": 0.05, "draft": 0.0, "verify": 0.3, "accept": 0.02, "total": 0.44}
PLAIN_STATS = Stats(
    drafter="none",
    k=0,
    num_rounds=5,
    num_target_passes=5,
    num_drafted=0,
    num_accepted=0,
    num_emitted=5,
    seconds=SECONDS,
)
# The worked example: five tokens after 80, 90, 80, 100 and 90 ms.
PLAIN = GenerationResult(
    text="a b c d e",
    token_ids=(1, 2, 3, 4, 5),
    finish_reason="length",
    stats=PLAIN_STATS,
    token_seconds=(0.08, 0.17, 0.25, 0.35, 0.44),
    peak_memory_bytes=3_300_000_000,
)
# Twenty-five rounds of four drafts each, 78 of which were kept.
SPEC = replace(
    PLAIN,
    token_ids=tuple(range(103)),
    stats=Stats(
        drafter="model",
        k=4,
        num_rounds=25,
        num_target_passes=25,
        num_drafted=100,
        num_accepted=78,
        num_emitted=103,
        seconds=SECONDS | {"draft": 0.07},
        acceptance_histogram=(1, 2, 3, 6, 13),
        rounds_by={"model": 24, "none": 1},
    ),
    token_seconds=(),
)
TRACE = RoundTrace(
    seq_id=0,
    pass_index=7,
    drafter="model",
    batch_size=1,
    num_target_passes=1,
    num_prompt_tokens=3,
    num_drafted=4,
    num_accepted=2,
    num_emitted=3,
    num_rows_copied=0,
    draft_seconds=0.1,
    verify_seconds=1 / 3,
    accept_seconds=0.01,
)
PROFILED = replace(SPEC, rounds=(TRACE,), memory=MemoryTrace(900, (800,)))


def there_and_back(result: GenerationResult) -> GenerationResult:
    return GenerationResult.from_dict(json.loads(json.dumps(result.to_dict())))


# Fields.


# Computed from them.


def test_tokens_a_second_of_the_worked_example() -> None:
    assert PLAIN.num_tokens == 5
    assert PLAIN.total_seconds == 0.44
    assert PLAIN.tokens_per_second == pytest.approx(11.36, abs=0.005)


def test_latencies_of_the_worked_example() -> None:
    assert PLAIN.per_token_latencies == pytest.approx((0.08, 0.09, 0.08, 0.1, 0.09))
    assert sum(PLAIN.per_token_latencies) == pytest.approx(PLAIN.total_seconds)


@pytest.mark.parametrize(("percent", "expected"), [(50, 0.09), (95, 0.098), (99, 0.0996)])
def test_percentiles_of_the_worked_example(percent: int, expected: float) -> None:
    assert getattr(PLAIN, f"latency_p{percent}") == pytest.approx(expected)


def test_time_to_first_token() -> None:
    assert PLAIN.time_to_first_token == 0.08
    assert replace(PLAIN, token_seconds=()).time_to_first_token is None


def test_tokens_of_a_round_share_its_time() -> None:
    result = replace(PLAIN, token_seconds=(0.2, 0.2, 0.3, 0.3, 0.3))
    assert result.round_latencies == pytest.approx((0.2, 0.1))
    assert result.per_token_latencies == pytest.approx((0.1, 0.1, *[0.1 / 3] * 3))
    assert len(result.per_token_latencies) == result.num_tokens


def test_plain_decoding_has_no_figures_of_speculation() -> None:
    assert not PLAIN.is_speculative
    assert PLAIN.acceptance_rate is PLAIN.tokens_per_round is PLAIN.num_rounds is None
    assert PLAIN.draft_milliseconds is PLAIN.verify_milliseconds is None
    assert PLAIN.accept_milliseconds is PLAIN.spec_metrics() is None


def test_acceptance_of_the_worked_example() -> None:
    """Tokens a round count the target's own, the acceptance rate does not: .78 x 4 + 1."""
    assert SPEC.is_speculative
    assert SPEC.acceptance_rate == 0.78
    assert SPEC.tokens_per_round == pytest.approx(4.12)
    assert SPEC.tokens_per_round == pytest.approx(0.78 * 4 + 1)
    assert SPEC.num_rounds == 25


def test_acceptance_for_other_programs() -> None:
    found = SPEC.spec_metrics()
    assert found is not None
    assert found["acceptance_histogram"] == [1, 2, 3, 6, 13]
    assert (found["num_spec_steps"], found["num_accepted_draft_tokens"]) == (25, 78)
    assert found["mean_acceptance_length"] == SPEC.tokens_per_round
    assert found.get("num_spec_tokens") == 4
    assert "num_spec_tokens" not in (SPEC.spec_metrics(adaptive=True) or {})


# As a dictionary.


def test_the_keys_of_a_record() -> None:
    assert list(PLAIN.to_dict()) == [
        "text",
        "token_ids",
        "finish_reason",
        "exact",
        "stats",
        "token_seconds",
        "peak_memory_bytes",
        "metrics",
    ]


FULL = replace(PROFILED, notes=("n",), logprobs=(TokenLogprobs(1, -0.5),), seed=1, error="e")


def test_what_is_empty_is_left_out() -> None:
    added = list(FULL.to_dict())[len(PLAIN.to_dict()) :]
    assert added == ["notes", "rounds", "logprobs", "memory", "seed", "error"]


def test_computed_values_are_in_the_record() -> None:
    found: Any = PLAIN.to_dict()["metrics"]
    assert found["tokens_per_second"] == PLAIN.tokens_per_second
    assert (found["latency_p50"], found["latency_p95"]) == (PLAIN.latency_p50, PLAIN.latency_p95)
    assert found["inter_token_p95"] == pytest.approx(0.0985)
    assert found["acceptance_rate"] is None


# There and back.


FAILED = replace(SPEC, notes=("speculation was turned off: a reason",), drafter_failed=True)


@pytest.mark.parametrize(
    "result", [PLAIN, SPEC, PROFILED, FAILED], ids=["plain", "spec", "profiled", "failed"]
)
def test_a_record_reads_back_exactly(result: GenerationResult) -> None:
    assert there_and_back(result) == result


def test_log_probabilities_read_back() -> None:
    told = (TokenLogprobs(1, -0.1, ((1, -0.1), (9, -2.5))), TokenLogprobs(2, -1 / 3))
    assert there_and_back(replace(PLAIN, logprobs=told)).logprobs == told


@given(
    st.text(),
    st.lists(st.floats(1e-6, 1e3), max_size=8),
    st.dictionaries(st.sampled_from(list(SECONDS)), st.floats(0, 1e6)),
    st.none() | st.integers(0, 2**50),
)
def test_any_result_reads_back_exactly(
    text: str, gaps: list[float], seconds: dict[str, float], peak: int | None
) -> None:
    result = replace(
        PLAIN,
        text=text,
        token_ids=tuple(range(len(gaps))),
        token_seconds=tuple(accumulate(gaps)),
        stats=replace(PLAIN_STATS, seconds=SECONDS | seconds),
        peak_memory_bytes=peak,
    )
    assert there_and_back(result) == result


def test_computed_keys_are_ignored_on_the_way_back() -> None:
    record = PLAIN.to_dict() | {"metrics": {"tokens_per_second": 1e9}, "run": {"version": "9"}}
    assert GenerationResult.from_dict(record) == PLAIN
    assert GenerationResult.from_dict(record).tokens_per_second < 12


def test_a_record_without_the_newer_keys_is_read() -> None:
    record = PLAIN.to_dict()
    for name in ("exact", "token_seconds", "peak_memory_bytes", "metrics"):
        del record[name]
    expected = replace(PLAIN, token_seconds=(), peak_memory_bytes=None)
    assert GenerationResult.from_dict(record) == expected


@pytest.mark.parametrize("lacking", ["text", "token_ids", "finish_reason", "stats"])
def test_a_record_that_lacks_something_is_refused(lacking: str) -> None:
    record = PLAIN.to_dict()
    del record[lacking]
    with pytest.raises(ConfigError, match=f"not the record of a result.*{lacking}") as caught:
        GenerationResult.from_dict(record)
    assert "--json" in str(caught.value.hint)


def test_statistics_that_lack_something_are_refused() -> None:
    record = json.loads(SPEC.to_json_line())
    del record["stats"]["num_drafted"]
    with pytest.raises(ConfigError, match=r"not the record of a result.*num_drafted"):
        GenerationResult.from_dict(record)


@pytest.mark.parametrize(
    ("key", "value"),
    [("stats", [1]), ("token_ids", 3), ("rounds", ["x"]), ("logprobs", [7]), ("memory", 5)],
)
def test_a_record_of_another_shape_is_refused(key: str, value: object) -> None:
    with pytest.raises(ConfigError, match="not the record of a result"):
        GenerationResult.from_dict(PLAIN.to_dict() | {key: value})


# As lines.


def test_a_json_line_is_one_object_and_one_line() -> None:
    line = replace(PLAIN, text="a\nb\u2028é").to_json_line()
    assert line.endswith("}\n")
    assert len(line.splitlines()) == 1
    assert json.loads(line) == replace(PLAIN, text="a\nb\u2028é").to_dict()


def test_a_line_of_speculative_decoding() -> None:
    assert SPEC.one_line() == (
        "SD  | 103 tok | 234.09 tok/s | p50=0.0ms p95=0.0ms | mem=3300MB | accept=0.78 rounds=25"
    )


def test_the_verdict_keeps_its_form() -> None:
    assert PLAIN.summary() == "5 tokens · 11 tok/s"
    assert SPEC.summary() == (
        "103 tokens · 234 tok/s · 78 of 100 drafts accepted · 4.12 tokens a round · "
        "drafting 16 % of the time"
    )
    assert "LOSSY" in replace(SPEC, exact=False).summary()


# Its profile.


def test_a_result_with_rounds_has_a_profile() -> None:
    found = PROFILED.profile({"seed": 1})
    assert found["metadata"] == {"seed": 1}
    assert found["memory"] == {"load": 900, "prefill": 800, "decode": None}


def test_a_result_without_rounds_says_how_to_get_them() -> None:
    with pytest.raises(ConfigError, match="no rounds") as caught:
        PLAIN.profile()
    assert "--profile" in str(caught.value.hint)


def test_what_was_foreseen_is_told_where_drafts_are_made_ahead() -> None:
    ahead = replace(SPEC, stats=replace(SPEC.stats, num_hits=18, num_misses=6))
    assert "18 of 24 verdicts predicted (p_hit 0.75)" in ahead.summary()
    assert ahead.to_dict()["metrics"]["p_hit"] == 0.75  # pyright: ignore[reportIndexIssue,reportUnknownVariableType]
    assert GenerationResult.from_dict(ahead.to_dict()) == ahead
    assert SPEC.p_hit is None
    assert "p_hit" not in SPEC.summary()


def test_records_of_results_without_hits_can_be_read() -> None:
    record = json.loads(SPEC.to_json_line())
    del record["stats"]["num_hits"], record["stats"]["num_misses"]
    assert GenerationResult.from_dict(record) == SPEC
