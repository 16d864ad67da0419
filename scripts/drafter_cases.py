#!/usr/bin/env python3
r"""Writes tests/golden/drafters: what publishers' own libraries draft, on random weights.

    python scripts/drafter_cases.py [--only NAME] [--zlab DIR] [--deepspec DIR] [--hydra DIR] \
        [--fms DIR]

Needs an environment with the packages of this project, `pip install --no-deps speculators==0.9.0`,
and checkouts of z-lab/dflash, deepseek-ai/DeepSpec, zankner/Hydra, and of fms and fms-extras in one
folder. Cases whose library is not given stay as they are. Tests read the files alone.

Shapes:  P = tokens, L = captured layers, D = hidden size, K = drafted positions, V = vocabulary.
"""

# The libraries have no types.
# pyright: basic, reportMissingImports=false, reportMissingModuleSource=false

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import LlamaConfig, Qwen3Config, Qwen3ForCausalLM

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from doubles.published_drafters import CASES, CUTS, MASK, TARGET, TEXT, drawn
from doubles.tiny_checkpoints import write_checkpoint

LAYERS = (1, 3, 8)
IDS = tuple(range(0, 96, 2))
BLOCK = 5
LEAST_GAP = 1e-3


class Target:
    """The target in transformers, and its states of TEXT."""

    def __init__(self, folder: Path) -> None:
        self.model = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        seen: list[Tensor] = [self.model.model.embed_tokens(torch.tensor([TEXT]))]

        def see(_module: Any, _given: Any, out: Any) -> None:
            seen.append(out[0] if isinstance(out, tuple) else out)

        hooks = [layer.register_forward_hook(see) for layer in self.model.model.layers]
        with torch.no_grad():
            self.model(torch.tensor([TEXT]))
        for hook in hooks:
            hook.remove()
        self.states = [state.detach().view(len(TEXT), -1) for state in seen]
        self.normed_PD = self.model.model.norm(self.states[-1]).detach()
        self.embedding_VD = self.model.model.embed_tokens.weight.detach()
        self.head_VD = self.model.lm_head.weight.detach()

    def joined(self, layers: Sequence[int], length: int) -> Tensor:
        return torch.cat([self.states[layer][:length] for layer in layers], -1)


# Logits of the positions of a draft after a text, and the draft.
Drafts = Callable[[int], tuple[Tensor, list[int]]]


def best(logits_V: Tensor) -> int:
    two = logits_V.topk(2).values
    if two[0] - two[1] < LEAST_GAP:
        raise SystemExit("a near-tie: choose other sizes")
    return int(logits_V.argmax())


def write(
    name: str,
    config: dict[str, Any],
    shapes: dict[str, list[int]],
    drafts: Drafts,
    *,
    ids: Sequence[int] | None = None,
    cuts: Sequence[int] = CUTS,
) -> None:
    with torch.no_grad():
        found = {length: drafts(length)[1] for length in cuts}
        logits = drafts(cuts[-1])[0]
    values = {
        "config": config,
        "shapes": shapes,
        "ids": None if ids is None else list(ids),
        "drafts": found,
        "probs": [[round(p, 6) for p in row] for row in logits.softmax(-1).tolist()],
    }
    CASES.mkdir(parents=True, exist_ok=True)
    text = json.dumps(values, separators=(",", ":"))
    (CASES / f"{name}.json").write_text(text + "\n")
    print(name, found)


def spread(logits: Tensor, ids: Sequence[int] | None) -> Tensor:
    """Logits over the target's ids."""
    if ids is None:
        return logits
    out = logits.new_full((*logits.shape[:-1], 96), -torch.inf)
    out[..., list(ids)] = logits
    return out


def saved(model: Any) -> tuple[dict[str, Any], dict[str, list[int]]]:
    """config.json and shapes of the folder that a library writes."""
    with TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        config = json.loads((Path(folder) / "config.json").read_text())
        with safe_open(f"{folder}/model.safetensors", framework="pt") as file:
            shapes = {key: list(file.get_slice(key).get_shape()) for key in list(file.keys())}
    part = config.get("speculators_config", {}).get("verifier")
    if part:
        part["name_or_path"] = "org/target"
    config.pop("_name_or_path", None)
    return config, shapes


