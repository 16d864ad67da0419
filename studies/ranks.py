"""What it costs to share a model among processes of one machine: `run.py ranks [--output FILE]`."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter

import torch
from common import QUICK_SHAPE, TARGET, Report, first_prompts, in_turns, note, study
from options import Options

from outrider import LLM, EngineConfig, SamplingParams
from outrider.models.loading import resolve
from outrider.plugins.measure.turns import ratio_of_medians
from outrider_lab.models.inflate import shape_called
from outrider_lab.models.inflate_files import write_inflated

SIDES = {
    "1 process of 1 thread": {"threads": 1},
    "1 process of 2 threads": {"threads": 2},
    "2 ranks of 1 thread": {"threads": 2, "tensor_parallel": 2},
}
RANKS = "2 ranks of 1 thread"
DRAFTERS = {"none": 0, "ngram": 8}


@study(repeats=7, tokens=32, prompts=2, shapes=["embedded", "0.4b", "1b"])
def ranks(options: Options, report: Report) -> None:
    """Do two ranks of one thread write as fast as one process of two, and as one of one?

    The embedded target and inflations of it, by name, in bfloat16; plain text, and with n-gram
    drafts. All sides are loaded at once and take turns over the same prompts, one request at a
    time. A cell has tokens a second of every side, of the median turn, and the ranks' ratio to the
    others.
    """
    repeats, num_tokens = (1, 8) if options.quick else (options.repeats, options.tokens)
    prompts = first_prompts(1)[: options.prompts]
    for name in options.shapes:
        with _folder(name, quick=options.quick) as folder:
            for drafter, k in DRAFTERS.items():
                params = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
                config = EngineConfig(drafter=drafter, k=k, dtype="bfloat16", context=1024)
                with ExitStack() as stack:
                    sides: dict[str, Callable[[], float]] = {}
                    for side, how in SIDES.items():
                        llm = LLM(str(folder), config=replace(config, **how))
                        stack.callback(llm.close)
                        sides[side] = _rate_of(llm, prompts, params)
                    found = in_turns(sides, repeats)
                note(
                    report,
                    model=name,
                    drafter=drafter,
                    tokens_per_second={
                        side: round(statistics.median(rates), 2) for side, rates in found.items()
                    },
                    ranks_over={
                        side: asdict(ratio_of_medians(found[RANKS], rates))
                        for side, rates in found.items()
                        if side != RANKS
                    },
                )
                print(report["cells"][-1]["tokens_per_second"], flush=True)


@contextmanager
def _folder(name: str, *, quick: bool) -> Generator[Path]:
    if name == "embedded":
        yield resolve(TARGET)
        return
    with TemporaryDirectory(prefix="outrider-ranks-model-") as folder:
        shape = QUICK_SHAPE if quick else shape_called(name)
        for _ in write_inflated(resolve(TARGET), shape, Path(folder), torch.bfloat16):
            pass
        yield Path(folder)


def _rate_of(llm: LLM, prompts: list[str], params: SamplingParams) -> Callable[[], float]:
    def turn() -> float:
        began = perf_counter()
        num = sum(len(llm.generate(prompt, params)[0].token_ids) for prompt in prompts)
        return num / (perf_counter() - began)

    return turn
