"""However the work is arranged, greedy text is that of plain decoding, on the embedded pair.

Here a few rows meet every pair of two settings; `studies/parity_matrix.py engines` runs all.
"""

from __future__ import annotations

import pytest
from matrices.matrix import Row, Runner, covering_rows
from matrices.settings import ENGINES, acceptance_by_draft, engines

from outrider import LLM, EngineConfig, SamplingParams
from outrider.core.draft import JobTrace

pytestmark = pytest.mark.weights

TEXT = """def add(a, b):
    return a + b


for i in range(10):
    print(add(i, 2 * i))
"""
# Short and long, and some with a common beginning.
PROMPTS = [TEXT[start : start + 8 + 5 * start] for start in range(10)] + [
    TEXT * 4,
    TEXT * 4 + "x",
    "The",
    TEXT * 2,
    "1 + 1 =",
    TEXT * 3,
]
ROWS = covering_rows(ENGINES)


def named(row: Row) -> str:
    return " ".join(row.values())


@pytest.fixture(scope="module")
def matrix() -> Runner:
    return Runner(engines(), PROMPTS, max_tokens=9)


@pytest.mark.sample(5)
@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS, ids=named)
def test_text_is_that_of_plain_decoding(matrix: Runner, row: Row) -> None:
    (cell,) = matrix.run([row])
    assert cell.first_difference is None
    assert cell.num_tokens == cell.num_equal == 9 * len(PROMPTS)
    drafts = row["k"] != "0" and row["drafter"] != "none"
    assert drafts or cell.num_drafted == 0
    # What `auto` drafts depends on the time that it takes.
    assert cell.num_drafted > 0 or not drafts or row["schedule"] == "auto"


def test_the_full_product_has_each_configuration_once() -> None:
    rows = engines().all_rows()
    assert len(rows) == len({named(row) for row in rows}) > 2000
    assert {name: {row[name] for row in rows} for name in ENGINES} == {
        name: set(values) for name, values in ENGINES.items()
    }


def arranged(schedule: str, **settings: object) -> Row:
    """A row of model drafts, with some settings changed."""
    row = {name: values[0] for name, values in ENGINES.items()}
    row |= {"drafter": "model", "k": "4", "prefill_chunk": "256", "schedule": schedule}
    return row | {name: str(value) for name, value in settings.items()}


@pytest.mark.slow
def test_tight_memory_pre_empts_and_changes_nothing(matrix: Runner) -> None:
    schedules = ("single", "pdv", "ssd")
    rows = [arranged(name, memory="tight", batch_size=16) for name in schedules]
    for cell in matrix.run(rows):
        assert cell.num_preempted > 0
        assert cell.holds


@pytest.mark.slow
def test_acceptance_depends_on_neither_schedule_nor_batch(matrix: Runner) -> None:
    rows = [
        arranged("single"),
        arranged("pdv", batch_size=16, executor="threads"),
        arranged("ssd", batch_size=5, force_hits="0.5"),
    ]
    found = acceptance_by_draft(list(matrix.run(rows)))
    assert set(found) == {"model k=4"}
    assert len(found["model k=4"]) == 1


def num_passes(schedule: str, batch_size: int) -> int:
    """Target passes of `batch_size` equal prompts, counted from the records of jobs.

    The chunk has room for all prompts, and lanes that wait for each other have one timing.
    """
    jobs: list[JobTrace] = []
    config = EngineConfig(
        schedule=schedule,
        batch_size=batch_size,
        k=4,
        hybrid_threshold=0,
        prefill_chunk=4096,
        concurrent_lanes=False,
    )
    llm = LLM(config=config, on_job=jobs.append)
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    results = llm.generate([TEXT] * batch_size, params)
    llm.close()
    assert len({result.token_ids for result in results}) == 1
    return sum(bool({"prefill", "verify"} & set(job.kinds)) for job in jobs)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["single", "pdv", "ssd"])
def test_sixteen_requests_take_the_target_passes_of_one(schedule: str) -> None:
    """Batching is real: a pass is shared, not repeated for each."""
    assert num_passes(schedule, 16) == num_passes(schedule, 1)


@pytest.mark.slow
@pytest.mark.parametrize("force_hits", [-1.0, 0.5])
def test_drafting_ahead_draws_the_very_text_of_one_lane(force_hits: float) -> None:
    """At a temperature, with a seed: the numbers are keyed by what they decide, so a draft made
    ahead of its verdict is the draft that would have been made after it."""
    params = SamplingParams(max_tokens=24, temperature=0.8, seed=11, ignore_eos=True)
    told = [
        [
            (result.token_ids, result.stats.num_accepted, result.stats.num_drafted)
            for result in LLM(config=config).generate(PROMPTS[11:], params)
        ]
        for config in (
            EngineConfig(k=4, batch_size=4),
            EngineConfig(schedule="ssd", fallback="jit", k=4, batch_size=4, force_hits=force_hits),
        )
    ]
    assert told[0] == told[1]
