"""The sweep itself: turns, pairs of samples, seeds, failures; on a scripted LLM."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from doubles.sweeps import circumstances
from outrider.api.result import GenerationResult
from outrider.core.config import EngineConfig
from outrider.core.errors import CapacityError, ConfigError
from outrider.core.params import SamplingParams
from outrider.metrics import Stats
from outrider_lab.bench.studies import sweep as sweep_module
from outrider_lab.bench.studies.sweep import SweepLineup, run_visits
from outrider_lab.bench.studies.sweep_plan import (
    DomainPrompts,
    Group,
    PlannedVisit,
    Scene,
    SweptPair,
    Way,
    Work,
    missing,
)
from outrider_lab.bench.studies.sweep_record import K_SWEEP, ResultsFolder
from outrider_lab.bench.studies.sweep_summary import cells

PAIR = SweptPair("toy", "t", "d", EngineConfig(drafter="model", batch_size=1))


class ScriptedLLM:
    """Echoes its prompt's characters; what it is told to do wrong, it does for one prompt."""

    calls: list[tuple[int, str, int, int]] = []  # noqa: RUF012 - one list for all of a test's
    wrong: dict[tuple[int, str], object] = {}  # noqa: RUF012

    def __init__(self, target: str, *, draft: str | None, config: EngineConfig) -> None:
        assert (target, draft) == ("t", "d" if config.k else None)
        assert not config.profile
        self.k = config.most_k
        self.drafter = config.drafter
        self.exact = True
        self.notes = ("one note",)
        self.kernels = SimpleNamespace(choices=(), exact=True)
        self.tokenizer = SimpleNamespace(encode=self._encode)

    def _encode(self, prompt: str) -> bytes:
        return prompt.encode()

    def close(self) -> None:
        """Nothing was started."""

    def forget(self) -> None:
        """Nothing was learnt."""

    def fitting_tokens(self, prompt: str, params: SamplingParams) -> int:
        self._encode(prompt)
        if prompt == "too long":
            raise ConfigError("does not fit")
        return min(params.max_tokens, 20 - self.k)

    def generate(self, prompts: Sequence[str], params: SamplingParams) -> list[GenerationResult]:
        self.calls += [(self.k, prompt, params.rng_seed, params.max_tokens) for prompt in prompts]
        return [self._result(prompt) for prompt in prompts]

    def _result(self, prompt: str) -> GenerationResult:
        wrong = self.wrong.get((self.k, prompt))
        if isinstance(wrong, BaseException):
            raise wrong
        ids = (1, 2, 3) if wrong is None else (1, 9, 3)
        seconds = {"prefill": 0.1, "draft": 0.1, "verify": 0.2, "accept": 0.1, "total": 0.5}
        drafted = 3 if self.k else 0
        stats = Stats(self.drafter, self.k, 3, 3, drafted, 0, 3, seconds, (3, 0) if self.k else ())
        return GenerationResult("", ids, None, stats, token_seconds=(0.1, 0.2, 0.3))


@pytest.fixture(autouse=True)
def scripted(monkeypatch: pytest.MonkeyPatch) -> type[ScriptedLLM]:
    monkeypatch.setattr(sweep_module, "LLM", ScriptedLLM)
    monkeypatch.setattr(ScriptedLLM, "calls", [])
    monkeypatch.setattr(ScriptedLLM, "wrong", {})
    return ScriptedLLM


@dataclass(frozen=True, kw_only=True)
class KSweep:
    """A sweep over K: `prompts` by domain."""

    prompts: Mapping[str, DomainPrompts]
    ks: Sequence[int]
    iterations: int
    warmup: int
    params: SamplingParams

    def group(self, pair: SweptPair) -> Group:
        plain = Way(replace(pair.engine, k=0, drafter="none"))
        ks = self.ks if pair.engine.drafter != "none" else ()
        return Group(
            pair=pair.name,
            target=pair.target,
            ways=(plain, *(Way(replace(pair.engine, k=k), pair.draft) for k in ks)),
            scenes=tuple(
                Scene(domain=domain, prompts=prompts, params=self.params)
                for domain, prompts in self.prompts.items()
            ),
            piece_size=pair.engine.most_batch,
            iterations=self.iterations,
            schema=K_SWEEP,
        )


