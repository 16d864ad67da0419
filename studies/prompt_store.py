"""What a prompt store saves, and what it costs: `run.py prompt_store`."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from math import comb, inf
from pathlib import Path
from shutil import rmtree
from statistics import median
from tempfile import TemporaryDirectory
from time import monotonic, perf_counter, process_time
from typing import Any, cast

from common import DRAFT, TARGET, Report, note, real_folder, study
from options import Options

from outrider import LLM, EngineConfig, SamplingParams
from outrider.api.tokenizer import Tokenizer
from outrider.cache.paged_kv import PagedKV, paged_of
from outrider.cache.pages import PageStore
from outrider.models.loading import resolve
from outrider_lab.bench.workload import load_prompts

FIRST = SamplingParams(max_tokens=1, ignore_eos=True)
WRITE = SamplingParams(max_tokens=32, ignore_eos=True)
BEGIN = SamplingParams(max_tokens=8, ignore_eos=True)
HYBRID = "outrider/embedded-hybrid"
# A prompt from this length on is read once in each way.
LONG = 8_000
LENGTHS = {"SmolLM2-135M-Instruct": {2_000, 8_000}, HYBRID: {2_000}}


@study(lengths=["2000", "8000"], repeats=3, requests=4, rounds=8)
def prompt_store(options: Options, report: Report) -> bool:
    """How long does the first token take if the prompt is unknown, known in memory, or known on
    disk after a restart? And what do requests cost that find nothing, with a store and without?

    Models take turns with themselves in one process: an engine without a store, one that fills an
    empty one, and one that is opened anew over the full one. Texts of all must be equal. Requests
    that find nothing come one after another, so files are written at the pace for busy times.
    """
    real = real_folder("")
    models = {real.name: str(real), HYBRID: HYBRID}
    if options.quick:
        models, options.repeats, options.requests, options.rounds = {HYBRID: HYBRID}, 1, 1, 1
    holds = True
    for name, model in models.items():
        for length in sorted(LENGTHS[name] & {*map(int, options.lengths)}):
            repeats = options.repeats if length < LONG else 1
            cell = _first_token(model, length, repeats)
            note(report, model=name, tokens=length, **cell)
            holds &= cell["same"]
        if options.rounds:
            note(report, model=name, **_unknown(model, options.requests, options.rounds))
    if 2_000 in map(int, options.lengths):
        cell = _first_drafts(512 if options.quick else 1_900, options.repeats)
        note(report, model=TARGET, draft=DRAFT, **cell)
        holds &= cell["same"]
    return holds


def _opened(model: str, store: str = "", draft: str | None = None) -> LLM:
    config = EngineConfig(
        device="cpu",
        drafter="model" if draft else "none",
        batch_size=1,
        arena_tokens=8_192,
        prompt_store=store,
    )
    return LLM(model, draft=draft, config=config)


def _first_drafts(length: int, repeats: int) -> dict[str, Any]:
    """Return seconds to the first eight tokens with a draft model: of an unknown prompt, and after
    a restart, with the pages of both models and without those of the draft model."""
    seconds: dict[str, list[float]] = {"cold": [], "restart": [], "target_alone": []}
    same = True
    for prompt in _prompts(TARGET, length, repeats):
        texts: set[Sequence[int]] = set()
        with TemporaryDirectory() as folder:
            for way in seconds:
                if way == "target_alone":
                    (own,) = (one for one in Path(folder).glob("*/model.json") if _is_draft(one))
                    rmtree(own.parent)
                with closing(_opened(TARGET, folder, DRAFT)) as llm:
                    llm.generate([prompt[-64:]], BEGIN)
                    began = perf_counter()
                    texts.add(llm.generate([prompt], BEGIN)[0].token_ids)
                    seconds[way].append(perf_counter() - began)
                del llm
                gc.collect()
        same &= len(texts) == 1
    times = {f"{way}_seconds": median(each) for way, each in seconds.items()}
    return {"tokens": length, **times, "same": same, "seconds": seconds}


def _is_draft(about: Path) -> bool:
    return json.loads(about.read_text())["name"] == DRAFT


def _first_token(model: str, length: int, repeats: int) -> dict[str, Any]:
    """Return seconds to the first token: cold, warm, and after a restart over a store."""
    seconds: dict[str, list[float]] = {"cold": [], "stored": [], "warm": [], "restart": []}
    known: list[int] = []
    same = True
    for prompt in _prompts(model, length, repeats):
        with TemporaryDirectory() as folder:
            texts: list[Sequence[int]] = []
            for ways, store in (
                (("cold", "warm"), ""),
                (("stored",), folder),
                (("restart",), folder),
            ):
                with closing(_opened(model, store)) as llm:
                    # The first pass of a process touches its memory.
                    llm.generate([prompt[-64:]], FIRST)
                    for way in ways:
                        began = perf_counter()
                        result = llm.generate([prompt], FIRST)[0]
                        seconds[way].append(perf_counter() - began)
                        texts.append(llm.generate([prompt], WRITE)[0].token_ids)
                        known += [result.num_cached_tokens] if way == "restart" else []
                del llm
                gc.collect()
            same &= len(set(texts)) == 1
    times = {way: median(each) for way, each in seconds.items()}
    ratios = [a / b for a, b in zip(seconds["cold"], seconds["restart"], strict=True)]
    return {
        **{f"{way}_seconds": value for way, value in times.items()},
        "times_as_fast": median(ratios),
        "known": known,
        "same": same,
        "seconds": seconds,
    }


class Timed:
    """A store whose calls are timed, in the thread that computes."""

    def __init__(self, store: Any) -> None:
        self.store = store
        self.seconds = 0.0

    def __getattr__(self, name: str) -> Callable[..., object]:
        call = getattr(self.store, name)

        def timed(*given: object, **named: object) -> object:
            began = perf_counter()
            try:
                return call(*given, **named)
            finally:
                self.seconds += perf_counter() - began

        return timed


def _pages(llm: LLM) -> PagedKV:
    """The keys and values of the target of an LLM."""
    found = paged_of(llm._pair.target.state)  # pyright: ignore[reportPrivateUsage]
    assert found is not None
    return found


def _unknown(model: str, requests: int, rounds: int) -> dict[str, Any]:
    """Return how much longer requests take that find nothing, with a store than without; and the
    share of their time that the store's calls and the writing of files take. One engine serves
    both, since two have other addresses, and so other times."""
    ratios: list[float] = []
    cpu_ratios: list[float] = []
    prompts = iter(_prompts(model, 400, 2 * requests * (rounds + 1)))
    with TemporaryDirectory() as folder, closing(_opened(model, folder)) as llm:
        kv = _pages(llm)
        calls, whole, left = Timed(kv.store), 0.0, 0.0
        pace = calls.store.pace
        for number in range(rounds + 1):
            spent: dict[bool, float] = {}
            cpu: dict[bool, float] = {}
            for with_store in (number % 2 == 0, number % 2 == 1):
                kv.store = cast("PageStore", calls) if with_store else None
                batch = [next(prompts) for _ in range(requests)]
                # What waits is not written while the store is away, nor in a pause.
                pace.due = monotonic() + left if with_store else inf
                began, cpu_began = perf_counter(), process_time()
                for prompt in batch:
                    llm.generate([prompt], WRITE)
                left = pace.due - monotonic() if with_store else left
                spent[with_store] = perf_counter() - began
                cpu[with_store] = process_time() - cpu_began
            if not number:  # the first round warms up
                calls.seconds = pace.busy_seconds = 0.0
                continue
            whole += spent[True]
            ratios.append(spent[True] / spent[False])
            cpu_ratios.append(cpu[True] / cpu[False])
    return {
        "cost_of_unknown_prompts": median(ratios) - 1,
        "interval_of_cost": [ratio - 1 for ratio in _interval(ratios)],
        "cpu_cost_of_unknown_prompts": median(cpu_ratios) - 1,
        "share_of_calls": calls.seconds / whole,
        "share_of_writing": pace.busy_seconds / whole,
        "ratios": ratios,
        "cpu_ratios": cpu_ratios,
    }


def _interval(values: Sequence[float]) -> tuple[float, float]:
    """The ends of an interval that has the median with a probability of 95 %, from their order."""
    ordered, num_out, tail = sorted(values), 0, 0.0
    while (tail := tail + comb(len(values), num_out) / 2 ** len(values)) <= 0.025:
        num_out += 1
    first = max(num_out - 1, 0)
    return ordered[first], ordered[-1 - first]


def _prompts(model: str, length: int, number: int) -> Iterator[list[int]]:
    """Yield prompts of so many tokens, each with a beginning of its own."""
    tokenizer = Tokenizer.load(resolve(model))
    ids: list[int] = []
    for text in (*load_prompts("gsm8k"), *load_prompts("humaneval")) * 20:
        ids += tokenizer.encode(text, add_special=False)
        if len(ids) >= length + 7 * number:
            break
    for index in range(number):
        yield ids[7 * index : 7 * index + length]
