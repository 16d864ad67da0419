"""MiMo: a Qwen2 whose MTP block drafts, against the mathematics of its makers' code in plain torch.

The block joins the residual of the token before, not the target's last norm of it, and then the
token; it goes on from its own state after its last norm.

Shapes:  P = tokens, D = hidden size, H = heads, E = head size.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.functional import rms_norm, scaled_dot_product_attention, silu

from checks.engine import greedy
from doubles.rig import BRANCHING, SAMPLER, Rig
from doubles.tiny_checkpoints import random_tensors, save_tensors, variant
from outrider.core.draft import Budget
from outrider.core.protocols import DraftNeeds, DraftRow, HiddenStates, StepRow
from outrider.core.rng import KeyedRng
from outrider.drafters.common.growth import DraftSampler
from outrider.models.decoder import LoadOptions, ModelCapacity
from outrider.models.heads import HeadsToLoad, has_own_mtp, kind_of
from outrider.models.llama import LlamaModel
from outrider.models.loading import load_model
from outrider.plugins.heads.hidden import HiddenDrafter
from outrider.plugins.heads.mtp import mtp_drafter

CONFIG = variant("qwen2").config
PUBLISHED = {
    **CONFIG,
    "architectures": ["MiMoForCausalLM"],
    "model_type": "mimo",
    "attention_bias": True,
    "num_nextn_predict_layers": 1,
}
BLOCK = "model.mtp_layers.0."
LAYERS: int = CONFIG["num_hidden_layers"]
SIZE: int = CONFIG["hidden_size"]
HEADS: int = CONFIG["num_attention_heads"]
EPS: float = CONFIG["rms_norm_eps"]
THETA: float = CONFIG["rope_theta"]
ROOM = ModelCapacity(
    num_slots=512, page_size=4, max_rows=64, max_logits=64, hidden_layers=(LAYERS,)
)
TEXT = tuple((place * place * 7 + 3 * place + 5) % 89 for place in range(40))
PROMPTS = (TEXT[:9], TEXT[3:5], TEXT[20:31])
K = 4


def written(folder: Path) -> dict[str, Tensor]:
    """Write the checkpoint; return its tensors."""
    tensors = random_tensors(CONFIG, seed=0)
    one_more = random_tensors({**CONFIG, "num_hidden_layers": LAYERS + 1}, seed=4)
    layer = f"model.layers.{LAYERS}."
    for name, tensor in one_more.items():
        if name.startswith(layer):
            tensors[BLOCK + name.removeprefix(layer)] = tensor
    rng = torch.Generator().manual_seed(5)
    for norm in ("token_layernorm", "hidden_layernorm", "final_layernorm"):
        tensors[f"{BLOCK}{norm}.weight"] = 1 + 0.3 * torch.randn(SIZE, generator=rng)
    joined = torch.randn(SIZE, 2 * SIZE, generator=rng) / (2 * SIZE) ** 0.5
    tensors[f"{BLOCK}input_proj.weight"] = joined
    tensors["model.norm.weight"] = 1 + 0.3 * torch.randn(SIZE, generator=rng)
    save_tensors(folder / "model.safetensors", tensors)
    (folder / "config.json").write_text(json.dumps(PUBLISHED))
    return tensors


@dataclass(frozen=True, slots=True)
class Definition:
    tensors: dict[str, Tensor]

    def normed(self, x_PD: Tensor, name: str) -> Tensor:
        return rms_norm(x_PD, (SIZE,), self.tensors[f"{name}.weight"], EPS)

    def layer(self, x_PD: Tensor, prefix: str) -> Tensor:
        """One layer of Qwen2, over a whole text."""

        def product(y_PD: Tensor, name: str) -> Tensor:
            bias = self.tensors.get(f"{prefix}{name}.bias")
            out: Tensor = y_PD @ self.tensors[f"{prefix}{name}.weight"].T
            return out if bias is None else out + bias

        def heads(name: str) -> Tensor:
            return product(y_PD, f"self_attn.{name}_proj").unflatten(1, (-1, SIZE // HEADS))

        y_PD = self.normed(x_PD, f"{prefix}input_layernorm")
        groups = HEADS // CONFIG["num_key_value_heads"]
        q, k = turned(heads("q")), turned(heads("k")).repeat_interleave(groups, 1)
        v = heads("v").repeat_interleave(groups, 1)
        q, k, v = (one.transpose(0, 1) for one in (q, k, v))
        seen = scaled_dot_product_attention(q, k, v, is_causal=True).transpose(0, 1)
        x_PD = x_PD + product(seen.flatten(1), "self_attn.o_proj")
        y_PD = self.normed(x_PD, f"{prefix}post_attention_layernorm")
        up = silu(product(y_PD, "mlp.gate_proj")) * product(y_PD, "mlp.up_proj")
        return x_PD + product(up, "mlp.down_proj")

    def embedded(self, tokens: tuple[int, ...]) -> Tensor:
        return self.tensors["model.embed_tokens.weight"][list(tokens)]

    def residual(self, tokens: tuple[int, ...]) -> Tensor:
        x_PD = self.embedded(tokens)
        for index in range(LAYERS):
            x_PD = self.layer(x_PD, f"model.layers.{index}.")
        return x_PD

    def likeliest(self, state_D: Tensor) -> int:
        return int((self.tensors["lm_head.weight"] @ state_D).argmax())

    def greedy(self, prompt: tuple[int, ...], num_tokens: int) -> list[int]:
        text = prompt
        while len(text) < len(prompt) + num_tokens:
            text += (self.likeliest(self.normed(self.residual(text)[-1:], "model.norm")[0]),)
        return list(text[len(prompt) :])

    def drafts(self, text: tuple[int, ...], k: int) -> tuple[int, ...]:
        """The drafts below a text, of whose last token the target has no state yet."""
        states_PD, read = self.residual(text[:-1]), text[1:]
        for _ in range(k):
            halves = [
                self.normed(states_PD, f"{BLOCK}hidden_layernorm"),
                self.normed(self.embedded(read), f"{BLOCK}token_layernorm"),
            ]
            x_PD = torch.cat(halves, dim=-1) @ self.tensors[f"{BLOCK}input_proj.weight"].T
            own_PD = self.normed(self.layer(x_PD, BLOCK), f"{BLOCK}final_layernorm")
            states_PD = torch.cat([states_PD, own_PD[-1:]])
            read += (self.likeliest(own_PD[-1]),)
        return read[len(text) - 1 :]


def turned(x_PHE: Tensor) -> Tensor:
    half = x_PHE.shape[-1] // 2
    rates = torch.tensor(THETA) ** (-torch.arange(half) / half)
    angles = torch.arange(len(x_PHE))[:, None, None] * rates
    first, second = x_PHE[..., :half], x_PHE[..., half:]
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


@dataclass(frozen=True, slots=True)
class Pair:
    folder: Path
    definition: Definition
    target: LlamaModel

    def drafter(self, sampler: DraftSampler = SAMPLER, chunk: int = 64) -> HiddenDrafter:
        heads = HeadsToLoad(self.folder, "mtp", ROOM)
        return mtp_drafter(heads, self.target, sampler, chunk=chunk, batch_size=2)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder = tmp_path_factory.mktemp("mimo")
    definition = Definition(written(folder))
    target = load_model(folder, LoadOptions(capacity=ROOM, device="cpu"))
    assert isinstance(target, LlamaModel)
    return Pair(folder, definition, target)


def test_the_checkpoint_is_a_model_with_a_block_of_its_own(pair: Pair) -> None:
    assert has_own_mtp(pair.folder)
    (pair.folder / "tokenizer.json").write_text("{}")
    assert kind_of(pair.folder) == "model"
    assert pair.target.spec.num_layers == LAYERS


@pytest.mark.parametrize("chunk", [3, 64])
def test_drafts_are_those_of_the_definition(pair: Pair, chunk: int) -> None:
    """The first ones, and those after the text went on otherwise than drafted, or further."""
    drafter, state = pair.drafter(chunk=chunk), pair.target.state
    state.open(0, ())
    drafter.open(0, TEXT[:1])
    for length in (1, 2, 5, 6, 10, 30, 37):
        tokens = TEXT[state.length(0) : length - 1]
        if tokens:
            needs = DraftNeeds(hidden_layers=(LAYERS,))
            pair.target.step([StepRow.chain(0, tokens, logits_from=len(tokens))], needs)
            state.commit({0: range(len(tokens))})
        hidden = HiddenStates(length - 1, partial(state.hidden, 0))
        rng = KeyedRng(0, 0, length)
        row = DraftRow(0, list(TEXT[:length]), None, Budget(K), greedy(K), rng, hidden=hidden)
        (draft,) = drafter.propose([row])
        wanted = pair.definition.drafts(TEXT[:length], K) if length > 1 else ()
        assert draft.tokens == wanted
    state.close(0)
    drafter.close(0)


@pytest.mark.parametrize("sampler", [SAMPLER, BRANCHING], ids=["chains", "trees"])
def test_greedy_text_is_that_of_the_definition(pair: Pair, sampler: DraftSampler) -> None:
    rig = Rig(pair.target, pair.drafter(sampler), k=K, batch_size=2, chunk=4)
    texts = rig.outputs(PROMPTS, greedy(12))
    assert texts == [pair.definition.greedy(prompt, 12) for prompt in PROMPTS]
    assert sum(trace.num_drafted for trace in rig.traces) > 40