def works(*texts: str, domain: str = "code", mark: str = "print") -> DomainPrompts:
    return DomainPrompts(
        tuple(Work(f"{domain}_{i:03d}", text) for i, text in enumerate(texts)), mark
    )


def sweep(num: int = 2, marks: Mapping[str, str] | None = None, **changes: Any) -> KSweep:
    prompts = {
        d: works(*(f"{d} {i}" for i in range(num)), domain=d, mark=(marks or {}).get(d, "print"))
        for d in ("code", "maths")
    }
    given: dict[str, Any] = {
        "prompts": prompts,
        "ks": (1, 2),
        "iterations": 1,
        "warmup": 0,
        "params": SamplingParams(max_tokens=8),
    }
    return KSweep(**(given | changes))


def outstanding(plan: KSweep, pair: SweptPair, folder: ResultsFolder) -> list[PlannedVisit]:
    return missing(plan.group(pair).visits(), folder)


def lineup_of(plan: KSweep, pair: SweptPair = PAIR) -> SweepLineup:
    return SweepLineup(pair.target, plan.group(pair).ways)


def run(plan: KSweep, path: Path, pair: SweptPair = PAIR) -> ResultsFolder:
    folder = ResultsFolder.open(path)
    folder.add_run(circumstances(), {})
    todo = outstanding(plan, pair, folder)
    with closing(lineup_of(plan, pair)) as lineup:
        for _ in run_visits(lineup, todo, folder, run=1, warmup=plan.warmup):
            pass
    return folder


def test_every_k_runs_every_prompt_in_turns_that_rotate(
    tmp_path: Path, scripted: type[ScriptedLLM]
) -> None:
    folder = run(sweep(), tmp_path)
    assert [(k, prompt) for k, prompt, _, _ in scripted.calls] == [
        *[(k, "code 0") for k in (0, 1, 2)],
        *[(k, "maths 0") for k in (1, 2, 0)],
        *[(k, "code 1") for k in (2, 0, 1)],
        *[(k, "maths 1") for k in (0, 1, 2)],
    ]
    assert [one.config.k for one in folder.samples] == [0, 1, 2] * 4
    assert [one.visit for one in folder.samples] == [v for v in (1, 2, 3, 4) for _ in range(3)]
    assert all(one.ok and one.numbers and one.numbers.identical for one in folder.samples)


def test_all_k_stop_at_the_shortest_limit_and_repetitions_have_their_seeds(
    tmp_path: Path, scripted: type[ScriptedLLM]
) -> None:
    run(sweep(1, iterations=2, params=SamplingParams(max_tokens=50, seed=7)), tmp_path)
    assert {limit for _, _, _, limit in scripted.calls} == {18}
    assert [seed for _, _, seed, _ in scripted.calls] == [7] * 6 + [8] * 6


def test_warm_up_is_not_counted(tmp_path: Path, scripted: type[ScriptedLLM]) -> None:
    folder = run(sweep(1, warmup=2), tmp_path)
    assert len(scripted.calls) == 6 + len(folder.samples) == 12


def test_what_is_there_is_not_measured_again(tmp_path: Path, scripted: type[ScriptedLLM]) -> None:
    run(sweep(), tmp_path)
    scripted.calls.clear()
    assert len(run(sweep(), tmp_path).samples) == 12
    assert scripted.calls == []
    # More prompts, more repetitions and another K: only what is new, with plain decoding beside it.
    assert len(outstanding(sweep(3), PAIR, ResultsFolder.read(tmp_path))) == 2
    assert len(outstanding(sweep(iterations=2), PAIR, ResultsFolder.read(tmp_path))) == 4
    run(sweep(1, ks=(2, 4)), tmp_path)
    assert [(k, prompt) for k, prompt, _, _ in scripted.calls] == [
        *[(k, "code 0") for k in (0, 2, 4)],
        *[(k, "maths 0") for k in (2, 4, 0)],
    ]


