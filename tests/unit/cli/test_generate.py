"""`outrider generate`: what is streamed, what tools read, and what a comparison may claim."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest

from doubles.command_line import Command
from outrider import LLM, SamplingParams
from outrider.api.result import GenerationResult
from outrider.models.loading import resolve
from outrider.plugins.measure.compare import Comparison, advice_for
from outrider.plugins.measure.turns import Score

pytestmark = [pytest.mark.wide, pytest.mark.weights]

PROMPT = "def quicksort(items):"
SHORT = ("--max-tokens", "16")


def run_json(outrider: Command, *words: str) -> dict[str, Any]:
    shown = outrider("generate", "--json", *words)
    assert shown.code == 0, shown.err
    record: dict[str, Any] = json.loads(shown.out.splitlines()[-1])
    return record


def test_the_text_is_followed_by_one_verdict_line(outrider: Command) -> None:
    shown = outrider("generate", PROMPT, *SHORT)
    record = run_json(outrider, PROMPT, *SHORT)
    assert shown.code == 0
    text, verdict = shown.out[:-1].rsplit("\n", 1)
    assert text == record["text"]
    assert verdict.startswith("16 tokens, ")
    assert "draft tokens accepted" in verdict
    assert verdict.endswith("; cut at 16 tokens; --max-tokens N for more")
    assert "faster" not in verdict


def test_json_has_the_promised_shape(outrider: Command) -> None:
    record = run_json(outrider, PROMPT, *SHORT, "--k", "3")
    assert list(record) == [
        "text",
        "token_ids",
        "finish_reason",
        "exact",
        "stats",
        "token_seconds",
        "peak_memory_bytes",
        "metrics",
        "run",
    ]
    assert record["finish_reason"] == "length"
    assert len(record["token_ids"]) == 16
    stats = record["stats"]
    assert list(stats) == [
        "drafter",
        "k",
        "num_rounds",
        "num_target_passes",
        "num_drafted",
        "num_accepted",
        "num_emitted",
        "seconds",
        "acceptance_histogram",
        "num_hits",
        "num_misses",
        "rounds_by",
        "members",
    ]
    assert list(stats["seconds"]) == ["prefill", "draft", "verify", "accept", "total"]
    assert (stats["drafter"], stats["k"]) == ("model", 3)
    assert stats["num_rounds"] + stats["num_accepted"] == 16


@pytest.mark.parametrize(
    ("words", "drafter"),
    [
        (("--drafter", "none"), "none"),
        (("--drafter", "ngram"), "ngram"),
        (("--drafter", "model"), "model"),
        (("--draft", "none"), "none"),
        (("--draft", "none", "--drafter", "ngram"), "ngram"),
        (("--draft", "outrider/embedded-draft"), "model"),
        (("--target", "outrider/embedded-draft", "--draft", "outrider/embedded"), "model"),
        (("--k", "0"), "none"),
    ],
)
def test_models_and_drafters_are_chosen_by_name(
    outrider: Command, words: tuple[str, ...], drafter: str
) -> None:
    assert run_json(outrider, PROMPT, *SHORT, *words)["stats"]["drafter"] == drafter


def test_the_prompt_may_come_from_stdin(outrider: Command) -> None:
    piped = outrider("generate", "-", "--quiet", *SHORT, stdin=PROMPT)
    assert piped.out == outrider("generate", PROMPT, "--quiet", *SHORT).out
    assert piped.code == 0


def test_a_prompt_may_begin_with_a_hyphen(outrider: Command) -> None:
    assert outrider("generate", "--quiet", *SHORT, "--", "- one").code == 0


def test_stop_strings_and_seeds_reach_the_engine(outrider: Command) -> None:
    whole = run_json(outrider, PROMPT, "--max-tokens", "40")["text"]
    cut = run_json(outrider, PROMPT, "--max-tokens", "40", "--stop", "@", "--stop", whole[10:14])
    assert cut["text"] == whole[: whole.index(whole[10:14])]
    assert cut["finish_reason"] == "stop"
    drawn = [
        run_json(outrider, PROMPT, *SHORT, "--temperature", "1.5", "--seed", seed)["token_ids"]
        for seed in ("1", "1", "2")
    ]
    assert drawn[0] == drawn[1] != drawn[2]


def test_settings_come_from_variables_and_files(
    outrider: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "outrider.toml").write_text("k = 2\nmax_tokens = 5\n")
    monkeypatch.setenv("OUTRIDER_MAX_TOKENS", "6")
    record = run_json(outrider, PROMPT)
    assert (record["stats"]["k"], len(record["token_ids"])) == (2, 6)
    (tmp_path / "run.yaml").write_text("k: 1\n")
    assert run_json(outrider, PROMPT, "--config", "run.yaml")["stats"]["k"] == 1


def test_output_writes_the_same_record(outrider: Command, tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    path.write_text("old")
    record = run_json(outrider, PROMPT, *SHORT, "--output", str(path))
    assert json.loads(path.read_text()) == record
    assert [entry.name for entry in tmp_path.iterdir()] == ["out.json"]


def test_a_comparison_tells_noise_from_a_gain() -> None:
    """A ratio of times that scatter, or were taken beside other programs, proves nothing."""

    def compared(on: list[float], off: list[float], share: float | None) -> Comparison:
        scores = [Score([60] * len(times), times) for times in (on, off)]
        return Comparison.of(*scores, identical=True, greedy=True, share=share)

    quiet = compared([0.1] * 5, [0.25] * 5, 0.01)
    assert (quiet.verdict, quiet.speedup) == ("gain", pytest.approx(2.5))
    assert quiet.summary().startswith("2.50× vs off (5 runs each, 95 % interval 2.50 to 2.50;")
    scattered = compared([0.1, 0.4, 0.1, 0.5, 0.3], [0.3, 0.1, 0.4, 0.1, 0.5], None)
    assert scattered.verdict == "no measurable difference"
    assert "× vs off, no measurable difference (" in scattered.summary()
    busy = compared([0.1] * 5, [0.296] * 5, 0.43)
    assert busy.to_dict()["verdict"] == "not judged"
    assert busy.summary().startswith("noise, not judged: 2.96× vs off (")
    assert "Other programs used 43.0 % of the CPUs meanwhile" in busy.summary()


def test_a_comparison_that_lost_says_what_to_try(outrider: Command) -> None:
    command = advice_for("outrider/embedded")

    def compared(on: float, off: float) -> Comparison:
        scores = [Score([60] * 5, [seconds] * 5) for seconds in (on, off)]
        return Comparison.of(*scores, identical=True, greedy=True, share=None, advice=command)

    assert "draft suggest" not in compared(0.1, 0.2).summary()
    assert compared(0.1, 0.2).to_dict()["advice"] is None
    lost = compared(0.2, 0.1)
    assert lost.to_dict()["advice"] == command
    (told,) = re.findall("`outrider (.*)`", lost.summary())
    # A path with a space is one word.
    assert shlex.split(advice_for("a model"))[-1] == "a model"
    assert outrider(*shlex.split(told), "--seconds", "0.2", "--json").code == 0


def test_a_comparison_in_a_small_window_asks_for_no_more_than_fits(outrider: Command) -> None:
    words = ("x", "--context", "20", "--max-tokens", "30", "--min-tokens", "30")
    record = run_json(outrider, *words, "--compare")
    assert record["compare"]["identical"] is True
    assert record["token_ids"] == run_json(outrider, *words)["token_ids"]


def test_each_prompt_of_a_file_is_compared_on_its_own(outrider: Command) -> None:
    Path("own.txt").write_text(f"{PROMPT}\n\nclass Stack:\n")
    shown = outrider("generate", "--compare", "--prompts", "own.txt", *SHORT)
    assert shown.code == 0, shown.err
    head, first, second, total, *_ = shown.out.splitlines()
    assert head.split() == ["plain", "s", "with", "s", "ratio", "text", "prompt"]
    for number, (line, prompt) in enumerate(((first, PROMPT), (second, "class Stack:")), start=1):
        cells = line.split(maxsplit=5)
        assert (cells[0], cells[4], cells[5]) == (str(number), "identical", prompt)
        assert float(cells[1]) > 0 < float(cells[2])
        # Times are shown with three decimals.
        assert float(cells[3]) == pytest.approx(float(cells[1]) / float(cells[2]), rel=0.3)
    assert total.endswith(" s with it; 2 of 2 texts identical")
    Path("own.jsonl").write_text(f'{{"turns": ["{PROMPT}", "more"]}}\n')
    record = run_json(outrider, "--compare", "--prompts", "own.jsonl", *SHORT)
    (row,) = record["prompts"]
    assert (row["prompt"], row["num_tokens"], row["identical"]) == (PROMPT, 16, True)
    assert record["compare"]["num_runs"] == 5
    assert record["compare"]["speedup"] == pytest.approx(row["ratio"], abs=1e-3)


def test_a_prompt_that_must_be_equal_and_differs_ends_with_1(
    outrider: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("own.txt").write_text("a\nb\n")
    whole = LLM.generate
    limit = SamplingParams(max_tokens=4)

    def wrong(llm: LLM, prompts: Any, params: Any = None, **more: Any) -> Any:
        other = limit if llm.drafter == "none" and prompts == ["b"] else params
        return whole(llm, prompts, other, **more)

    monkeypatch.setattr(LLM, "generate", wrong)
    shown = outrider("generate", "--compare", "--prompts", "own.txt", *SHORT)
    assert shown.code == 1
    first, second, total = shown.out.splitlines()[1:4]
    assert ("identical" in first, "DIFFERENT" in second) == (True, True)
    assert total.endswith("; 1 of 2 texts identical")
    assert "DIFFERENT text" in shown.out.splitlines()[4]


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("--prompts", "own.txt"), "--prompts is measured by --compare"),
        (("x", "--compare", "--prompts", "own.txt", "--target", "m"), "two models"),
        (("--prompt", "x", "--compare", "--prompts", "own.txt"), "does not go with a prompt"),
        (("--compare", "--prompts", "own.txt", "--html", "a.html"), "does not go with --html"),
        (("--compare", "--prompts", "own.txt", "--n", "2"), "does not go with --n"),
        (("--compare", "--prompts", "nowhere.txt"), "nowhere.txt: No such file"),
        (("--compare", "--prompts", "empty.txt"), "holds no prompt"),
        (("--compare", "--prompts", "bad.jsonl"), "bad.jsonl, line 2: neither turns nor a prompt"),
        (("--compare", "--prompts", "own.txt", "--context", "64"), "prompt 2: "),
    ],
)
def test_what_does_not_go_with_a_file_of_prompts_is_said_first(
    outrider: Command, words: tuple[str, ...], problem: str
) -> None:
    Path("own.txt").write_text(f"a\n{PROMPT * 40}\n")
    Path("empty.txt").write_text("\n")
    Path("bad.jsonl").write_text('{"prompt": "a"}\n{"text": "b"}\n')
    shown = outrider("generate", *words)
    assert (shown.code, shown.out) == (2, "")
    assert problem in " ".join(shown.err.split())


def test_a_comparison_needs_something_to_compare(outrider: Command) -> None:
    shown = outrider("generate", PROMPT, "--compare", "--drafter", "none")
    assert (shown.code, shown.out) == (2, "")
    assert "--compare" in shown.err


def test_colours_name_the_origin_of_each_token(outrider: Command) -> None:
    colored = outrider("generate", PROMPT, *SHORT, "--color", "always").out
    plain = outrider("generate", PROMPT, *SHORT, "--color", "never").out
    assert "\x1b" not in plain
    stripped = re.sub(r"\x1b\[[0-9;]*m", "", colored)
    text = plain[:-1].rsplit("\n", 1)[0]
    assert stripped.startswith(PROMPT + text)
    assert "accepted draft" in stripped


def test_a_run_records_what_decided_it(outrider: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_DTYPE", "bfloat16")
    run = run_json(outrider, PROMPT, *SHORT, "--k", "2")["run"]
    assert run["settings"] == {"k": 2, "dtype": "bfloat16", "max_tokens": 16}
    assert set(run["kernels"]) >= {"linear", "attention", "argmax"}
    assert set(run["kernels"].values()) <= {"native", "reference"}


def test_a_text_that_the_window_cuts_short_says_so(outrider: Command) -> None:
    words = (PROMPT, "--k", "2", "--context", "40", "--max-tokens", "100")
    shown = outrider("generate", *words)
    assert "note: at most" in shown.err
    assert "fit the window of 40" in shown.err
    assert "fit the window of 40" in run_json(outrider, *words)["notes"][0]


def test_several_completions_are_shown_one_after_the_other(outrider: Command) -> None:
    words = (PROMPT, *SHORT, "--n", "2", "--temperature", "0.9", "--seed", "0")
    shown = outrider("generate", *words)
    assert shown.code == 0
    assert shown.out.count("of 2: 16 tokens, ") == 2
    record = run_json(outrider, *words)
    texts = [completion["text"] for completion in record["completions"]]
    assert len(set(texts)) == 2
    assert all(text in shown.out for text in texts)
    assert outrider("generate", *words, "--compare").code == 2


def test_log_probabilities_are_in_the_json(outrider: Command) -> None:
    record = run_json(outrider, PROMPT, *SHORT, "--logprobs", "--top-logprobs", "2")
    assert [entry["token_id"] for entry in record["logprobs"]] == record["token_ids"]
    assert all(len(entry["top"]) == 2 for entry in record["logprobs"])


def test_a_bias_on_the_command_line(outrider: Command) -> None:
    usual = run_json(outrider, PROMPT, *SHORT)
    first = usual["token_ids"][0]
    biased = run_json(outrider, PROMPT, *SHORT, "--logit-bias", f"{first}=-100")
    assert biased["token_ids"][0] != first
    for words in ("x=1", "5", "5=much", "-1=2", "5=1000"):
        shown = outrider("generate", PROMPT, "--logit-bias", words)
        assert shown.code == 2
        assert "--logit-bias" in shown.err


def test_json_reads_back_as_a_result(outrider: Command) -> None:
    record = run_json(outrider, PROMPT, *SHORT, "--profile")
    result = GenerationResult.from_dict(record)
    assert json.loads(result.to_json_line()).items() <= record.items()
    assert len(result.token_seconds) == result.num_tokens == 16


def test_a_profile_stands_beside_the_rounds(outrider: Command, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    record = run_json(outrider, PROMPT, *SHORT, "--profile", "--seed", "3", "--output", str(path))
    profile = record["profile"]
    assert list(profile) == ["metadata", "counts", "aggregate", "memory", "rounds", "kernels"]
    assert len(profile["rounds"]) == len(record["rounds"])
    assert sum(profile["counts"]["accepted"]) == record["stats"]["num_accepted"]
    assert list(profile["metadata"]) == ["seed", "version", "settings", "kernels", "machine"]
    assert profile["metadata"]["seed"] == 3
    assert profile["memory"].keys() == {"load", "prefill", "decode"}
    milliseconds = [kernel["total_ms"] for kernel in profile["kernels"].values()]
    assert milliseconds == sorted(milliseconds, reverse=True)
    assert json.loads(path.read_text()) == record


def test_a_profile_repeats_its_counts(outrider: Command) -> None:
    words = (PROMPT, *SHORT, "--profile", "--temperature", "0.8", "--seed", "5")
    first, second = (run_json(outrider, *words)["profile"]["counts"] for _ in range(2))
    assert json.dumps(first) == json.dumps(second)


def test_several_completions_have_a_profile_each(outrider: Command) -> None:
    words = (PROMPT, *SHORT, "--n", "2", "--temperature", "0.9", "--profile")
    completions = run_json(outrider, *words)["completions"]
    assert [len(one["profile"]["rounds"]) for one in completions] == [
        len(one["rounds"]) for one in completions
    ]


def test_what_speculates_is_one_short_note_and_its_reasons_are_asked_for(
    outrider: Command, tmp_path: Path
) -> None:
    target = tmp_path / "alone" / "target"
    shutil.copytree(resolve("outrider/embedded"), target)
    words = ("generate", PROMPT, "--model", str(target), "--max-tokens", "1")
    note = "note: speculation: look-ups in the text; stops by itself where it does not pay\n"
    assert outrider(*words).err == note
    for flag in ("--stats", "-v"):
        err = outrider(*words, flag).err
        assert f"{note}  drafter auto: look-ups in the text (suffix); no MTP block" in err
