"""Grids: what is varied, which engines and prompts that takes, and what the results say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from math import prod
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from doubles.sweeps import QuickLLM
from outrider.api.tokenizer import Tokenizer
from outrider.core.config import EngineConfig
from outrider.core.errors import CheckpointError, ConfigError
from outrider.core.params import SamplingParams
from outrider.pairs.catalog import EMBEDDED_TARGET, PAIRS
from outrider.plugins.measure.turns import Ratio
from outrider_lab.bench.studies import sweep as sweep_module
from outrider_lab.bench.studies import sweep_recipes as claims
from outrider_lab.bench.studies.sweep import SweepLineup, run_visits
from outrider_lab.bench.studies.sweep_grid import PromptSource, SweepGrid, Terms, grid_of
from outrider_lab.bench.studies.sweep_plan import SweepAxis, SweptPair, axes_of, missing
from outrider_lab.bench.studies.sweep_recipes import RECIPES, GainClaim, SameAcceptance, recipe
from outrider_lab.bench.studies.sweep_record import FILE_NAME, SWEEP, ResultsFolder
from outrider_lab.bench.studies.sweep_report import sections
from outrider_lab.bench.studies.sweep_summary import axes_in, cells, marginals, summary
from outrider_lab.measure.store import Page, markdown

pytestmark = pytest.mark.weights

PAIR = SweptPair("embedded", EMBEDDED_TARGET, None, EngineConfig(batch_size=1))
TERMS = Terms(
    params=SamplingParams(max_tokens=8),
    prompts=PromptSource(2),
    domain="code",
    iterations=1,
    num_requests=2,
    at_once=8,
)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> type[QuickLLM]:
    monkeypatch.setattr(sweep_module, "LLM", QuickLLM)
    for name in ("made", "wrong", "absent"):
        monkeypatch.setattr(QuickLLM, name, type(getattr(QuickLLM, name))())
    return QuickLLM


def grid(*words: str, subject: SweptPair = PAIR, terms: Terms = TERMS) -> SweepGrid:
    return grid_of(subject, axes_of(words), terms)


def measured(path: Path, *words: str, terms: Terms = TERMS) -> ResultsFolder:
    folder = ResultsFolder.open(path, SWEEP)
    axes = {axis.name: list(axis.values) for axis in axes_of(words)}
    for group in grid(*words, terms=terms).groups:
        lineup = SweepLineup(group.target, group.ways, tolerant=True)
        todo = missing(replace(group, ways=tuple(lineup.ways)).visits(), folder)
        run = folder.add_run(group.circumstances(), {"axes": axes, **lineup.facts()})
        for _ in run_visits(lineup, todo, folder, run=run, warmup=0):
            pass
        lineup.close()
    return folder


def test_an_axis_has_a_name_and_values_of_its_setting() -> None:
    assert axes_of(["k=1,2,2", "temperature=0, 0.6", "rule=block", "p-hit=0.5", "batch=2"]) == (
        SweepAxis("k", (1, 2)),
        SweepAxis("temperature", (0.0, 0.6)),
        SweepAxis("sampler", ("block",)),
        SweepAxis("force_hits", (0.5,)),
        SweepAxis("batch_size", (2,)),
    )
    assert axes_of(["pair=embedded", "domain=code", "context=64", "concurrency=0,3"])[3].values == (
        0,
        3,
    )


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["kk=1"], "unknown axis 'kk'"),
        (["k"], "gives no values"),
        (["k="], "gives no values"),
        (["k= ,"], "gives no values"),
        (["k=1", "k=2"], "names k twice"),
        (["batch=1", "batch-size=2"], "names batch_size twice"),
        (["batch=1", "concurrency=2"], "both say how many run at once"),
        (["k=x"], "must be an integer"),
        (["k=65"], "between 0 and 64"),
        (["temperature=-1"], "between 0 and 100"),
        (["rule=greedy"], "unknown value 'greedy'"),
        (["drafter=oracle"], "unknown drafter 'oracle'"),
        (["drafter=eagle="], "names no draft"),
        (["pair=nobody"], "nobody"),
        (["context=15"], "whole numbers from 16"),
        (["concurrency=many"], "whole numbers from 0"),
        (["alpha=0.9"], "run.py ssd"),
        (["stop=x"], "unknown axis 'stop'"),
        (["profile=on"], "unknown axis 'profile'"),
    ],
)
def test_words_that_cannot_be_meant(words: Sequence[str], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        axes_of(words)
    assert said in f"{caught.value} {caught.value.hint}"


def test_a_grid_has_every_scene_in_every_way() -> None:
    found = grid("k=2,4", "drafter=model,ngram", "temperature=0,0.6", "domain=code,maths")
    (group,) = found.groups
    assert [(way.engine.drafter, way.k) for way in group.ways] == [
        *[("none", 0), ("model", 2), ("ngram", 2), ("model", 4), ("ngram", 4)]
    ]
    assert [(scene.params.temperature, scene.domain) for scene in group.scenes] == list(
        product((0.0, 0.6), ("code", "maths"))
    )
    assert found.num_cells == 16
    draft = {way.engine.drafter: way.draft for way in group.ways}
    assert draft == {"none": None, "model": "outrider/embedded-draft", "ngram": None}


@given(
    ks=st.lists(st.integers(0, 6), min_size=1, unique=True),
    heats=st.lists(st.sampled_from([0.0, 0.3, 1.0]), min_size=1, unique=True),
    batches=st.lists(st.integers(1, 3), min_size=1, unique=True),
    at_once=st.integers(1, 4),
)
@settings(max_examples=8)
def test_every_cell_is_measured_beside_plain_decoding_of_its_scene(
    ks: list[int], heats: list[float], batches: list[int], at_once: int
) -> None:
    axes = (
        SweepAxis("k", tuple(ks)),
        SweepAxis("temperature", tuple(heats)),
        SweepAxis("batch_size", tuple(batches)),
    )
    found = grid_of(PAIR, axes, replace(TERMS, at_once=at_once))
    cells = {config for g in found.groups for visit in g.visits() for config in visit.configs}
    drafting = [config for config in cells if config.k]
    assert len(drafting) == prod([len([k for k in ks if k]), len(heats), len(batches)])
    assert len({config.config_hash() for config in cells}) == len(cells)
    for group in found.groups:
        assert len(group.ways) <= at_once + 1
        for visit in group.visits():
            plain, *others = visit.configs
            assert (plain.k, plain.drafter) == (0, "none")
            assert all(
                (one.temperature, one.batch_size) == (plain.temperature, plain.batch_size)
                for one in others
            )


def test_plain_decoding_has_no_setting_that_only_drafts_read() -> None:
    lossy = replace(PAIR, engine=EngineConfig(sampler="typical", schedule="ssd", batch_size=1))
    (group,) = grid("k=2", subject=lossy).groups
    plain, drafting = (way.engine for way in group.ways)
    assert (plain.sampler, plain.schedule, plain.drafter) == ("block", "single", "none")
    assert (drafting.sampler, drafting.schedule) == ("typical", "ssd")


def test_settings_of_drafting_ahead_count_only_where_drafts_are_made_ahead() -> None:
    (group,) = grid("engine=single,ssd", "fan-out=1,4").groups
    ways = [(way.engine.schedule, way.engine.fan_out) for way in group.ways[1:]]
    assert ways == [("single", 16), ("ssd", 1), ("ssd", 4)]
    with pytest.raises(ConfigError, match="ahead of the verdict") as caught:
        grid("fan-out=1,4")
    assert "--schedule ssd" in str(caught.value.hint)


def test_a_drafter_without_its_heads_is_refused_and_the_others_stay() -> None:
    found = grid("drafter=ngram,block")
    assert [way.engine.drafter for way in found.groups[0].ways] == ["none", "ngram"]
    assert list(found.refused) == ["drafter=block"]
    assert "no block heads" in found.refused["drafter=block"]


def test_a_draft_of_its_own_is_part_of_a_cells_name() -> None:
    (group,) = grid("drafter=model,model=outrider/embedded-draft").groups
    names = [config.drafter for config in group.visits()[0].configs]
    assert names == ["none", "model", "model=outrider/embedded-draft"]


def test_scenes_take_turns_and_repetitions_come_after() -> None:
    (group,) = grid("domain=code,maths", "k=2", terms=replace(TERMS, iterations=2)).groups
    found = group.visits()
    names = ["code_000", "maths_000", "code_001", "maths_001"]
    assert [(visit.piece.name, visit.repeat) for visit in found] == [
        (name, i) for i in range(2) for name in names
    ]
    assert [visit.turn for visit in found] == list(range(8))


def test_a_level_is_a_closed_loop_of_so_many(tmp_path: Path, quick: type[QuickLLM]) -> None:
    terms = replace(TERMS, prompts=PromptSource(4), num_requests=4)
    folder = measured(tmp_path, "concurrency=1,3", "k=2", terms=terms)
    assert [(llm.config.batch_size, llm.most_in_flight) for llm in quick.made] == [
        *[(1, 1), (1, 1), (3, 3), (3, 3)]
    ]
    assert all(llm.closed for llm in quick.made)
    for cell in cells(folder):
        assert cell.request_p95_ms is not None
        assert cell.first_p95_ms is not None
        assert list(cell.values) == ["concurrency", "k"]
    numbers = folder.samples[0].numbers
    assert numbers is not None
    assert len(numbers.request_ms) == 4
    assert numbers.num_tokens == 12
    assert ResultsFolder.read(tmp_path, SWEEP).samples[0].to_dict() == folder.samples[0].to_dict()


def test_only_what_is_missing_is_measured(tmp_path: Path, quick: type[QuickLLM]) -> None:
    measured(tmp_path, "k=1,2", "temperature=0,0.6")
    calls = sum(len(llm.calls) for llm in quick.made)
    assert calls == 3 * 2 * 2
    folder = measured(tmp_path, "temperature=0,0.6", "k=1,2")
    assert sum(len(llm.calls) for llm in quick.made) == calls
    # Another K is measured with plain decoding and all the others of its visits.
    folder = measured(tmp_path, "k=1,2,4", "temperature=0.0")
    assert sum(len(llm.calls) for llm in quick.made) == calls + 4 * 2
    assert axes_in(folder) == {"k": [1, 2, 4], "temperature": [0.0, 0.6]}


def test_a_torn_line_is_measured_again(tmp_path: Path) -> None:
    measured(tmp_path, "k=1,2")
    path = tmp_path / FILE_NAME
    whole = path.read_bytes()
    path.write_bytes(whole[:-40])
    folder = measured(tmp_path, "k=1,2")
    assert len(folder.samples) == 8
    assert len(folder.current()) == 6
    assert path.read_bytes().startswith(whole[: whole.rfind(b"\n", 0, -1) + 1])


def test_results_of_the_k_sweep_are_another_kind(tmp_path: Path) -> None:
    measured(tmp_path, "k=1")
    with pytest.raises(ConfigError, match="outrider-bench-k/1"):
        ResultsFolder.read(tmp_path)


def test_a_failure_is_counted_and_the_sweep_goes_on(tmp_path: Path, quick: type[QuickLLM]) -> None:
    quick.wrong["ngram", ""] = RuntimeError("a defect")
    folder = measured(tmp_path, "drafter=model,ngram")
    found = {cell.config.drafter: dict(cell.failures) for cell in cells(folder)}
    assert found == {"none": {}, "model": {}, "ngram": {"RuntimeError: a defect": 2}}
    page = markdown(Page("sweep", list(sections(folder))))
    assert "2 failed: RuntimeError: a defect" in page


def test_a_way_that_does_not_load_is_left_out(quick: type[QuickLLM]) -> None:
    quick.absent["ngram"] = ConfigError("no such thing")
    (group,) = grid("drafter=ngram,model").groups
    lineup = SweepLineup(group.target, group.ways, tolerant=True)
    assert [way.engine.drafter for way in lineup.ways] == ["none", "model"]
    assert list(lineup.refused.values()) == ["ConfigError: no such thing"]
    quick.absent["none"] = CheckpointError("no target")
    with pytest.raises(CheckpointError):
        SweepLineup(group.target, group.ways, tolerant=True)


def test_each_axis_is_summed_up(tmp_path: Path) -> None:
    folder = measured(tmp_path, "k=1,2", "domain=code,maths")
    found = cells(folder)
    assert [cell.is_plain for cell in found] == [True, False, False] * 2
    by_k = marginals(found, "k")
    assert [(one.value, one.num_cells) for one in by_k] == [(1, 2), (2, 2)]
    assert all(one.least <= one.mean <= one.most for one in by_k)
    acceptance = [one.acceptance for one in by_k]
    assert acceptance == [0.5, 0.25]
    fast, slow = (
        replace(cell, speedup=Ratio(r, r, r, 5))
        for cell, r in zip(found[1::3], (4.0, 0.25), strict=True)
    )
    (mean,) = marginals([fast, slow], "k")
    assert (mean.mean, mean.num_gains, mean.num_losses) == (1.0, 1, 1)
    record = summary(folder)
    assert record["greedy_identical"] is True
    assert record["axes"] == {"k": [1, 2], "domain": ["code", "maths"]}
    titles = [section.title for section in sections(folder)]
    assert titles == ["Cells", "By domain", "By k", "What this sweep shows"]


def test_plain_decoding_alone_is_a_sweep_too(tmp_path: Path) -> None:
    folder = measured(tmp_path, "drafter=none", "temperature=0,0.6")
    assert [cell.config.label for cell in cells(folder)] == ["AR", "AR"]
    table = next(iter(sections(folder)))
    assert table.header[:2] == ("temperature", "samples")
    assert [row[0] for row in table.rows] == ["0", "0.6"]
    assert "drafter" not in " ".join(table.text)


def test_claims_are_tested_on_what_was_measured(tmp_path: Path) -> None:
    folder = measured(
        tmp_path,
        "engine=pd,pdv",
        "concurrency=1",
        "k=2",
        terms=replace(TERMS, prompts=PromptSource(10)),
    )
    claim = GainClaim(
        axis="schedule",
        ours="pdv",
        theirs="pd",
        where={"concurrency": 1},
        measure="cumulative p95",
        low=1.0,
        high=1.0,
    )
    said = claim.tested(folder)
    assert said is not None
    assert "published 1×; 1.000× (1.000 to 1.000) here: borne out." in said
    other = replace(claim, low=2.0, high=3.0)
    assert str(other.tested(folder)).endswith("here: not borne out.")
    assert replace(claim, where={"concurrency": 5}).tested(folder) is None


def test_a_claim_compares_cells_that_differ_in_its_axis_alone(tmp_path: Path) -> None:
    """Depth 4 is measured of one side only: had it a say, that side would look slower."""
    prompts = replace(TERMS, prompts=PromptSource(5))
    folder = measured(tmp_path, "engine=pd,pdv", "k=1,4", terms=prompts)
    first = folder.samples[0].numbers
    assert first is not None
    folder.samples = [
        replace(s, numbers=replace(first, seconds=first.seconds * (9 if s.config.k == 4 else 1)))
        for s in folder.samples
        if s.config.k == 1 or dict(s.config.others).get("schedule") == "pdv"
    ]
    claim = GainClaim(
        axis="schedule",
        ours="pdv",
        theirs="pd",
        where={},
        measure="throughput",
        low=1.0,
        high=1.0,
    )
    assert "1.000× (1.000 to 1.000) here" in str(claim.tested(folder))


@pytest.mark.parametrize(
    ("low", "high", "published", "verdict"),
    [
        (1.05, 1.2, 1.115, "borne out"),
        (0.9, 1.5, 1.115, "not decided, the interval is too wide"),
        (0.9, 1.1, 1.115, "not borne out"),
        (0.98, 1.02, 1.0, "borne out"),
        (1.01, 1.03, 1.0, "borne out"),
        (0.8, 1.2, 1.0, "not decided, the interval is too wide"),
        (1.1, 1.2, 1.0, "not borne out"),
        (0.9, 0.95, 0.925, "borne out"),
    ],
)
def test_a_wide_interval_decides_nothing(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    low: float,
    high: float,
    published: float,
    verdict: str,
) -> None:
    folder = measured(tmp_path, "engine=pd,pdv", "k=2")

    def found(*_: object) -> Ratio:
        return Ratio((low + high) / 2, low, high, 9)

    monkeypatch.setattr(claims, "paired_ratio", found)
    claim = GainClaim(
        axis="schedule",
        ours="pdv",
        theirs="pd",
        where={},
        measure="throughput",
        low=published,
        high=published,
    )
    assert str(claim.tested(folder)).endswith(f"here: {verdict}.")


def test_acceptance_by_batch_is_compared_cell_by_cell(tmp_path: Path) -> None:
    claim = SameAcceptance(axis="batch_size", published="falling")
    folder = measured(tmp_path, "batch=1,2", "k=2")
    assert str(claim.tested(folder)).endswith("the same at every value here.")
    other = measured(tmp_path / "one", "batch=1", "k=2")
    assert claim.tested(other) is None
    # Of the smaller batches one piece is not there yet.
    missing = next(s.piece for s in folder.samples if s.config.batch_size == 1)
    folder.samples = [s for s in folder.samples if s.piece != missing]
    assert claim.tested(folder) is None


def test_every_recipe_can_be_planned_on_the_embedded_pair() -> None:
    for name, found in RECIPES.items():
        for words in found.grids:
            axes = [axis for axis in axes_of(words) if axis.name not in ("pair", "context")]
            settings = {n: v for n, v in found.settings.items() if n in ("schedule", "drafter")}
            subject = replace(PAIR, engine=replace(PAIR.engine, **settings))  # pyright: ignore
            planned = grid_of(subject, axes, TERMS)
            assert planned.groups, name
            assert bool(planned.num_cells) is (name != "baseline")
    pairs = {
        str(v)
        for r in RECIPES.values()
        for a in axes_of(r.grids[0])
        if a.name == "pair"
        for v in a.values
    }
    assert pairs <= set(PAIRS)
    assert recipe("phase-3d") is RECIPES["gpt2-k"]
    with pytest.raises(ConfigError, match="phase-9"):
        recipe("phase-9")


def test_prompts_are_counted_by_the_targets_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_tokenizer(_: object) -> None:
        raise AssertionError("nothing had to be counted")

    monkeypatch.setattr(Tokenizer, "load", no_tokenizer)
    grid("k=2")
    with pytest.raises(AssertionError):
        grid("k=2", "context=64")