def test_another_prompt_set_or_setting_is_measured_anew(tmp_path: Path) -> None:
    folder = run(sweep(), tmp_path)
    new_prompts = sweep(marks={"code": "new"})
    assert {v.piece.domain for v in outstanding(new_prompts, PAIR, folder)} == {"code"}
    hotter = sweep(params=SamplingParams(max_tokens=8, temperature=0.5))
    assert len(outstanding(hotter, PAIR, folder)) == 4


def test_an_error_is_recorded_and_the_sweep_goes_on(
    tmp_path: Path, scripted: type[ScriptedLLM]
) -> None:
    scripted.wrong[1, "code 0"] = CapacityError("no room")
    scripted.wrong[0, "maths 1"] = torch.OutOfMemoryError("device full")
    scripted.wrong[2, "maths 0"] = RuntimeError("a defect")
    folder = run(sweep(), tmp_path)
    failed = {(one.config.k, one.piece): one for one in folder.samples if not one.ok}
    assert {key: one.reason for key, one in failed.items()} == {
        (1, "code_000"): "CapacityError: no room",
        (0, "maths_001"): "OutOfMemoryError: device full",
        (2, "maths_000"): "RuntimeError: a defect",
    }
    assert all(one.numbers is None for one in failed.values())
    beside = [one.numbers for one in folder.samples if one.piece == "maths_001" and one.ok]
    assert [one.identical for one in beside if one] == [None, None]


def test_a_prompt_that_is_no_text_is_a_failure_of_its_own(tmp_path: Path) -> None:
    folder = run(sweep(prompts={"code": works("\ud800", "code 1")}, warmup=1), tmp_path)
    assert [one.ok for one in folder.samples] == [False] * 3 + [True] * 3
    assert str(folder.samples[0].reason).startswith("UnicodeEncodeError: ")
    assert not ResultsFolder.read(tmp_path).samples[0].ok


def test_an_interrupt_ends_the_sweep(tmp_path: Path, scripted: type[ScriptedLLM]) -> None:
    scripted.wrong[1, "maths 0"] = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        run(sweep(), tmp_path)
    assert {one.piece for one in ResultsFolder.read(tmp_path).samples} == {"code_000"}


def test_what_failed_is_measured_again_at_every_k(
    tmp_path: Path, scripted: type[ScriptedLLM]
) -> None:
    scripted.wrong[2, "code 1"] = CapacityError("no room")
    run(sweep(), tmp_path)
    scripted.calls.clear()
    scripted.wrong.clear()
    folder = run(sweep(), tmp_path)
    assert [prompt for _, prompt, _, _ in scripted.calls] == ["code 1"] * 3
    assert len(folder.samples) == 15
    assert all(one.ok for one in folder.current().values())
    assert outstanding(sweep(), PAIR, folder) == []


def test_other_tokens_than_plain_decodings_are_a_failure_with_numbers(
    tmp_path: Path, scripted: type[ScriptedLLM]
) -> None:
    scripted.wrong[2, "code 1"] = "other tokens"
    folder = run(sweep(), tmp_path)
    (failed,) = [one for one in folder.samples if not one.ok]
    assert failed.reason == "DifferentTokens: not those of plain decoding from token 1 on"
    assert failed.numbers is not None
    assert failed.numbers.identical is False


def test_samples_are_not_compared_when_they_need_not_agree(
    tmp_path: Path, scripted: type[ScriptedLLM]
) -> None:
    scripted.wrong[2, "code 1"] = "other tokens"
    hot = sweep(params=SamplingParams(max_tokens=8, temperature=1.0))
    folder = run(hot, tmp_path)
    assert all(one.ok and one.numbers and one.numbers.identical is None for one in folder.samples)


