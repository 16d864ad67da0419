"""Targets with something to draft from for every drafter that can ride with them.

The dense one is the embedded target with its draft model and heads of noise, unless trained ones
come with it. The hybrid one is noise itself, and its draft model is nearly its twin, so that parts
of drafts are kept; both read with the embedded tokenizer.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from matrices.matrix import Matrix
from matrices.settings import drafters

import outrider.pairs as pairs
from doubles.eagle_heads import EagleFolder
from doubles.head_files import block_tensors, medusa_tensors, write_block, write_medusa
from doubles.tiny_checkpoints import save_tensors
from doubles.tiny_hybrids import hybrid_config, write_hybrid
from doubles.tiny_mtp import block_like, mtp_tensors, write_mtp
from outrider.core.spec import ModelSpec
from outrider.models.configs import LlamaConfig
from outrider.models.families import read_config
from outrider.models.heads import find_heads
from outrider.models.weights import Weights
from outrider.plugins.heads.medusa import MedusaConfig
from outrider_lab.bench.studies.drafters_lineup import available, known
from outrider_lab.models.block_net import BlockConfig

TARGET, DRAFT = "outrider/embedded", "outrider/embedded-draft"
TINY = Path(pairs.__path__[0]) / "tiny"
# Only a decoder of the Llama family drafts for itself.
_DENSE_ONLY = ("quantised-self", "layer-skip")
# How far the hybrid's draft model is from it, as a share of a weight.
_NOISE = 0.02


def dense_ground(folder: Path) -> Matrix:
    """Writes heads into `folder`."""
    target = TINY / "target"
    heads = write_heads(folder, target)
    heads |= {kind: str(path) for kind, path in find_heads(target).items()}
    drafts: dict[str, str | None] = {}
    for name in _drafting(heads):
        source = known(name).source
        drafts[name] = DRAFT if source in ("model", "draft") else heads.get(name)
    return drafters("dense", TARGET, drafts)


def hybrid_ground(folder: Path, name: str = "qwen3_5", called: str = "hybrid") -> Matrix:
    """Writes target, draft model and heads into `folder`."""
    target, draft = folder / called, folder / f"{called}-draft"
    write_hybrid(target, hybrid_config(name, vocab_size=8192))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY / "target" / name, target)
    shutil.copytree(target, draft)
    _disturb(draft / "model.safetensors")
    heads = write_heads(folder / f"{called}-heads", target)
    drafts: dict[str, str | None] = {}
    for kind in _drafting(heads):
        source = known(kind).source
        if kind not in _DENSE_ONLY:
            drafts[kind] = str(draft) if source in ("model", "draft") else heads.get(kind)
    return drafters(called, str(target), drafts, recurrent=True)


def write_heads(folder: Path, target: Path) -> dict[str, str | None]:
    """Heads of noise of every kind for the model in `target`, by the drafter that reads them."""
    spec = read_config(target).spec("target", bytes_per_weight=2, bytes_per_kv=2)
    last = (spec.num_layers,)
    block = BlockConfig(
        num_places=4, num_context=6, num_layers=1, num_heads=4, ffn_size=64, hidden_layers=last
    )
    medusa, mtp = MedusaConfig(num_heads=4), block_like(_sizes(spec))
    eagle = EagleFolder(spec.hidden_size, spec.vocab_size, fused=False)
    written = {
        "eagle": eagle.write(folder / "eagle"),
        "medusa": write_medusa(folder / "medusa", medusa, spec, medusa_tensors(medusa, spec)),
        "block": write_block(folder / "block", block, spec, block_tensors(block, spec)),
        "mtp": write_mtp(folder / "mtp", mtp, mtp_tensors(mtp)),
    }
    return {name: str(path) for name, path in written.items()}


def _drafting(heads: Mapping[str, str | None]) -> list[str]:
    """Drafters with something to draft from. Those of published blocks and paths have files of
    their own (doubles/published_drafters.py)."""
    return [name for name in available() if known(name).source != "heads" or name in heads]


def _sizes(spec: ModelSpec) -> LlamaConfig:
    """What an MTP block must agree with; the rest is not looked at."""
    return LlamaConfig(
        family="llama",
        vocab_size=spec.vocab_size,
        hidden_size=spec.hidden_size,
        ffn_size=spec.ffn_size,
        num_layers=spec.num_layers,
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        max_tokens=spec.max_tokens,
    )


def _disturb(path: Path) -> None:
    rng = torch.Generator().manual_seed(1)
    with Weights.at(path.parent) as weights:
        tensors = {
            name: tensor * (1 + _NOISE * torch.randn(tensor.shape, generator=rng))
            for name, tensor in weights.each()
        }
    save_tensors(path, tensors)
