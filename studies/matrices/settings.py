"""What rows mean: the pair in each number format, features, arrangements of the work, drafters.

Of features and the pair: text, and log-probabilities where they are told, must be those of the same
request without speculation: greedily under every rule, and with a seed under the rules that tie
text to the seed (match and coupled). Under block and token a seeded text differs by design; that
its distribution does not is proved by enumeration (tests/distribution). A new drafter joins by its
line in the catalog of drafters; it takes part wherever it finds what it drafts from.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from matrices.matrix import Allowed, Cell, Factors, Matrix, Row
from torch import Tensor

from outrider.core.config import ROLLBACKS, EngineConfig
from outrider.core.params import SamplingParams
from outrider_lab.bench.studies.drafters_lineup import known

PAIR: Factors = {
    "dtype": ("float32", "bfloat16"),
    "drafter": ("model", "ngram"),
    "k": ("1", "2", "4", "8"),
    "batch_size": ("1", "3", "8"),
}
FEATURES: Factors = {
    "rule": (
        "block greedy",
        "token greedy",
        "match greedy",
        "coupled greedy",
        "match seeded",
        "coupled seeded",
    ),
    "drafter": ("model", "ngram", "prediction", "bridge"),
    "k": ("1", "2", "4", "8"),
    "batch_size": ("1", "3", "8"),
    "controller": ("fixed", "band", "slo"),
    "dtype": ("float32", "bfloat16"),
    "feature": (
        "none",
        "filters",
        "repetition",
        "penalties",
        "bias",
        "bad words",
        "min tokens",
        "several",
        "logprobs",
        "mask",
        "stop",
    ),
}
_SETTINGS: Mapping[str, Mapping[str, object]] = {
    "filters": {"top_k": 40, "top_p": 0.9, "min_p": 0.02},
    "repetition": {"repetition_penalty": 1.3},
    "penalties": {"frequency_penalty": 0.7, "presence_penalty": 0.5},
    "bias": {"logit_bias": {202: -4.0, 262: 2.0, 330: 1.5}},
    "bad words": {"bad_words": ("return", "self", "the")},
    "several": {"n": 2},
    "logprobs": {"logprobs": True, "top_logprobs": 3},
    "stop": {"stop": ("\n\n", "return")},
}


def pair(factors: Factors = PAIR) -> Matrix:
    """Of the embedded pair; texts may end by themselves."""
    return Matrix(
        factors=factors,
        config=lambda row: EngineConfig(
            dtype=row["dtype"],
            drafter=row["drafter"],
            k=int(row["k"]),
            batch_size=int(row["batch_size"]),
        ),
        plain=lambda row: EngineConfig(dtype=row["dtype"], drafter="none", batch_size=1),
        params=lambda _, max_tokens: SamplingParams(max_tokens=max_tokens),
    )


def features() -> Matrix:
    return Matrix(factors=FEATURES, config=_config, plain=_plain, params=_params, allowed=_allowed)


def _config(row: Row) -> EngineConfig:
    return EngineConfig(
        sampler=row["rule"].split()[0],
        drafter=row["drafter"],
        k=int(row["k"]),
        batch_size=int(row["batch_size"]),
        controller=row["controller"],
        dtype=row["dtype"],
    )


def _plain(row: Row) -> EngineConfig:
    """Greedy text is the same under all rules."""
    sampler, mode = row["rule"].split()
    sampler = sampler if mode == "seeded" else EngineConfig().sampler
    return EngineConfig(dtype=row["dtype"], sampler=sampler, drafter="none")


def _params(row: Row, max_tokens: int) -> SamplingParams:
    seeded = row["rule"].endswith("seeded")
    usual = SamplingParams(max_tokens=max_tokens, temperature=0.8 if seeded else 0.0, seed=17)
    if row["feature"] == "min tokens":
        return replace(usual, min_tokens=max_tokens // 2)
    return replace(usual, **_SETTINGS.get(row["feature"], {}))


def _allowed(row: Row, vocab_size: int) -> Allowed | None:
    """Three ids of four, which three depends on the text."""

    def allowed(text: Sequence[int]) -> Tensor:
        mask_V = torch.ones(vocab_size, dtype=torch.bool)
        mask_V[(len(text) + sum(text)) % 4 :: 4] = False
        return mask_V

    return allowed if row["feature"] == "mask" else None


ENGINES: Factors = {
    "schedule": ("single", "pd", "pdv", "ssd", "auto"),
    "executor": ("inline", "threads"),
    "batch_size": ("1", "2", "5", "16"),
    "drafter": ("none", "ngram", "model"),
    "k": ("0", "1", "4", "8"),
    "fallback": ("jit", "ngram", "none", "auto"),
    "force_hits": ("off", "0", "0.5", "1"),
    "prefill_chunk": ("3", "16", "256"),
    "memory": ("ample", "tight"),
}


def engines() -> Matrix:
    """Of every way to arrange the work: schedules, executors, batches, drafting ahead, memory."""
    return Matrix(factors=ENGINES, config=_engine_config, idle=_idle_engines)


def _memory(row: Row, tokens: int) -> dict[str, Any]:
    """Ample, or tight: room for the longest request, and more of them let in than fit. There
    requests are pre-empted, and read their text again."""
    if row["memory"] == "ample":
        return {"reserve": 1.0, "arena_tokens": 0, "page_size": 32}
    return {"reserve": 0.0, "arena_tokens": tokens, "page_size": 4}


def _engine_config(row: Row) -> EngineConfig:
    return EngineConfig(
        schedule=row["schedule"],
        concurrent_lanes=row["executor"] == "threads",
        batch_size=int(row["batch_size"]),
        drafter=row["drafter"],
        k=int(row["k"]),
        fallback=row["fallback"],
        force_hits=-1.0 if row["force_hits"] == "off" else float(row["force_hits"]),
        prefill_chunk=int(row["prefill_chunk"]),
        context=160 if row["memory"] == "tight" else 0,
        **_memory(row, 160),
    )


def _idle_engines(row: Row) -> Collection[str]:
    idle: list[str] = []
    if row["drafter"] == "none" or row["k"] == "0":
        idle += ["drafter", "k", "fallback", "force_hits"]
    elif row["schedule"] != "ssd" or row["drafter"] != "model":
        idle += ["fallback", "force_hits"]
    return [*idle, "executor"] if row["schedule"] in ("single", "auto") else idle


def acceptance_by_draft(cells: Sequence[Cell]) -> dict[str, set[tuple[int, int]]]:
    """(accepted, drafted) by drafter and k, of rows that draft on the same terms: in ample memory,
    and where every draft is the drafter's own. One entry each says that acceptance is a property
    of the pair, whatever the schedule and batch."""
    found: dict[str, set[tuple[int, int]]] = {}
    for cell in cells:
        row = cell.row
        own = row["schedule"] != "ssd" or row["fallback"] == "jit"
        # With `auto` a controller may draft less, as time goes.
        if row["memory"] == "ample" and row["schedule"] != "auto" and own:
            name = f"{row['drafter']} k={row['k']}"
            found.setdefault(name, set()).add((cell.num_accepted, cell.num_drafted))
    return found


SHAPES = ("chain", "tree")
_TREE_NODES = 12
# Room for the longest prompt of a check; tight memory holds one such text and little more.
_CONTEXT = 112


def drafters(
    name: str, target: str, drafts: Mapping[str, str | None], *, recurrent: bool = False
) -> Matrix:
    """Of `target`, called `name`, with the drafters of `drafts`. Recurrent targets have state to
    roll back in one of two ways."""
    return Matrix(
        factors={
            "ground": (name,),
            "drafter": tuple(drafts),
            "shape": SHAPES,
            "rollback": ROLLBACKS if recurrent else ROLLBACKS[:1],
            "k": ("1", "4"),
            "batch_size": ("1", "3", "8"),
            "prefill_chunk": ("3", "16", "256"),
            "memory": ("ample", "tight"),
        },
        config=_drafter_config,
        plain=lambda _: EngineConfig(drafter="none", batch_size=1, context=_CONTEXT),
        possible=_possible,
        target=target,
        drafts=drafts,
    )


def _drafter_config(row: Row) -> EngineConfig:
    return EngineConfig(
        drafter=row["drafter"],
        k=int(row["k"]),
        tree_nodes=_TREE_NODES if row["shape"] == "tree" else 0,
        batch_size=int(row["batch_size"]),
        prefill_chunk=int(row["prefill_chunk"]),
        context=_CONTEXT,
        **_memory(row, _CONTEXT),
        state_rollback=row["rollback"],
        profile=True,
    )


def _possible(row: Row) -> Row:
    """What cannot branch drafts chains."""
    return row if known(row["drafter"]).branches else {**row, "shape": SHAPES[0]}