def layer_config(**changes: Any) -> Qwen3Config:
    sizes = {
        "vocab_size": 96, "hidden_size": 64, "intermediate_size": 80, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
        "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
        "tie_word_embeddings": False,
    }  # fmt: skip
    config = Qwen3Config(**{**sizes, **changes})
    config._attn_implementation = "eager"
    return config


Run = tuple[str, Callable[[], None]]


class Speculators:
    """Folders of the speculators library, for a target in `folder`."""

    def __init__(self, folder: Path, target: Target) -> None:
        self.folder, self.target = folder, target

    def common(self, algorithm: str, num: int) -> Any:
        import speculators.models  # noqa: F401
        from speculators.config import SpeculatorsConfig, VerifierConfig
        from speculators.proposals.greedy import GreedyTokenProposalConfig

        return SpeculatorsConfig(
            algorithm=algorithm,
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=num)],
            default_proposal_method="greedy",
            verifier=VerifierConfig.from_pretrained(str(self.folder)),
        )

    def block(self, name: str, kind: str, *, ids: Any = None, layer: Any = None, **own: Any) -> Run:
        def run() -> None:
            from speculators import SpeculatorModelConfig

            config = SpeculatorModelConfig.registry[kind](
                transformer_layer_config=layer_config(**(layer or {})),
                draft_vocab_size=96 if ids is None else len(ids),
                block_size=BLOCK,
                aux_hidden_state_layer_ids=list(LAYERS),
                mask_token_id=MASK,
                speculators_config=self.common(kind, BLOCK),
                **own,
            )
            model = model_of(config, self.target, ids)
            write(name, *saved(model), BlockDrafts(model, self.target, ids), ids=ids)

        return name, run

    def eagle(
        self,
        name: str,
        layer: Any,
        layers: Sequence[int] | None = LAYERS,
        *,
        ids: Any = IDS,
        kind: str = "eagle3",
        **own: Any,
    ) -> Run:
        def run() -> None:
            from speculators import SpeculatorModelConfig

            config = SpeculatorModelConfig.registry[kind](
                transformer_layer_config=layer,
                draft_vocab_size=96 if ids is None else len(ids),
                eagle_aux_hidden_state_layer_ids=None if layers is None else list(layers),
                speculators_config=self.common(kind, 4),
                **own,
            )
            model = model_of(config, self.target, ids)
            make = peagle_drafts if kind == "peagle" else eagle_drafts
            drafts = make(model, self.target, layers or (2, 4, 5), ids)
            # A text of one token has no state to begin with.
            write(name, *saved(model), drafts, ids=ids, cuts=CUTS[1:])

        return name, run

    def mtp(self, name: str, layer: Any) -> Run:
        def run() -> None:
            from speculators import SpeculatorModelConfig

            config = SpeculatorModelConfig.registry["mtp"](
                transformer_layer_config=layer, speculators_config=self.common("mtp", 3)
            )
            model = model_of(config, self.target, None)
            write(name, *saved(model), mtp_drafts(model, self.target), cuts=CUTS[1:])

        return name, run

    def eagles(self) -> Iterator[Run]:
        one = {"num_hidden_layers": 1}
        yield self.eagle("eagle-qwen3", layer_config(**one))
        yield self.eagle("eagle-llama", llama_config())
        yield self.eagle("eagle-two-layers", layer_config(**{**SLIDES, "sliding_window": 4}))
        yield self.eagle("eagle-five-states", layer_config(**one), (1, 2, 4, 5, 7))
        yield self.eagle("eagle-whole-vocabulary", layer_config(**one), ids=None)
        yield self.eagle("eagle-default-states", layer_config(**one), None)
        yield self.eagle("eagle-normed-residual", layer_config(**one), norm_before_residual=True)
        yield self.eagle("eagle-normed-states", layer_config(**one), norm_before_fc=True)
        yield self.eagle("eagle-normed-output", layer_config(), fc_norm=True, norm_output=True)
        masked: dict[str, Any] = {"kind": "peagle", "mask_token_id": MASK}
        yield self.eagle("peagle", layer_config(), **masked)
        yield self.eagle(
            "peagle-normed",
            layer_config(),
            ids=None,
            fc_norm=True,
            norm_before_residual=True,
            **masked,
        )

    def blocks(self) -> Iterator[Run]:
        yield self.block("dflash", "dflash", ids=IDS)
        yield self.block("dflash-window", "dflash", layer=SLIDES)
        yield self.block(
            "dflash-whole-window", "dflash", layer=SLIDES,
            sliding_window_non_causal=True, sample_from_anchor=True,
        )  # fmt: skip
        yield self.block(
            "dflash2", "dflash2", layer=SLIDES, selector_rank=8, selector_top_k=4,
            conv_kernel_size=3, conv_group_size=16,
        )  # fmt: skip
        for kind in ("vanilla", "gated", "rnn"):
            yield self.block(
                f"dspark-{kind}", "dspark", ids=IDS if kind == "gated" else None, markov_rank=8,
                markov_head_type=kind, sample_from_anchor=kind != "rnn",
            )  # fmt: skip
        yield self.block("xpress", "xpress", xpress_rank=8, num_jacobi_passes=3)
        yield self.block(
            "xpress-from-anchor", "xpress", ids=IDS, xpress_rank=8, xpress_mlp_ratio=3,
            num_jacobi_passes=2, sample_from_anchor=True,
        )  # fmt: skip

    def every(self) -> Iterator[Run]:
        from transformers import Qwen3_5TextConfig

        yield from self.eagles()
        yield from self.blocks()
        yield self.mtp("mtp", layer_config())
        hybrid = Qwen3_5TextConfig(
            vocab_size=96, hidden_size=64, intermediate_size=80, num_hidden_layers=4,
            num_attention_heads=4, num_key_value_heads=2, head_dim=32,
            max_position_embeddings=256, rms_norm_eps=1e-5, linear_num_value_heads=4,
            linear_num_key_heads=2, linear_key_head_dim=16, linear_value_head_dim=16,
        )  # fmt: skip
        hybrid._attn_implementation = "eager"
        yield self.mtp("mtp-hybrid", hybrid)


