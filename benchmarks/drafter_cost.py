"""What drafting alone costs for each K: the other half of every prediction of a speed-up.

    python benchmarks/drafter_cost.py [--output FILE] [--quick]

`propose` is a drafter's answer as the stages ask for it: it reads what the last round emitted and
drafts K tokens. Rounds keep 0 to K of them in turn, so that the text grows as it does in a run.
`bare` are the passes alone that a model drafter cannot do without: one over two rows, which reads
the last tokens, and K - 1 over one row, as native calls. The drafters are the embedded draft model
and the n-gram drafter, greedy, at context 256. All of them take turns; figures are medians. The
last line is one JSON object.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any

from common import (
    DRAFT,
    bare_pass,
    fill,
    kernel_names,
    medians,
    options_of,
    reported,
    take_turns,
)

from outrider import SamplingParams
from outrider.api.tokenizer import Tokenizer
from outrider.bench.workload import load_prompts
from outrider.core.budget import Budget
from outrider.core.protocols import Drafter, DraftRow
from outrider.core.rng import KeyedRng
from outrider.drafters.growth import DraftSampler
from outrider.drafters.model import ModelDrafter
from outrider.drafters.ngram import NgramDrafter
from outrider.models.decoder import Room
from outrider.models.llama import LlamaModel
from outrider.models.loading import LoadOptions, load_model, resolve

KS = (1, 2, 4, 8)
CONTEXT = 256
BARE_SEQ = -1


def main() -> None:
    options = options_of(__doc__).parse_args()
    repeats = 5 if options.quick else 60
    with reported("drafter_cost", options) as report:
        room = Room(num_slots=16 * 1024, max_logits=8)
        model = load_model(resolve(DRAFT), LoadOptions(room=room, device="cpu"))
        assert isinstance(model, LlamaModel)
        text = text_of_length(CONTEXT)
        report |= {"context": CONTEXT, "kernels": kernel_names(model.kernels)}
        report["cells"] = cells(model, text, repeats)


def cells(model: LlamaModel, text: Sequence[int], repeats: int) -> list[dict[str, Any]]:
    growing = {("model", k): Growing(model_drafter(model), text, k, seq_id=k) for k in KS}
    growing |= {("ngram", k): Growing(NgramDrafter(), text, k, seq_id=k) for k in KS}
    calls: dict[tuple[str, int], Callable[[], object]] = {
        key: one.propose for key, one in growing.items()
    }
    bare = bare_calls(model, len(text))
    calls |= {("bare", k): call for k, call in bare.items()}
    found = medians(take_turns(calls, repeats))
    result: list[dict[str, Any]] = []
    for (name, k), one in growing.items():
        cell: dict[str, Any] = {"drafter": name, "k": k}
        # Rounds of its own count: a turn also grows the text.
        cell["propose_us"] = round(1e6 * statistics.median(one.seconds), 1)
        if name == "model":
            cell["bare_us"] = round(1e6 * found["bare", k], 1)
        result.append(cell)
        told = ", ".join(f"{key} {value} us" for key, value in cell.items() if "us" in key)
        print(f"{name:6} K={k}: {told.replace('_us', '')}")
    return result


def text_of_length(num_tokens: int) -> list[int]:
    """The beginning of prompts, one after the other."""
    tokenizer = Tokenizer.load(resolve(DRAFT))
    ids: list[int] = []
    for prompt in load_prompts("humaneval"):
        ids += tokenizer.encode(prompt)
        if len(ids) >= num_tokens:
            break
    return ids[:num_tokens]


def model_drafter(model: LlamaModel) -> ModelDrafter:
    return ModelDrafter(model, DraftSampler(model.kernels.argmax, "the draft model"), chunk=256)


def bare_calls(model: LlamaModel, context: int) -> dict[int, Callable[[], object]]:
    """By K, the passes of a draft and their choices, on a sequence of their own."""
    fill(model, BARE_SEQ, context)
    two, one = (bare_pass(model, BARE_SEQ, rows) for rows in (2, 1))

    def drafted(k: int) -> Callable[[], object]:
        def run() -> None:
            two()
            for _ in range(k - 1):
                one()

        return run

    return {k: drafted(k) for k in KS}


class Growing:
    """A text that grows by what is kept of each draft and one more token."""

    def __init__(self, drafter: Drafter, text: Sequence[int], k: int, *, seq_id: int) -> None:
        self.seconds: list[float] = []
        self._drafter, self._tokens = drafter, list(text)
        self._k, self._seq_id, self._round = k, seq_id, 0
        drafter.open(seq_id, text)

    def propose(self) -> None:
        row = DraftRow(
            seq_id=self._seq_id,
            tokens=self._tokens,
            last=None,
            budget=Budget(self._k),
            params=SamplingParams(),
            noise=KeyedRng(0, 0, len(self._tokens)),
        )
        started = perf_counter()
        (draft,) = self._drafter.propose([row])
        if self._round:
            self.seconds.append(perf_counter() - started)
        kept = self._round % (self._k + 1)
        self._tokens += [*draft.tokens[:kept], self._tokens[self._round]]
        self._round += 1


if __name__ == "__main__":
    main()
