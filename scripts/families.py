"""Writes the table of architectures in docs/models.md: `scripts/families`.

For each of the most used ones a tiny random checkpoint is made by transformers, loaded and run. The
row says what ran it, and what is lost: what the loader tells the user, or refuses. Native
architectures are in sentences above the table. Logits that are
not those of transformers are an error. `--check` only compares, and exits with 1 if the page is out
of date.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from tempfile import TemporaryDirectory
from textwrap import fill
from typing import Any, NamedTuple

import torch

from doubles.hf_checkpoints import random_hf
from doubles.tiny_families import WRAPPERS, write_wrapper
from doubles.tiny_mixers import MIXERS
from outrider.core.errors import CheckpointError
from outrider.models.decoder import LoadOptions, ModelCapacity
from outrider.models.families import FAMILIES
from outrider.models.gguf.architectures import architectures
from outrider.models.loading import load_model
from outrider.plugins.transformers.model import AdapterModel
from parity.feeding import feed

PAGE = Path(__file__).resolve().parent.parent / "docs" / "models.md"
BEGIN = "<!-- Written by scripts/families; do not edit. -->"
END = "<!-- End of the table. -->"
TEXT = [(7 * i * i + 3 * i) % 96 for i in range(24)]
OPTIONS = LoadOptions(
    capacity=ModelCapacity(num_slots=512, page_size=16), dtype="float32", device="cpu"
)

_MIXTURE = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20}
_ROUTED = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}
_LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
    "num_key_value_heads": 4,
}
_DELTA = {
    "head_dim": 16,
    "num_hidden_layers": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
_LOCAL = {"num_local_experts": 4, "head_dim": 12}
# The published inputs of layers have 262,144 rows.
_PER_LAYER = {
    "head_dim": 12,
    "num_hidden_layers": 6,
    "sliding_window": 8,
    "global_head_dim": 20,
    "num_kv_shared_layers": 0,
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": 131,
}
_CHOSEN = {"num_experts": 6, "top_k_experts": 2, "moe_intermediate_size": 20}


def _mixer(name: str) -> Mapping[str, Any]:
    # Configs of transformers write into the settings that they are made of.
    return deepcopy({key: value for key, value in MIXERS[name].items() if key != "model_type"})


# Names that people know, model types, and settings beside the common ones; None is a wrapper of
# tests/doubles/tiny_families.py.
ARCHITECTURES: tuple[tuple[str, str, Mapping[str, Any] | None], ...] = (
    ("Llama 2 and 3, SmolLM2", "llama", {}),
    ("Qwen3", "qwen3", {"head_dim": 12}),
    ("Qwen2, Qwen2.5", "qwen2", {}),
    ("Qwen3 mixtures (30B-A3B)", "qwen3_moe", {**_MIXTURE, "head_dim": 12}),
    ("Gemma 3 with pictures", "gemma3", None),
    ("Gemma 3 (270M, 1B)", "gemma3_text", {"head_dim": 12, "sliding_window": 8}),
    ("gpt-oss", "gpt_oss", {**_LOCAL, "num_experts_per_tok": 2, "sliding_window": 8}),
    ("Mistral", "mistral", {"sliding_window": 8}),
    ("Mistral Small", "mistral3", None),
    ("Mistral Small 4", "mistral4", None),
    ("Muse Glimmer", "muse_glimmer", None),
    ("HunyuanOCR", "hunyuan_vl", None),
    ("PaddleOCR-VL", "paddleocr_vl", None),
    ("Ministral", "ministral", {"head_dim": 12, "sliding_window": 8}),
    ("Qwen3.5", "qwen3_5_text", _DELTA),
    ("Qwen3-Next", "qwen3_next", {**_DELTA, **_MIXTURE, "shared_expert_intermediate_size": 20}),
    ("Phi-3, Phi-3.5, Phi-4, Phi-4-mini", "phi3", {}),
    ("Gemma 2", "gemma2", {"head_dim": 12, "sliding_window": 8}),
    ("Gemma", "gemma", {"head_dim": 12}),
    ("Qwen3-VL", "qwen3_vl", None),
    ("Qwen2.5-VL", "qwen2_5_vl", None),
    ("DeepSeek V3, R1", "deepseek_v3", {**_ROUTED, **_LATENT, "n_group": 2, "topk_group": 1}),
    ("DeepSeek V2", "deepseek_v2", {**_ROUTED, **_LATENT, "norm_topk_prob": False}),
    ("GLM-4.7-Flash", "glm4_moe_lite", {**_ROUTED, **_LATENT}),
    ("Youtu-LLM", "youtu", _LATENT),
    ("Gemma 4 (E2B, E4B)", "gemma4_text", _PER_LAYER),
    ("Gemma 4 (12B)", "gemma4_unified_text", {"head_dim": 12, "global_head_dim": 20}),
    (
        "Gemma 4 mixtures (26B-A4B)",
        "gemma4_text",
        {**_PER_LAYER, "hidden_size_per_layer_input": 0, "enable_moe_block": True, **_CHOSEN},
    ),
    ("Gemma 4 with pictures", "gemma4", None),
    (
        "Llama 4",
        "llama4_text",
        {**_LOCAL, "num_experts_per_tok": 1, "intermediate_size_mlp": 52},
    ),
    ("GLM-4", "glm4", {"head_dim": 12}),
    ("GLM-4.5", "glm4_moe", {**_ROUTED, "head_dim": 12, "n_group": 1, "topk_group": 1}),
    ("Mixtral", "mixtral", {"num_local_experts": 4}),
    ("Qwen2 mixtures", "qwen2_moe", {**_MIXTURE, "shared_expert_intermediate_size": 28}),
    ("SmolLM3", "smollm3", {"num_hidden_layers": 4}),
    ("OLMo 2", "olmo2", {}),
    ("OLMo 3", "olmo3", {"num_hidden_layers": 4, "sliding_window": 8}),
    ("Command R7B, Command A", "cohere2", {"num_hidden_layers": 4, "sliding_window": 8}),
    (
        "EXAONE 4",
        "exaone4",
        {"num_hidden_layers": 4, "sliding_window": 8, "sliding_window_pattern": 4},
    ),
    ("Granite 3", "granite", {"logits_scaling": 4.0}),
    ("GPT-2", "gpt2", {"n_inner": 52}),
    ("Command R", "cohere", {"logit_scale": 0.5}),
    ("OLMoE", "olmoe", {"num_experts": 6, "num_experts_per_tok": 2}),
    ("Granite 3 mixtures", "granitemoe", {**_LOCAL, "num_experts_per_tok": 2}),
    ("Seed-OSS", "seed_oss", {"head_dim": 12}),
    ("StableLM 2", "stablelm", {}),
    ("Arcee", "arcee", {"mlp_bias": True}),
    ("Nemotron", "nemotron", {"partial_rotary_factor": 0.4}),
    ("StarCoder 2", "starcoder2", {}),
    ("ERNIE 4.5", "ernie4_5", {"head_dim": 12}),
    ("Hunyuan", "hunyuan_v1_dense", {"head_dim": 12}),
    ("Hunyuan mixtures", "hunyuan_v1_moe", {"head_dim": 12, "num_experts": 6, "moe_topk": 2}),
    ("Hy3", "hy_v3", {**_MIXTURE, "head_dim": 12}),
    ("K-EXAONE", "exaone_moe", {**_MIXTURE, "head_dim": 12, "sliding_window": 8}),
    ("AFMoE (Trinity)", "afmoe", {**_MIXTURE, "head_dim": 12, "sliding_window": 8}),
    ("Apertus", "apertus", {}),
    ("GLM-4 (first)", "glm", {"head_dim": 12}),
    ("Granite with windows", "granite_swa", {"num_hidden_layers": 4, "sliding_window": 8}),
    ("Phi-1.5, Phi-2", "phi", {}),
    ("GPT-NeoX, Pythia", "gpt_neox", {}),
    ("Falcon", "falcon", {}),
    ("OLMo", "olmo", {"clip_qkv": 0.5}),
    ("Jais 2", "jais2", {}),
    ("dots.llm1", "dots1", {**_ROUTED, "n_group": 1, "topk_group": 1}),
    ("MiniMax M2", "minimax_m2", {**_LOCAL, "num_experts_per_tok": 2, "rotary_dim": 6}),
    ("LFM2, LFM2.5", "lfm2", _mixer("lfm2")),
    ("LFM2 mixtures (8B-A1B)", "lfm2_moe", _mixer("lfm2_moe")),
    ("Granite 4", "granitemoehybrid", _mixer("granite_h_moe")),
    ("Bamba", "bamba", _mixer("bamba")),
    ("Falcon H1", "falcon_h1", _mixer("falcon_h1")),
    ("Nemotron H, Nemotron 3 Nano", "nemotron_h", _mixer("nemotron_h_moe")),
)


# The families that are asked for most: name, types of models, and architectures of GGUF files. A
# family counts if all of them run.
WANTED: tuple[tuple[str, str, str], ...] = (
    ("Qwen3.5 and 3.6 mixtures", "qwen3_5_moe", "qwen35moe"),
    ("Qwen3.6-27B, Qwen3.8-27B", "qwen3_5", "qwen35"),
    ("Qwen3.5", "qwen3_5_text", "qwen35"),
    ("Qwen3-VL", "qwen3_vl", "qwen3vl"),
    ("Qwen3", "qwen3", "qwen3"),
    ("Qwen3 mixtures", "qwen3_moe", "qwen3moe"),
    ("Qwen3-Next", "qwen3_next", "qwen3next"),
    ("Qwen3.8-Flash-Next", "qwen4_exp", "qwen4exp"),
    ("Gemma 4", "gemma4 gemma4_text", "gemma4"),
    ("Gemma 4 12B", "gemma4_unified", "gemma4"),
    ("Gemma 3", "gemma3 gemma3_text", "gemma3"),
    ("gpt-oss", "gpt_oss", "gpt-oss"),
    ("Llama 3", "llama", "llama"),
    ("Qwen2.5", "qwen2", "qwen2"),
    ("Mistral Small 3, Ministral 3", "mistral3 ministral3", "llama mistral3"),
    ("Phi-4", "phi3", "phi3"),
    ("Mistral Small 4", "mistral4", "mistral4"),
    ("GLM-4.7-Flash", "glm4_moe_lite", "deepseek2"),
    ("GLM-4.5 to 4.7", "glm4_moe", "glm4moe"),
    ("DeepSeek V3, Kimi K2", "deepseek_v3 kimi_k2", "deepseek2"),
    ("MiniMax M2", "minimax_m2", "minimax-m2"),
    ("Nemotron 3 Nano", "nemotron_h", "nemotron_h_moe"),
    ("LFM2", "lfm2 lfm2_moe", "lfm2 lfm2moe"),
    ("Granite 4", "granitemoehybrid", "granitehybrid"),
    ("Muse Glimmer", "muse_glimmer", "muse-glimmer"),
)


def wanted() -> str:
    """The sentence that counts the families that are asked for most."""
    sides = {"folders": (1, FAMILIES), "GGUF files": (2, architectures())}
    lost = {
        side: [one[0] for one in WANTED if not {*one[at].split()} <= {*known}]
        for side, (at, known) in sides.items()
    }
    folders, files = (len(WANTED) - len(names) for names in lost.values())
    absent = sorted({name for names in lost.values() for name in names})
    text = (
        f"Of {len(WANTED)} families that are asked for most, {folders} are native from folders and "
    )
    text += f"{files} run from GGUF files" + (f"; not {', '.join(absent)}" if absent else "")
    return fill(f"{text}.", 110, break_on_hyphens=False)


class Row(NamedTuple):
    names: str
    model_type: str
    runs: str
    lost: str

    def __str__(self) -> str:
        return f"| {self.names} | `{self.model_type}` | {self.runs} | {self.lost} |"


def row_of(names: str, model_type: str, changes: Mapping[str, Any] | None) -> Row:
    with TemporaryDirectory() as place:
        folder = Path(place)
        if changes is None:
            assert model_type in WRAPPERS
            _, theirs = write_wrapper(folder, model_type)
        else:
            theirs = random_hf(model_type, changes, seed=3).eval()
            theirs.tie_weights()
            theirs.save_pretrained(folder)
        try:
            model = load_model(folder, OPTIONS)
        except CheckpointError as error:
            reason = str(error).replace(str(folder / "config.json"), "").removeprefix(": ")
            return Row(names, model_type, "refused", reason.rstrip("."))
        with torch.no_grad():
            logits_NV = theirs(torch.tensor([TEXT])).logits[0]
        torch.testing.assert_close(feed(model, TEXT, [len(TEXT)]), logits_NV, atol=1e-3, rtol=1e-4)
        is_foreign = isinstance(model, AdapterModel)
        # The first note of an adapter says what it is.
        lost = "; ".join(model.config.notes[is_foreign:])
        return Row(names, model_type, "transformers" if is_foreign else "native", lost)


def table() -> str:
    rows = [row_of(*one) for one in ARCHITECTURES]
    parts: list[str] = []
    for lost in sorted({row.lost for row in rows if row.runs == "native"}):
        same = [row for row in rows if (row.runs, row.lost) == ("native", lost)]
        names = ", ".join(f"{row.names} (`{row.model_type}`)" for row in same)
        text = f"*Native*: {names}{lost and f'; {lost}'}."
        parts.append(fill(text, 110, break_on_hyphens=False))
    head = "| models | `model_type` | runs | what is lost |\n|---|---|---|---|"
    parts.append("\n".join([head, *(str(row) for row in rows if row.runs != "native")]))
    return "\n\n".join([*parts, wanted()])


def main() -> int:
    page = PAGE.read_text()
    before, _, rest = page.partition(BEGIN)
    after = rest.partition(END)[2]
    wanted = f"{before}{BEGIN}\n\n{table()}\n\n{END}{after}"
    if "--check" in sys.argv[1:]:
        return int(wanted != page)
    PAGE.write_text(wanted)
    return 0


if __name__ == "__main__":
    sys.exit(main())
