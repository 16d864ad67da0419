"""Tiny models of every architecture: logits and greedy texts against llama.cpp, drafters, keys."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

import torch
from conformance.client import PeerClient, PeerError
from conformance.counts import Suite
from conformance.files import copy
from torch import Tensor

from outrider import LLM, EngineConfig, SamplingParams
from outrider.core.errors import OutriderError
from outrider.models.decoder import LoadOptions, ModelCapacity
from outrider.models.loading import load_model
from parity.feeding import feed, greedy

_OPTIONS = LoadOptions(
    capacity=ModelCapacity(num_slots=512, page_size=16), dtype="float32", device="cpu"
)
# Log-probabilities of float32 sums in another order; llama.cpp's own kernels differ by as much.
_CLOSE = 1e-3
_NUM_TOKENS = 40
_PROMPT = [7, 9, 7, 9, 11, 7, 9, 7, 9, 11, 7, 9, 7]
_DRAFTERS = [
    "ngram",
    "suffix",
    "recycling",
    "prediction",
    "lookup",
    "portfolio",
    "quantised-self",
    "layer-skip",
    "model",
    "auto",
]
# Keys that some version of llama.cpp reads for some architecture, with values that are not neutral.
_ADDED: Mapping[str, Any] = {
    "attention.sliding_window": 4,
    "attention.sliding_window_pattern": [True, False],
    "attention.scale": 0.25,
    "attention.causal": False,
    "attention.clamp_kqv": 0.5,
    "attention.max_alibi_bias": 8.0,
    "attention.layer_norm_rms_epsilon": 0.1,
    "attention.temperature_scale": 0.5,
    "attn_logit_softcapping": 0.5,
    "final_logit_softcapping": 0.5,
    "logit_scale": 0.25,
    "residual_scale": 0.25,
    "embedding_scale": 2.0,
    "rope.freq_base": 100.0,
    "rope.freq_base_swa": 100.0,
    "rope.scale_linear": 4.0,
    "rope.scaling.factor": 4.0,
    "rope.scaling.type": "linear",
    "rope.scaling.attn_factor": 2.0,
    "rope.scaling.yarn_log_multiplier": 0.5,
    "rope.dimension_count": 16,
    "rope.dimension_sections": [24, 20, 20, 0],
    "expert_weights_scale": 2.0,
    "expert_weights_norm": True,
    "expert_gating_func": 2,
    "interleave_moe_layer_step": 2,
    "use_parallel_residual": True,
    "swiglu_clamp_exp": [0.5, 0.5],
    "nextn_predict_layers": 1,
}  # fmt: skip


def suites(peer: PeerClient, gguf: Any, folder: Path) -> Iterator[Suite]:
    """`folder` has the files of `test-llama-archs`."""
    logits, texts = Suite("tiny models: logits"), Suite("tiny models: 40 greedy tokens")
    drafted, keys = Suite("tiny models: drafters"), Suite("tiny models: one key more")
    for path in sorted(folder.glob("*.gguf")):
        clean = copy(gguf, path, peer.scratch / path.name)
        try:
            model: Any = load_model(clean, _OPTIONS)
        except OutriderError as error:
            logits.refuse(path.stem, str(error).replace(str(peer.scratch), "")[:120])
            clean.unlink()
            continue
        if not peer.open(clean, vocabulary=False):
            logits.refuse(path.stem, "llama.cpp does not read the cleaned file")
            continue
        rng = Random(path.stem)
        ids = [rng.randrange(96) for _ in range(47)]
        theirs, ours = rows_of(peer, ids), log_rows(feed(model, ids, [len(ids)]))
        for at, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
            gap = float((mine - other).abs().max())
            logits.count(path.stem, gap < _CLOSE, f"position {at}: {gap:.5f}")
        plain = greedy(model, _PROMPT, _NUM_TOKENS)
        for at, (mine, gap) in enumerate(_continued(peer, plain)):
            texts.count(path.stem, mine, f"token {at}", None if gap > _CLOSE else "a near-tie")
        _drafters(drafted, path.stem, clean)
        _keys(keys, peer, gguf, clean, ids, theirs)
        clean.unlink()
    yield from (logits, texts, drafted, keys)


def log_rows(logits: Tensor) -> Tensor:
    return torch.log_softmax(logits.float(), dim=-1)


def rows_of(peer: PeerClient, ids: Sequence[int]) -> Tensor:
    return log_rows(torch.tensor(peer.logits(ids)))


def _continued(peer: PeerClient, written: Sequence[int]) -> Iterator[tuple[bool, float]]:
    """Whether each token is llama.cpp's own behind the same text, and the gap to it."""
    rows = rows_of(peer, [*_PROMPT, *written])[len(_PROMPT) - 1 : -1]
    for token, row in zip(written, rows, strict=True):
        yield int(row.argmax()) == token, float(row.max() - row[token])


def _drafters(suite: Suite, label: str, path: Path) -> None:
    """Greedy texts with each drafter against the text without one."""
    params = SamplingParams(max_tokens=_NUM_TOKENS, temperature=0.0, ignore_eos=True)

    def written(drafter: str) -> tuple[int, ...]:
        draft = path if drafter == "model" else None
        config = EngineConfig(dtype="float32", device="cpu", drafter=drafter, threads=1)
        with LLM(path, draft=draft, config=config) as llm:
            return tuple(llm.generate([_PROMPT], params)[0].token_ids)

    plain = written("none")
    for drafter in _DRAFTERS:
        try:
            suite.count(f"{label}, {drafter}", written(drafter) == plain, "another text")
        except OutriderError as error:
            suite.refuse(f"{label}, {drafter}", str(error)[:120])


def _keys(
    suite: Suite, peer: PeerClient, gguf: Any, clean: Path, ids: Sequence[int], before: Tensor
) -> None:
    """A key that moves llama.cpp's logits must move ours alike, or be refused."""
    for key, value in _ADDED.items():
        label = f"{clean.stem}, {key}"
        path = copy(gguf, clean, peer.scratch / "key.gguf", {key: value}, whole=True)
        try:
            model: Any = load_model(path, _OPTIONS)
        except OutriderError as error:
            suite.refuse(label, str(error).replace(str(path), "FILE")[:120])
            continue
        try:
            if not peer.open(path, vocabulary=False):
                suite.count(label, True, "", "read here, refused by llama.cpp")
                continue
            theirs = rows_of(peer, ids)
        except PeerError:
            suite.count(label, True, "")
            continue
        ours = log_rows(feed(model, ids, [len(ids)]))
        gap, moved = float((ours - theirs).abs().max()), float((theirs - before).abs().max())
        reason = "keys: the file's are applied, llama.cpp leaves them out" if moved == 0 else None
        shown = f"{gap:.5f} from llama.cpp, moved by {moved:.5f}"
        suite.count(label, gap < _CLOSE, shown, reason)