SLIDES = {
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 6,
    "use_sliding_window": True,
}


def model_of(config: Any, target: Target, ids: Any) -> Any:
    """The library's model with random weights, and the target's tables."""
    from speculators import SpeculatorModel

    kind = SpeculatorModel.registered_model_class_from_config(config)
    model = kind(config=config).float().eval()
    if ids is not None:
        known = torch.zeros(96, dtype=torch.bool)
        known[list(ids)] = True
        model.load_vocab_mappings(known, torch.tensor(ids) - torch.arange(len(ids)))
    tables = {"embed_tokens.weight": target.embedding_VD, "lm_head.weight": target.head_VD}
    with torch.no_grad():
        for name, table in tables.items():
            own = model.get_parameter(name)
            if own.shape == table.shape:
                own.copy_(table)
        for parameter in model.parameters():
            if not bool(parameter.isfinite().all()):
                parameter.zero_()
    _, shapes = saved(model)
    own = drawn(shapes, ids)
    missing = model.load_state_dict(own, strict=False)
    assert not missing.unexpected_keys, missing
    return model


class BlockDrafts:
    """Drafts of a model of the DFlash family."""

    def __init__(self, model: Any, target: Target, ids: Any) -> None:
        self.model, self.target, self.ids = model, target, ids
        self.config = model.config

    def __call__(self, length: int) -> tuple[Tensor, list[int]]:
        model, anchor = self.model, length - 1
        size = length + BLOCK + 2
        ids = torch.tensor([(*TEXT[:length], *[0] * (size - length))])
        states = torch.zeros(1, size, len(LAYERS) * 64)
        states[0, :anchor] = self.target.joined(LAYERS, anchor)
        mask = torch.zeros(1, size)
        mask[0, anchor] = 1
        hidden, logits, *_ = model._backbone_forward(
            states, ids, mask, torch.zeros(1, size, 64), torch.zeros(1, size, dtype=torch.long),
            max_anchors=1,
        )  # fmt: skip
        hidden, logits = hidden[0], logits[0]
        kind = type(model).__name__
        if kind == "DSparkDraftModel":
            return self._markov(hidden, logits, TEXT[anchor])
        if kind == "DFlash2DraftModel":
            return self._selected(hidden, logits, TEXT[anchor])
        if kind == "XPressDraftModel":
            logits = self._refined(hidden, logits, TEXT[max(anchor - 1, 0)], TEXT[anchor])
        logits = logits[not self.config.sample_from_anchor :]
        return spread(logits, self.ids), [self._id(best(row)) for row in logits]

    def _id(self, token: int) -> int:
        return token if self.ids is None else int(self.ids[token])

    def _before(self, pending: int, drafted: Sequence[int]) -> Tensor:
        """The token before each position of the block, as far as it is known."""
        known = [pending, *drafted]
        if not self.config.sample_from_anchor:
            known = [pending, *known]
        return torch.tensor([(known + [0] * BLOCK)[:BLOCK]])

    def _markov(self, hidden: Tensor, logits: Tensor, pending: int) -> tuple[Tensor, list[int]]:
        drafted: list[int] = []
        first = not self.config.sample_from_anchor
        rows: list[Tensor] = []
        for slot in range(first, BLOCK):
            bias = self.model.markov_head.block_bias(
                prev_token_ids=self._before(pending, drafted), hidden_states=hidden[None]
            )
            rows.append(logits[slot] + bias[0, slot])
            drafted.append(self._id(best(rows[-1])))
        return spread(torch.stack(rows[:1]), self.ids), drafted

    def _selected(self, hidden: Tensor, logits: Tensor, pending: int) -> tuple[Tensor, list[int]]:
        selector, drafted = self.model.candidate_selector, list[int]()
        rows: list[Tensor] = []
        for slot in range(not self.config.sample_from_anchor, BLOCK):
            before = self._before(pending, drafted)
            ids, scores = selector.select(logits[None], hidden[None], before)
            row = torch.full((96,), -torch.inf)
            row[ids[0, slot]] = scores[0, slot]
            rows.append(row)
            drafted.append(best(row))
        return torch.stack(rows[:1]), drafted

    def _refined(self, hidden: Tensor, base: Tensor, before: int, pending: int) -> Tensor:
        head, refined = self.model.refiner_head, base
        cache = head.hidden_cache(hidden[None])
        for _ in range(self.config.num_jacobi_passes):
            chosen = [self._id(int(token)) for token in refined.argmax(-1)]
            if not self.config.sample_from_anchor:
                chosen = [before, pending, *chosen[1:]]
            else:
                chosen = [pending, *chosen]
            refined = base + head.block_bias(torch.tensor([chosen[:BLOCK]]), hcache=cache)[0]
        return refined


