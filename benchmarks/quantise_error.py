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

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from common import NEEDS, TARGET, options_of, reported
from torch import Tensor

from outrider import LLM, EngineConfig, SamplingParams
from outrider.bench.workloads import load_prompts
from outrider.core.protocols import StepRow
from outrider.models.decoder import Decoder, Room
from outrider.models.loading import LoadOptions, load_model, resolve

FORMATS = ("float32", "bfloat16", "int8", "int4")
MOST_TOKENS, NUM_NEW, K = 120, 64, 4


def main() -> None:
    options = options_of(__doc__).parse_args()
    num_prompts = 2 if options.quick else 40
    with reported("quantise_error", options) as report:
        texts = [t for name in ("humaneval", "gsm8k") for t in load_prompts(name)[:num_prompts]]
        ids = prompt_ids(texts)
        wanted = [logits_of("float32", tokens) for tokens in ids]
        report |= {"num_prompts": len(ids), "num_tokens": sum(map(len, ids)), "k": K}
        report["formats"] = {name: row(name, ids, wanted, texts) for name in FORMATS}
        for name, found in report["formats"].items():
            print(f"{name:9}", "  ".join(f"{key} {value}" for key, value in found.items()))


def prompt_ids(texts: Sequence[str]) -> list[list[int]]:
    tokenizer = LLM(config=EngineConfig(drafter="none")).tokenizer
    return [tokenizer.encode(text)[:MOST_TOKENS] for text in texts]


def row(
    name: str, ids: Sequence[Sequence[int]], wanted: Sequence[Tensor], texts: Sequence[str]
) -> dict[str, Any]:
    got = [logits_of(name, tokens) for tokens in ids]
    got_NV, wanted_NV = torch.cat(got).double(), torch.cat(list(wanted)).double()
    error = float((got_NV - wanted_NV).norm() / (wanted_NV - wanted_NV.mean(-1, True)).norm())
    log_p_NV, log_q_NV = wanted_NV.log_softmax(-1), got_NV.log_softmax(-1)
    divergence = float((log_p_NV.exp() * (log_p_NV - log_q_NV)).sum(-1).mean())
    same = float((got_NV.argmax(-1) == wanted_NV.argmax(-1)).double().mean())
    return {
        "relative_error": round(error, 5),
        "mean_divergence_nats": round(divergence, 6),
        "same_first_choice": round(same, 4),
        "perplexity": round(perplexity(got, ids), 4),
        "acceptance": round(acceptance(name, texts), 4),
    }


def settings(name: str) -> dict[str, str]:
    """int8 and int4 are of the checkpoint's own bfloat16."""
    if name in ("int8", "int4"):
        return {"dtype": "auto", "quantise": name}
    return {"dtype": name, "quantise": "none"}


@functools.cache
def model_of(name: str) -> Decoder:
    room = Room(num_slots=MOST_TOKENS + 8, max_rows=MOST_TOKENS, max_logits=MOST_TOKENS)
    return load_model(resolve(TARGET), LoadOptions(room=room, device="cpu", **settings(name)))


def logits_of(name: str, tokens: Sequence[int]) -> Tensor:
    """Logits after every token, in one pass."""
    model = model_of(name)
    model.state.open(0, ())
    logits_NV = model.step([StepRow.chain(0, tokens)], NEEDS).logits_MV.clone()
    model.state.close(0)
    return logits_NV


def perplexity(logits: Sequence[Tensor], ids: Sequence[Sequence[int]]) -> float:
    total, count = 0.0, 0
    for logits_NV, tokens in zip(logits, ids, strict=True):
        log_NV = logits_NV[:-1].double().log_softmax(-1)
        total -= float(log_NV[torch.arange(len(tokens) - 1), torch.tensor(tokens[1:])].sum())
        count += len(tokens) - 1
    return math.exp(total / count)


def acceptance(name: str, texts: Sequence[str]) -> float:
    """The share of drafted tokens that was kept."""
    config = EngineConfig(k=K, profile=True, device="cpu", **settings(name))
    results = LLM(config=config).generate(texts, SamplingParams(max_tokens=NUM_NEW))
    rounds = [one for result in results for one in result.rounds]
    return sum(r.num_accepted for r in rounds) / sum(r.num_drafted for r in rounds)


if __name__ == "__main__":
    main()
