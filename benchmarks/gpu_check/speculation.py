"""Speculation: tokens a second achieved, against what its parts predict.

Tier B is the embedded target at the cost of a bigger shape: real text, real acceptance. Tier C is
the true shape with random weights and a coin for each drafted token. In both the draft model is the
embedded one. Predicted is E / (T_draft + T_verify + T_rest): E the mean of emitted tokens a round,
T_draft and T_verify those passes captured and timed alone before, T_rest what a captured round of
the small pair takes beyond its own passes.
"""

from __future__ import annotations

from typing import Any

import torch
from gpu_check import models
from gpu_check.rounds import Bench, captured_pass, read, text
from gpu_check.setting import Setting, check, seconds_of
from gpu_check.texts import PROMPTS
from torch import Tensor

from outrider.api.profile import synced_seconds
from outrider.api.tokenizer import Tokenizer
from outrider.core.params import SamplingParams
from outrider.engine.cuda_graph.sampling import GreedyLaws, Judged, Rows
from outrider.models.llama import LlamaModel
from outrider.models.loading import resolve
from outrider.verify.batched import kept_prefix

ALPHA, LEAST = 0.8, 0.95


def speculation(setting: Setting, record: dict[str, Any]) -> None:
    tokenizer = Tokenizer.load(resolve(models.TARGET))
    prompts = [tokenizer.encode(prompt) for prompt in PROMPTS[: 1 if setting.quick else 4]]
    most = 6 if setting.quick else 128
    depths = (2,) if setting.quick else (4, 8)
    room = models.room_for(1, 512, rows=160, logits=16)
    draft = models.embedded(models.DRAFT, setting, room)
    record["cells"] = []
    rests = {k: _rest_seconds(setting, draft, k) for k in depths}
    for name, shape in setting.shapes.items():
        for tier in ("B", "C"):
            if tier == "B":
                target = models.inflated(shape, setting, room)
            else:
                target = models.random_model(shape, setting, room, vocab_size=draft.spec.vocab_size)
            plain = _run(setting, Bench(setting, target, None, k=0, batch=1), prompts, most)
            for k in depths:
                bench = Bench(setting, target, draft, k=k, batch=1)
                if tier == "C":
                    bench.make_laws = lambda _: CoinLaws(ALPHA)
                parts = _parts(setting, bench, rests[k])
                cell = _run(setting, bench, prompts, most)
                predicted = cell["tokens_per_round"] / (1e-3 * parts["round_ms"])
                cell |= parts | {
                    "shape": name,
                    "tier": tier,
                    "k": k,
                    "predicted_tokens_per_second": predicted,
                    "achieved_of_predicted": cell["tokens_per_second"] / predicted,
                    "speed_up": cell["tokens_per_second"] / plain["tokens_per_second"],
                }
                record["cells"].append(cell)
                if setting.on_cuda:
                    share = cell["achieved_of_predicted"]
                    check(
                        record,
                        f"tier {tier} {name} at K={k} achieves {LEAST} of what is predicted",
                        passed=share >= LEAST,
                        detail=f"{share:.3f}",
                    )
            del target, bench
            models.let_go()


def _run(setting: Setting, bench: Bench, prompts: list[list[int]], most: int) -> dict[str, Any]:
    """All prompts one after the other, by the engine. Rates are those of rounds: from one read by
    the host to the next, or from a launch where nothing was in flight."""
    params = SamplingParams(max_tokens=most)
    bench.traces.clear()
    wanted = [(prompt, params) for prompt in prompts]
    started = synced_seconds(setting.device)
    texts = bench.run(wanted)
    seconds = synced_seconds(setting.device) - started
    rounds = [trace for trace in bench.traces if trace.num_emitted]
    emitted = sum(trace.num_emitted for trace in rounds)
    drafted = sum(trace.num_drafted for trace in rounds)
    in_rounds = sum(trace.verify_seconds for trace in rounds)
    return {
        "tokens": sum(map(len, texts)),
        "wall_seconds": seconds,
        "tokens_per_second": emitted / in_rounds,
        "tokens_per_round": emitted / len(rounds),
        "acceptance": sum(trace.num_accepted for trace in rounds) / drafted if drafted else None,
    }


def _parts(setting: Setting, bench: Bench, rest: float) -> dict[str, float]:
    """Milliseconds of a round's parts, each captured and timed alone."""
    assert bench.draft is not None
    verify = _pass_seconds(setting, bench.target, bench.k + 1)
    first = _pass_seconds(setting, bench.draft, 2)
    step = _pass_seconds(setting, bench.draft, 1)
    drafting = first + (bench.k - 1) * step
    parts = {"draft": drafting, "verify": verify, "rest": rest, "round": drafting + verify + rest}
    return {f"{name}_ms": 1e3 * seconds for name, seconds in parts.items()}


def _pass_seconds(setting: Setting, model: LlamaModel, rows: int) -> float:
    context = 32 if setting.quick else 96
    read(model, 0, text(context, model.spec.vocab_size))
    work = captured_pass(model, setting, rows=rows, context=context)
    seconds = seconds_of(work, setting, calls=1 if setting.quick else 8)
    model.state.close(0)
    return seconds


def _rest_seconds(setting: Setting, draft: LlamaModel, k: int) -> float:
    """A captured round of the draft model with itself as the target, but for its passes."""
    room = models.room_for(1, 512, rows=160, logits=16)
    target = models.embedded(models.DRAFT, setting, room)
    bench = Bench(setting, target, draft, k=k, batch=1)
    rounds = bench.launches([text(32, draft.spec.vocab_size)], SamplingParams(max_tokens=400))
    rounds.stand_still()
    whole = seconds_of(rounds.launch, setting, calls=setting.rounds)
    rounds.close()
    passes = _pass_seconds(setting, draft, 2) + (k - 1) * _pass_seconds(setting, draft, 1)
    return max(whole - passes - _pass_seconds(setting, target, k + 1), 0.0)


class CoinLaws(GreedyLaws):
    """Greedy, but a drafted token is kept by a coin: acceptance of a given rate, of any model."""

    def __init__(self, alpha: float) -> None:
        super().__init__()
        self._alpha = alpha

    def judge(self, logits_BWV: Tensor, tokens_BK: Tensor, rows: Rows) -> Judged:
        judged = super().judge(logits_BWV, tokens_BK, rows)
        place_BK = torch.ones_like(tokens_BK).cumsum(-1)
        # A number of the text's length, as even as a table of random ones.
        spot_BK = (rows.keys.start_B[:, None] * 0.6180339887 + place_BK * 0.7548776662) % 1.0
        kept_B = kept_prefix(spot_BK < self._alpha, rows.depth_B)
        return Judged(kept_B, judged.next_B, judged.broken_B)