def llama_config(head_dim: int = 16) -> Any:
    sizes: dict[str, Any] = {"rope_theta": 10000.0}
    config = LlamaConfig(
        vocab_size=96, hidden_size=64, intermediate_size=80, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=2, head_dim=head_dim,
        max_position_embeddings=256, rms_norm_eps=1e-5, tie_word_embeddings=False, **sizes,
    )  # fmt: skip
    config._attn_implementation = "eager"
    return config


def eagle_drafts(model: Any, target: Target, layers: Sequence[int], ids: Any) -> Drafts:
    def drafts(length: int) -> tuple[Tensor, list[int]]:
        tokens, x = list(TEXT[1:length]), target.joined(layers, length - 1)
        if model.fc_norm is not None:
            parts = x.chunk(len(model.fc_norm), dim=-1)
            x = torch.cat([norm(part) for norm, part in zip(model.fc_norm, parts, strict=True)], -1)
        states = model.fc(model.input_norm(x) if model.input_norm is not None else x)
        rows: list[Tensor] = []
        drafted: list[int] = []
        for _ in range(4):
            num = len(tokens)
            x = torch.cat([model.embed_tokens(torch.tensor([tokens])), states[None]], -1)
            places = torch.arange(num)[None]
            for index, layer in enumerate(model.layers):
                mask = torch.full((1, 1, num, num), -torch.inf).triu(1)
                if index in model.sliding_window_indices:
                    past = torch.full((num, num), -torch.inf).tril(-model.sliding_window)
                    mask = mask + past
                x = layer(
                    x,
                    attention_mask=mask,
                    position_ids=places,
                    position_embeddings=model.rotary_emb(x, places),
                )
                x = x[0] if isinstance(x, tuple) else x
            normed = model.norm(x)
            rows.append(model.lm_head(normed)[0, -1])
            token = best(rows[-1])
            drafted.append(token if ids is None else int(ids[token]))
            own = normed if model.config.norm_output else x
            tokens, states = [*tokens, drafted[-1]], torch.cat([states, own[0, -1:]])
        return spread(torch.stack(rows[:1]), ids), drafted

    return drafts