def test_a_prompt_that_does_not_fit_reaches_the_engine_and_fails_there(
    tmp_path: Path, scripted: type[ScriptedLLM]
) -> None:
    scripted.wrong.update({(k, "too long"): ConfigError("does not fit") for k in (0, 1, 2)})
    folder = run(sweep(prompts={"code": works("too long")}), tmp_path)
    assert [one.reason for one in folder.samples] == ["ConfigError: does not fit"] * 3


def test_a_batch_is_one_piece(tmp_path: Path, scripted: type[ScriptedLLM]) -> None:
    pair = SweptPair("toy", "t", "d", EngineConfig(drafter="model", batch_size=2))
    scripted.wrong[1, "code 1"] = "other tokens"
    folder = run(sweep(3), tmp_path, pair)
    names = list(dict.fromkeys(one.piece for one in folder.samples))
    assert names == ["code_000..code_001", "maths_000..maths_001", "code_002", "maths_002"]
    first = folder.samples[1]
    assert (
        first.reason == "DifferentTokens: not those of plain decoding from token 1 of prompt 1 on"
    )
    numbers = folder.samples[0].numbers
    assert numbers is not None
    assert (numbers.num_tokens, numbers.num_rounds, numbers.draft_seconds) == (6, 6, 0.1)
    assert numbers.verify_ms == pytest.approx(100.0)
    assert first.numbers is not None
    assert first.numbers.accepted_histogram == [6, 0]


@pytest.mark.parametrize("nums", [(3, 4), (4, 3), (3, 4, 3), (1, 4, 5)])
def test_a_prompt_counts_once_however_its_batch_was_cut(
    tmp_path: Path, nums: Sequence[int]
) -> None:
    pair = SweptPair("toy", "t", "d", EngineConfig(drafter="model", batch_size=2))
    for num in nums:
        folder = run(sweep(num), tmp_path, pair)
        assert outstanding(sweep(num), pair, folder) == []
        counted = Counter(
            (key[0], id_) for key, s in folder.current().items() for id_ in s.prompt_ids
        )
        assert set(counted.values()) == {1}
        measured = {id_ for _, id_ in counted}
        assert {f"{d}_{i:03d}" for d in ("code", "maths") for i in range(num)} <= measured
        assert {one.num_samples for one in cells(folder)} == {(len(measured) // 2 + 1) // 2}


def test_repetitions_of_a_piece_that_was_cut_anew_do_not_count(tmp_path: Path) -> None:
    pair = SweptPair("toy", "t", "d", EngineConfig(drafter="model", batch_size=2))
    run(sweep(1, iterations=2), tmp_path, pair)
    folder = run(sweep(2), tmp_path, pair)
    assert {one.piece for one in folder.current().values()} == {
        "code_000..code_001",
        "maths_000..maths_001",
    }


def test_without_a_drafter_there_is_only_plain_decoding(
    tmp_path: Path, scripted: type[ScriptedLLM]
) -> None:
    plain = SweptPair("toy", "t", None, EngineConfig(drafter="none", batch_size=1))
    folder = run(sweep(), tmp_path, plain)
    assert {k for k, *_ in scripted.calls} == {0}
    assert {one.config.label for one in folder.samples} == {"AR"}
    # Speculation measured later finds plain decoding under the same name.
    speculating = sweep().group(PAIR).visits()[0]
    assert folder.samples[0].key[0] == speculating.configs[0].config_hash()


def test_visits_have_an_order(tmp_path: Path) -> None:
    found = sweep(iterations=2).group(PAIR).visits()
    assert [visit.turn for visit in found] == list(range(8))
    assert [visit.repeat for visit in found] == [0] * 4 + [1] * 4
    assert lineup_of(sweep()).facts()["num_engines"] == 3
    assert lineup_of(sweep()).notes == ("one note",)
    assert not (tmp_path / "samples.jsonl").exists()
