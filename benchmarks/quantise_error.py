"""What quantised weights change in the embedded target: logits, perplexity, acceptance.

    python benchmarks/quantise_error.py [--output FILE] [--quick]

Every format reads the same prompts (the beginnings of HumanEval and GSM8K). Against the checkpoint
in float32 it is told how far logits are off, relative to their spread; the mean divergence of the
laws in nats; how often the first choice is the same. Perplexity is that of the prompts themselves,
from their second token on. Acceptance is that of the embedded draft, greedy, K = 4: speculation is
exact with respect to the quantised target, so all that its error can cost is this. The last line is
one JSON object.

Shapes:  N = tokens, V = vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from common import TARGET, options_of, reported
from torch import Tensor

from outrider import LLM, EngineConfig, SamplingParams
from outrider.bench.quality.measure import (
    QUANTISED,
    FormatRow,
    Judge,
    Window,
    compare_formats,
    load_judge,
)
from outrider.bench.workload import load_prompts

FORMATS = ("float32", "bfloat16", "int8", "int4")
MOST_TOKENS, NUM_NEW, K = 120, 64, 4


def main() -> None:
    options = options_of(__doc__).parse_args()
    num_prompts = 2 if options.quick else 40
    with reported("quantise_error", options) as report:
        texts = [t for name in ("humaneval", "gsm8k") for t in load_prompts(name)[:num_prompts]]
        judges = {name: load_judge(TARGET, name, "cpu") for name in FORMATS}
        encode = judges[FORMATS[0]].tokenizer.encode
        windows = [tuple(encode(text)[:MOST_TOKENS]) for text in texts]
        report |= {"num_prompts": len(windows), "num_tokens": sum(map(len, windows)), "k": K}
        report["formats"] = {
            row.form: figures(
                row, relative_error(judges, row, windows), acceptance(row.form, texts)
            )
            for row in compare_formats(judges.__getitem__, FORMATS, windows)
        }
        for name, found in report["formats"].items():
            print(f"{name:9}", "  ".join(f"{key} {value}" for key, value in found.items()))


def figures(row: FormatRow, error: float, kept: float) -> dict[str, Any]:
    """What the reference has none of is what it has against itself."""
    same = 1.0 if row.same_first_choice is None else row.same_first_choice
    return {
        "relative_error": round(error, 5),
        "mean_divergence_nats": round(row.divergence_nats or 0.0, 6),
        "same_first_choice": round(same, 4),
        "perplexity": None if row.perplexity is None else round(row.perplexity, 4),
        "acceptance": round(kept, 4),
    }


def relative_error(judges: Mapping[str, Judge], row: FormatRow, windows: Sequence[Window]) -> float:
    """How far logits of a format are from those of its reference, relative to their spread."""
    got_NV, wanted_NV = (logits_of(judges[name], windows) for name in (row.form, row.reference))
    return float((got_NV - wanted_NV).norm() / (wanted_NV - wanted_NV.mean(-1, True)).norm())


def logits_of(judge: Judge, windows: Sequence[Window]) -> Tensor:
    """Logits after every token of every window, in float64."""
    return torch.cat([judge.forward(ids, use_cache=False)[0][0].double() for ids in windows])


def acceptance(name: str, texts: Sequence[str]) -> float:
    """The share of drafted tokens that was kept; formats mean what they do in load_judge."""
    dtype, quantise = ("auto", name) if name in QUANTISED else (name, "none")
    config = EngineConfig(k=K, profile=True, device="cpu", dtype=dtype, quantise=quantise)
    results = LLM(config=config).generate(texts, SamplingParams(max_tokens=NUM_NEW))
    rounds = [one for result in results for one in result.rounds]
    return sum(r.num_accepted for r in rounds) / sum(r.num_drafted for r in rounds)


if __name__ == "__main__":
    main()