def peagle_drafts(model: Any, target: Target, layers: Sequence[int], ids: Any) -> Drafts:
    from speculators.models.attention import create_float_mask
    from speculators.models.peagle.attention import create_peagle_mask_mod

    num = 4

    def drafts(length: int) -> tuple[Tensor, list[int]]:
        read = length - 1
        tokens = torch.tensor([(*TEXT[1:length], *[MASK] * (num - 1))])
        masks = model.mask_hidden[0].expand(num - 1, -1)
        states = torch.cat([target.joined(layers, read), masks])[None]
        if model.fc_norm is not None:
            parts = states.chunk(len(model.fc_norm), dim=-1)
            states = torch.cat([norm(x) for norm, x in zip(model.fc_norm, parts, strict=True)], -1)
        x = torch.cat([model.embed_tokens(tokens), model.fc(states)], -1)
        anchors = torch.cat([torch.arange(read), torch.full((num - 1,), read - 1)])
        depths = torch.cat([torch.zeros(read, dtype=torch.long), torch.arange(1, num)])
        total = len(anchors)
        mask = create_float_mask(
            create_peagle_mask_mod(anchors, depths, torch.zeros(read, dtype=torch.long)),
            B=None, H=None, Q_LEN=total, KV_LEN=total, device=x.device,
        )  # fmt: skip
        places = (anchors + depths)[None]
        turns = model.rotary_emb(x, places)
        for layer in model.layers:
            x = layer(x, attention_mask=mask, position_ids=places, position_embeddings=turns)
            x = x[0] if isinstance(x, tuple) else x
        logits = model.lm_head(model.norm(x))[0, read - 1 :]
        own = [best(row) for row in logits]
        return spread(logits, ids), own if ids is None else [int(ids[token]) for token in own]

    return drafts


def mtp_drafts(model: Any, target: Target) -> Drafts:
    is_hybrid = model.config.transformer_layer_config.model_type.startswith("qwen3_5")

    def drafts(length: int) -> tuple[Tensor, list[int]]:
        tokens, states = list(TEXT[1:length]), target.normed_PD[: length - 1]
        rows: list[Tensor] = []
        drafted: list[int] = []
        for _ in range(3):
            x = model.embed_tokens(torch.tensor([tokens]))
            num = len(tokens)
            places = torch.arange(num)[None]
            rotary = places[None].expand(3, -1, -1) if is_hybrid else places
            out = model.mtp_layers[0](
                hidden_states=states[None],
                token_embeddings=x,
                attention_mask=torch.full((1, 1, num, num), -torch.inf).triu(1),
                position_ids=places,
                position_embeddings=model.rotary_emb(states[None], rotary),
            )
            rows.append(model.lm_head(out)[0, -1])
            drafted.append(best(rows[-1]))
            tokens, states = [*tokens, drafted[-1]], torch.cat([states, out[0, -1:]])
        return torch.stack(rows[:1]), drafted

    return drafts


def zlab(target: Target) -> Iterator[Run]:
    def run() -> None:
        from dflash.model import DFlashDraftModel

        config = layer_config(
            layer_types=["full_attention"] * 2, block_size=BLOCK, num_target_layers=8,
            dflash_config={"mask_token_id": MASK, "target_layer_ids": [-1, 2, 7]},
            architectures=["DFlashDraftModel"],
        )  # fmt: skip
        model = DFlashDraftModel(config).float().eval()
        model.load_state_dict(drawn(saved(model)[1], None))

        def drafts(length: int) -> tuple[Tensor, list[int]]:
            # Layers are counted by their outputs: -1 is the embedding.
            states = target.joined((0, 3, 8), length - 1)[None]
            tokens = torch.tensor([(TEXT[length - 1], *[MASK] * (BLOCK - 1))])
            hidden = model(
                target_hidden=states,
                noise_embedding=torch.nn.functional.embedding(tokens, target.embedding_VD),
                position_ids=torch.arange(length - 1 + BLOCK)[None],
            )
            logits = hidden[0, 1:] @ target.head_VD.T
            return logits, [best(row) for row in logits]

        write("dflash-zlab", *saved(model), drafts)

    yield "dflash-zlab", run


