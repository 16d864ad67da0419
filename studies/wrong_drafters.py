"""Drafters that do not pay: one that is never right, and one that is right for a while.

The first is an untrained block drafter (DFlash) of the right shape with random weights. The second
is a plugin of this process, a portfolio of look-ups and of a member that knows the text: it drafts
the first half of each text as it will be, and other tokens after that.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter

import torch
from common import target_of
from safetensors.torch import save_file  # pyright: ignore[reportUnknownVariableType]
from torch import Tensor

from outrider import LLM, EngineConfig
from outrider.control.leads import Leads
from outrider.core.draft import Draft
from outrider.core.plugins import KINDS, DrafterKind
from outrider.core.protocols import DraftNeeds, DraftRow
from outrider.drafters import ngram, suffix
from outrider.drafters.common.context import BuildContext
from outrider.drafters.portfolio import PortfolioDrafter, lookup_members
from outrider_lab.models.inflate_files import llama_json

NEVER, FOR_A_WHILE = "never-right", "right-for-a-while"
# Layers and rows of the untrained block drafter.
NUM_LAYERS, BLOCK = 2, 8
# A draft of the member that is right for a while takes so much of plain decoding's pass.
SHARE = 0.2


def write_untrained(llm: LLM, folder: Path) -> Path:
    """Write an untrained block drafter for the target of `llm`, with random weights."""
    config = target_of(llm).config
    size, head = config.hidden_size, config.head_dim
    read = sorted({0, config.num_layers // 2, config.num_layers - 1})
    dice = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return (0.02 * torch.randn(shape, generator=dice)).bfloat16()

    tensors = {"fc.weight": drawn(size, len(read) * size)}
    tensors |= {f"{name}.weight": torch.ones(size).bfloat16() for name in ("hidden_norm", "norm")}
    for layer in range(NUM_LAYERS):
        shapes = {
            "self_attn.q_proj": (config.num_heads * head, size),
            "self_attn.k_proj": (config.num_kv_heads * head, size),
            "self_attn.v_proj": (config.num_kv_heads * head, size),
            "self_attn.o_proj": (size, config.num_heads * head),
            "mlp.gate_proj": (config.ffn_size, size),
            "mlp.up_proj": (config.ffn_size, size),
            "mlp.down_proj": (size, config.ffn_size),
        }
        norms = {
            "input_layernorm": size,
            "post_attention_layernorm": size,
            "self_attn.q_norm": head,
            "self_attn.k_norm": head,
        }
        for name, shape in shapes.items():
            tensors[f"layers.{layer}.{name}.weight"] = drawn(*shape)
        for name, length in norms.items():
            tensors[f"layers.{layer}.{name}.weight"] = torch.ones(length).bfloat16()
    values = {
        **llama_json(config, torch.bfloat16),
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "head_dim": head,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "rope_theta": config.rope.theta,
        "num_hidden_layers": NUM_LAYERS,
        "layer_types": ["full_attention"] * NUM_LAYERS,
        "num_target_layers": config.num_layers,
        "block_size": BLOCK,
        "dflash_config": {"mask_token_id": config.vocab_size - 1, "target_layer_ids": read},
    }
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(values))
    return folder


@dataclass(slots=True)
class RightForAWhile:
    """A member that drafts the tokens of known texts, by their prompts. Those of the second half of
    a text are replaced by others. A draft takes `seconds`."""

    texts: dict[tuple[int, ...], Sequence[int]] = field(
        default_factory=dict[tuple[int, ...], Sequence[int]]
    )
    seconds: float = 0.0
    name: str = "foresight"
    needs: DraftNeeds = field(default_factory=DraftNeeds)
    _open: dict[int, tuple[int, list[int]]] = field(
        default_factory=dict[int, tuple[int, list[int]]]
    )

    def know(self, texts: Mapping[tuple[int, ...], Sequence[int]], seconds: float) -> None:
        """Replace the known texts; plain decoding took so many `seconds` for a pass of theirs."""
        self.texts, self.seconds = dict(texts), SHARE * seconds

    def open(self, seq_id: int, prompt: Sequence[int]) -> None:
        text = self.texts.get(tuple(prompt), ())
        half = len(text) // 2
        self._open[seq_id] = len(prompt), [*text[:half], *(token ^ 1 for token in text[half:])]

    def propose(self, rows: Sequence[DraftRow]) -> list[Draft]:
        until = perf_counter() + self.seconds
        while perf_counter() < until:
            pass
        return [self._draft(row) for row in rows]

    def close(self, seq_id: int) -> None:
        del self._open[seq_id]

    def _draft(self, row: DraftRow) -> Draft:
        length, text = self._open[row.seq_id]
        start = len(row.tokens) - length
        found = text[start : start + row.budget.depth]
        return Draft.chain(found) if found else Draft.empty()


def add_right_for_a_while(k: int) -> tuple[RightForAWhile, EngineConfig]:
    """Add the drafter of this name to the process; return its member, and settings that use it."""
    member = RightForAWhile()

    def build(context: BuildContext) -> PortfolioDrafter:
        members = lookup_members(suffix.build(context), ngram.build(context))
        drafter = PortfolioDrafter(
            members, member, leads=Leads([member.name], k=context.resolved.k), branches=False
        )
        drafter.name = FOR_A_WHILE
        return drafter

    KINDS.add(DrafterKind(name=FOR_A_WHILE, build=build, scores=True))
    return member, EngineConfig(drafter=FOR_A_WHILE, k=k, controller="goodput")
