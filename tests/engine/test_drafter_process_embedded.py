"""The embedded draft model in the process that users get: the same drafts to the bit."""

from __future__ import annotations

import itertools
import os
import random
import signal
from collections.abc import Generator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from checks.faults import pid_of
from outrider import LLM, EngineConfig
from outrider.core.draft import Budget, Draft, Outcome, Verdict
from outrider.core.logits import LogitsProcessor
from outrider.core.params import SamplingParams
from outrider.core.protocols import AheadRow, DraftRow
from outrider.core.rng import KeyedRng, Pick
from outrider.drafters.common.draft_model import ModelDrafter
from outrider.drafters.common.growth import DraftSampler
from outrider.models.decoder import Decoder, LoadOptions, ModelCapacity
from outrider.models.loading import load_model, resolve
from outrider.plugins.lanes.ahead.choices import AheadChoices
from outrider.plugins.lanes.process.client import Home, ProcessDrafter
from outrider.plugins.lanes.process.options import ChildOptions
from outrider.testing import GREEDY, row

pytestmark = [
    pytest.mark.wide,
    pytest.mark.weights,
    pytest.mark.slow,
    pytest.mark.skipif(not hasattr(os, "killpg"), reason="needs POSIX signals"),
]


def draft_model() -> Decoder:
    capacity = ModelCapacity(num_slots=2048, page_size=32, max_rows=64, max_logits=48)
    return load_model(resolve("outrider/embedded-draft"), LoadOptions(capacity=capacity, threads=1))


def real_inside(model: Decoder) -> ModelDrafter:
    kernels = model.kernels
    sampler = DraftSampler(kernels.argmax, "the draft model", sampling=kernels.sampling)
    return ModelDrafter(model, sampler, chunk=64)


@pytest.fixture(scope="module")
def real() -> Generator[ProcessDrafter]:
    """The embedded draft, drafting ahead, in the process that users get."""
    options = ChildOptions(
        folder=str(resolve("outrider/embedded-draft")),
        vocab_size=draft_model().spec.vocab_size,
        num_distributions=16,
        num_slots=1024,
        page_size=32,
        max_rows=64,
        max_logits=48,
        chunk=64,
        batch_size=4,
        threads=1,
        ahead=AheadChoices(k=4, fan_out=8),
    )
    drafter = ProcessDrafter(options, Home(timeout=60.0))
    drafter.wait_ready()
    yield drafter
    drafter.shut_down()


@dataclass(slots=True)
class Request:
    """One sequence, followed by hand. `pick` is what noise in this process draws with."""

    seq_id: int
    text: list[int]
    params: SamplingParams
    pick: Pick
    shaper: LogitsProcessor | None = None
    last: Outcome | None = None

    def row(self, depth: int) -> DraftRow:
        rng = self.rng_after(0)
        budget = Budget(depth)
        return DraftRow(
            self.seq_id, list(self.text), self.last, budget, self.params, rng, (), self.shaper
        )

    def rng_after(self, count: int) -> KeyedRng:
        return KeyedRng(self.params.rng_seed, 1, len(self.text) + count, self.pick)

    def go_on(self, draft: Draft, num_accepted: int, token: int) -> None:
        self.last = Outcome(self.seq_id, draft, Verdict(tuple(range(num_accepted)), token))
        self.text += self.last.tokens


def requests(pick: Pick) -> list[Request]:
    """Greedy, sampled, and sampled from shaped distributions."""
    shaped = SamplingParams(temperature=0.8, repetition_penalty=1.3, logit_bias={7: 3.0}, seed=5)
    prompt = [11, 205, 17, 900, 33, 205, 17]
    return [
        Request(0, [*prompt], SamplingParams(), pick),
        Request(1, [*prompt, 4], SamplingParams(temperature=0.8, top_p=0.95, seed=2**40), pick),
        Request(2, [*prompt], shaped, pick, LogitsProcessor(shaped, len(prompt))),
    ]


def assert_equal(left: Draft, right: Draft) -> None:
    """To the bit."""
    assert (left.tokens, left.parents) == (right.tokens, right.parents)
    assert (left.probs_NV is None) == (right.probs_NV is None)
    if left.probs_NV is not None and right.probs_NV is not None:
        assert torch.equal(left.probs_NV, right.probs_NV)