def deepspec(target: Target) -> Iterator[Run]:
    def run() -> None:
        from deepspec.modeling.dspark.qwen3.modeling import Qwen3DSparkModel

        config = layer_config(
            layer_types=["full_attention"] * 2, block_size=BLOCK, num_target_layers=8,
            target_layer_ids=[0, 2, 7], mask_token_id=MASK, num_anchors=4, markov_rank=8,
            markov_head_type="rnn", enable_confidence_head=True, confidence_head_with_markov=True,
            architectures=["Qwen3DSparkModel"],
        )  # fmt: skip
        model = Qwen3DSparkModel(config).float().eval()
        model.load_state_dict(drawn(saved(model)[1], None))

        def drafts(length: int) -> tuple[Tensor, list[int]]:
            tokens = torch.tensor([(TEXT[length - 1], *[MASK] * (BLOCK - 1))])
            hidden = model._forward_backbone(
                target_hidden_states=target.joined((1, 3, 8), length - 1)[None],
                noise_embedding=model.embed_tokens(tokens),
                position_ids=torch.arange(length - 1 + BLOCK)[None],
                is_causal=False,
            )
            drafted, logits = model.sample_draft_tokens(
                model.compute_logits(hidden),
                first_prev_token_ids=tokens[:, 0],
                hidden_states=hidden,
            )
            for row in logits[0]:
                best(row)
            return logits[0, :1], drafted[0].tolist()

        write("dspark-deepspec", *saved(model), drafts)

    yield "dspark-deepspec", run


def hydra_prefix(path: Path, target: Target) -> Iterator[Run]:
    """Heads behind a layer, which is in their file under a name of old transformers."""

    def run() -> None:
        from transformers.models.llama.modeling_llama import LlamaModel

        old: Any = ModuleType("hydra.model.modeling_llama_kv")
        old.LlamaModel = LlamaModel
        sys.modules[old.__name__] = old
        source = path / "hydra" / "model" / "hydra_heads" / "prefix_mlp_head.py"
        # The layer has the target's sizes.
        config = llama_config(head_dim=32)
        config.intermediate_size = target.model.config.intermediate_size
        embed = target.model.model.embed_tokens
        model = module_at(source).HydraPrefixMLP(2, 3, True, embed, config).eval()
        shapes = {
            key: list(value.shape)
            for key, value in model.state_dict().items()
            if not key.startswith("input_embed_fn")
        }
        model.load_state_dict(drawn(shapes, None), strict=False)

        def drafts(length: int) -> tuple[Tensor, list[int]]:
            states = model.prefix_embeding_layer(inputs_embeds=target.normed_PD[None, : length - 1])
            state, drafted = states[0][0, -1], list[int]()
            rows: list[Tensor] = []
            for head in range(3):
                known = torch.tensor([TEXT[length - 1], *drafted])
                x = torch.cat([state, embed(known).flatten()])
                rows.append(model.hydra_lm_head[head](model.hydra_mlp[head](x)))
                drafted.append(best(rows[-1]))
            return torch.stack(rows[:1]), drafted

        keys = {
            "hydra_num_heads": 3, "hydra_num_layers": 2, "hydra_head_arch": "prefix-mlp",
            "grounded_heads": True, "base_model_name_or_path": "org/target",
        }  # fmt: skip
        write("hydra-prefix", keys, shapes, drafts, cuts=CUTS[1:])

    yield "hydra-prefix", run


