"""However few prompt tokens the pace lets a job read, the text stays what it was; and a long prompt
keeps to its share of the passes in which texts are written that somebody reads meanwhile."""

from __future__ import annotations

import asyncio
from contextlib import closing

import pytest

from outrider import LLM, AsyncLLM, EngineConfig, SamplingParams
from outrider.pairs.catalog import EMBEDDED_DRAFT, EMBEDDED_HYBRID
from outrider.sched.admission import LEAST_CHUNK, SHARE_WITH_ROUNDS, PromptPace
from outrider.sched.jobs import Job, Stage
from outrider_lab.bench.workload import load_prompts

pytestmark = [pytest.mark.slow, pytest.mark.weights]

# Two of them begin alike, so that pages are shared; the last has little to read.
_LONG = load_prompts("humaneval")[0]
PROMPTS = [_LONG + "\n# one\n", _LONG + "\n# two\n", "import os, sys"]
GREEDY = SamplingParams(max_tokens=10)
WARM = SamplingParams(max_tokens=10, temperature=0.8, seed=7)

# The pace is the target's; drafters by prompt chunks are covered in test_drafter_matrix.py.
RUNS = [
    {"drafter": "none"},
    {"drafter": "model"},
    {"drafter": "model", "schedule": "pdv"},
    {"drafter": "model", "schedule": "ssd"},
    {"drafter": "model", "tree_nodes": 8, "fused_round": False},
    {"drafter": "mtp"},
    {"drafter": "eagle", "tree_nodes": 8},
    {"drafter": "quantised-self"},
    {"drafter": "none", "kv_budget": 64},
    {"drafter": "ngram", "batched_verify": False},
]
HYBRIDS = [
    {"drafter": "none"},
    {"drafter": "model"},
    {"drafter": "mtp", "state_rollback": "replay"},
    {"drafter": "mtp", "state_rollback": "ring", "state_history": 16},
    {"drafter": "ngram", "schedule": "pdv"},
]


def texts(model: str, config: dict[str, object]) -> list[tuple[int, ...]]:
    settings = {"k": 3, "batch_size": 2, "hybrid_threshold": 0, "device": "cpu"} | config
    draft = EMBEDDED_DRAFT if model == EMBEDDED_HYBRID and config["drafter"] == "model" else None
    made = EngineConfig(**settings)  # pyright: ignore[reportArgumentType]
    with closing(LLM(model, draft=draft, config=made)) as llm:
        return [
            result.token_ids
            for params in (GREEDY, WARM)
            for result in llm.generate(PROMPTS, params)
        ]


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("model", "config"),
    [
        *(("outrider/embedded", config) for config in RUNS),
        *((EMBEDDED_HYBRID, config) for config in HYBRIDS),
    ],
    ids=str,
)
def test_a_text_does_not_depend_on_the_pace(
    model: str, config: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = texts(model, config)
    asked = list[int]()

    def limit(*_: object) -> int:
        asked.append(LEAST_CHUNK)
        return LEAST_CHUNK

    monkeypatch.setattr(PromptPace, "limit", limit)
    assert texts(model, config) == wanted
    assert asked


# What jobs take by an invented clock: a round of all texts, and a prompt token.
ROUND, READ = 0.05, 0.001
SHARE = int(SHARE_WITH_ROUNDS * ROUND / READ)
# So many tokens of the long prompt are read before anything was timed.
FIRST = 256
LONG = [7 + number % 400 for number in range(1_400)]
ENDLESS = SamplingParams(max_tokens=1_000, ignore_eos=True)
ALONE = EngineConfig(batch_size=3, drafter="ngram", schedule="single", threads=1)


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Rounds and prompt tokens of each job, as they end."""
    found, learn = list[tuple[int, int]](), PromptPace.observe

    def observe(pace: PromptPace, job: Job, _: float) -> None:
        read = [w.num_tokens for w in job.works if w.stage in (Stage.PREFILL, Stage.VERIFY)]
        num_rounds, num_tokens = read.count(1), sum(read) - read.count(1)
        found.append((num_rounds, num_tokens))
        learn(pace, job, ROUND * bool(num_rounds) + READ * num_tokens)

    monkeypatch.setattr(PromptPace, "observe", observe)
    monkeypatch.setattr("outrider.sched.admission.CHUNK_SECONDS", 0.2)
    return found


async def write(llm: AsyncLLM, prompt: str, *, watched: bool) -> None:
    if not watched:
        await llm.generate(prompt, ENDLESS)
        return
    async for _ in llm.stream(prompt, ENDLESS):
        pass


def beside_two(jobs: list[tuple[int, int]], *, watched: bool) -> tuple[int, ...]:
    """What a long prompt gets that comes while two texts are written."""

    async def run() -> tuple[int, ...]:
        async with AsyncLLM(config=ALONE) as llm:
            others = [
                asyncio.create_task(write(llm, prompt, watched=watched)) for prompt in PROMPTS[:2]
            ]
            while not any(num_rounds == 2 for num_rounds, _ in jobs):
                await asyncio.sleep(0.001)
            jobs.clear()
            (found,) = await llm.generate([LONG], GREEDY)
            for task in others:
                task.cancel()
            await asyncio.gather(*others, return_exceptions=True)
            return found.token_ids

    return asyncio.run(asyncio.wait_for(run(), 120))


@pytest.mark.parametrize("watched", [True, False])
def test_a_long_prompt_keeps_to_its_share_beside_texts_that_are_read(
    watched: bool, jobs: list[tuple[int, int]]
) -> None:
    ids = beside_two(jobs, watched=watched)
    beside = [num_tokens for num_rounds, num_tokens in jobs if num_rounds == 2 and num_tokens]
    assert sum(beside) >= len(LONG) - FIRST
    if watched:
        # To its end: what is left of it is as long for the others.
        chunks = beside[1:]
        assert SHARE // 2 <= max(chunks) <= SHARE
    else:
        assert max(beside) > 3 * SHARE
    with closing(LLM(config=ALONE)) as llm:
        assert llm.generate([LONG], GREEDY)[0].token_ids == ids