def test_drafts_of_the_embedded_model_are_the_same_to_the_bit(real: ProcessDrafter) -> None:
    model, rng = draft_model(), random.Random(1)
    inside = real_inside(model)
    live = requests(model.kernels.sampling.pick)
    for one in live:
        real.open(one.seq_id, one.text)
        inside.open(one.seq_id, one.text)
    for _ in range(6):
        rows = [one.row(rng.randint(1, 4)) for one in live]
        drafts = real.propose(rows)
        for one, draft, wanted in zip(live, drafts, inside.propose(rows), strict=True):
            assert_equal(draft, wanted)
            one.go_on(draft, rng.randint(0, len(draft)), rng.randrange(1000))
    for one in live:
        real.close(one.seq_id)


def test_what_is_drafted_ahead_is_what_would_be_drafted_later(real: ProcessDrafter) -> None:
    """The verdict that the draft model itself would give is foreseen."""
    model = draft_model()
    inside = real_inside(model)
    live = requests(model.kernels.sampling.pick)[:2]
    hits: list[bool | None] = []
    for one in live:
        real.open(one.seq_id, one.text)
        inside.open(one.seq_id, one.text)
    drafts = real.propose([one.row(4) for one in live])
    for _ in range(4):
        real.propose_after(
            [
                AheadRow(
                    one.seq_id,
                    len(one.text),
                    one.text[-1],
                    draft,
                    Budget(4),
                    one.params,
                    one.rng_after,
                )
                for one, draft in zip(live, drafts, strict=True)
            ]
        )
        for one, draft in zip(live, drafts, strict=True):
            longer = replace(one.row(4), tokens=[*one.text, *draft.tokens], params=GREEDY)
            following = inside.propose([longer])[0].tokens[0]
            one.go_on(draft, len(draft), following)
        rows = [one.row(4) for one in live]
        drafts = real.propose(rows)
        hits += [draft.hit for draft in drafts]
        for draft, wanted in zip(drafts, inside.propose(rows), strict=True):
            assert_equal(draft, wanted)
    assert all(hits)
    assert real.stats().ahead_seconds > 0
    for one in live:
        real.close(one.seq_id)


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
def test_memory_is_flat_over_many_requests(real: ProcessDrafter) -> None:
    """The arena has room for 16 such requests, so a page that is not given back is an error."""
    pids = (os.getpid(), pid_of(real))
    sizes: list[list[int]] = []
    for cycle in range(220):
        text = [cycle % 100, *range(100, 150)]
        real.open(cycle, text)
        params = SamplingParams(temperature=0.8, seed=cycle)
        assert len(real.propose([row(cycle, text, depth=4, params=params)])[0]) == 4
        real.close(cycle)
        if cycle in (20, 219):
            sizes.append([resident_bytes(pid) for pid in pids])
    assert pids[1] == pid_of(real)
    for before, after in zip(*sizes, strict=True):
        assert after - before < 4 << 20


def process_of(llm: LLM) -> ProcessDrafter:
    drafter = llm._engine.residents.drafting.drafter  # pyright: ignore[reportPrivateUsage]
    assert isinstance(drafter, ProcessDrafter)
    return drafter


def test_requests_outlive_their_drafter() -> None:
    """Drafting ahead in a process writes what drafting in turns inside the engine writes, also
    where the process is killed under way. Greedy text does not depend on drafts."""
    prompts = ["def quicksort(items):", "import os\n\nclass Reader:", "Question: Tom has 3"]
    sampled = SamplingParams(max_tokens=32, temperature=0.8, seed=7)
    greedy = SamplingParams(max_tokens=32)
    inside = LLM(config=EngineConfig(lane_threads=1))
    texts = [
        [result.token_ids for result in inside.generate(prompts, params)]
        for params in (sampled, greedy)
    ]
    config = EngineConfig(schedule="ssd", drafter_home="process", lane_threads=1)
    llm = LLM(config=config)
    free = llm.free_tokens
    results = llm.generate(prompts, sampled)
    assert [result.token_ids for result in results] == texts[0]
    assert sum(result.stats.num_accepted for result in results) > 0
    assert process_of(llm).stats().ahead_seconds > 0
    tickets = [llm.submit(prompt, greedy) for prompt in prompts]
    for num_steps in itertools.count():
        if num_steps == 6:
            os.kill(pid_of(process_of(llm)), signal.SIGKILL)
        if not llm.has_work:
            break
        llm.advance()
    assert [ticket.result().token_ids for ticket in tickets] == texts[1]
    assert llm.free_tokens == free
    assert process_of(llm).stats().num_ends == 1
    llm.close()
    inside.close()