def module_at(path: Path) -> Any:
    """The module in a file whose package imports what transformers no longer has."""
    spec = spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def hydra(path: Path, target: Target) -> Iterator[Run]:
    def case(name: str, num_layers: int, *, grounded: bool) -> Run:
        def run() -> None:
            source = path / "hydra" / "model" / "hydra_heads" / "mlp_head.py"
            embed = target.model.model.embed_tokens
            model = module_at(source).HydraMLP(num_layers, 3, grounded, embed, target.model.config)
            own = {
                key: value
                for key, value in model.state_dict().items()
                if not key.startswith("input_embed_fn")
            }
            shapes = {key: list(value.shape) for key, value in own.items()}
            drawn_now = drawn(shapes, None)
            model.load_state_dict(drawn_now, strict=False)
            for key, value in model.state_dict().items():
                assert key not in drawn_now or torch.equal(value, drawn_now[key]), key

            def drafts(length: int) -> tuple[Tensor, list[int]]:
                state, drafted = target.normed_PD[length - 2], list[int]()
                rows: list[Tensor] = []
                for head in range(3):
                    x = state
                    if grounded:
                        known = torch.tensor([TEXT[length - 1], *drafted])
                        x = torch.cat([state, embed(known).flatten()])
                    rows.append(model.hydra_lm_head[head](model.hydra_mlp[head](x)))
                    drafted.append(best(rows[-1]))
                return torch.stack(rows[:1]), drafted

            config = {
                "hydra_num_heads": 3, "hydra_num_layers": num_layers, "hydra_head_arch": "mlp",
                "grounded_heads": grounded, "hidden_state_offset": 0,
                "base_model_name_or_path": "org/target",
            }  # fmt: skip
            write(name, config, shapes, drafts, cuts=CUTS[1:])

        return name, run

    yield case("hydra", 1, grounded=True)
    yield case("hydra-ungrounded", 1, grounded=False)


def fms(target: Target) -> Iterator[Run]:
    def case(name: str, inner: int, **own: Any) -> Run:
        def run() -> None:
            from fms_extras.models.speculator import MLPSpeculator

            model = MLPSpeculator(64, inner, 96, 3, **own).float().eval()
            kept = dict(model.named_parameters())  # Tied ones once, under their first name.
            shapes = {f"speculator.{key}": list(value.shape) for key, value in kept.items()}
            found = drawn(shapes, None)
            with torch.no_grad():
                for key, value in kept.items():
                    value.copy_(found[f"speculator.{key}"])

            def drafts(length: int) -> tuple[Tensor, list[int]]:
                drafted, rows = list[int](), list[Tensor]()
                for head in range(3):
                    ids = torch.tensor([[TEXT[length - 1], *drafted, *[0] * 3][:3]])
                    out = model(target.normed_PD[length - 2][None, None], ids)
                    rows.append(out[head, 0, 0])
                    drafted.append(best(rows[-1]))
                return torch.stack(rows[:1]), drafted

            config = {
                "architectures": ["MLPSpeculatorPreTrainedModel"], "model_type": "mlp_speculator",
                "vocab_size": 96, "emb_dim": 64, "inner_dim": inner, "n_predict": 3,
                "n_candidates": 3, "top_k_tokens_per_head": [2, 1, 1],
                "scale_input": own.get("scale_input", False),
                "tie_weights": own.get("tie_wts", False),
            }  # fmt: skip
            write(name, config, shapes, drafts, cuts=CUTS[1:])

        return name, run

    yield case("mlp-speculator", 32)
    yield case("mlp-speculator-tied", 40, scale_input=True, tie_wts=True)


def pard() -> Iterator[Run]:
    def run() -> None:
        config = layer_config(pard_token=MASK, architectures=["Qwen3ForCausalLM"])
        model = Qwen3ForCausalLM(config).float().eval()
        own, shapes = saved(model)
        model.load_state_dict(drawn(shapes, None))

        def drafts(length: int) -> tuple[Tensor, list[int]]:
            tokens = torch.tensor([(*TEXT[:length], *[MASK] * 3)])
            logits = model(tokens).logits[0, length - 1 :]
            return logits, [best(row) for row in logits]

        write("pard", own, shapes, drafts)

    yield "pard", run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="")
    for name in ("zlab", "deepspec", "hydra", "fms"):
        parser.add_argument(f"--{name}", type=Path)
    given = parser.parse_args()
    sys.path += [str(path) for path in (given.zlab, given.deepspec, given.fms) if path]
    with TemporaryDirectory() as folder:
        target = Target(write_checkpoint(Path(folder), TARGET))
        cases = [*pard(), *Speculators(Path(folder), target).every()]
        cases += zlab(target) if given.zlab else ()
        cases += deepspec(target) if given.deepspec else ()
        for make in (hydra, hydra_prefix):
            cases += make(given.hydra, target) if given.hydra else ()
        cases += fms(target) if given.fms else ()
        for name, run in cases:
            if given.only in name:
                run()


if __name__ == "__main__":
    main()
