"""Assistants of Gemma 4: their logits are those of transformers over the same keys and values, and
text with them is the target's own."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from doubles.gguf_families import write_gguf
from doubles.hf_checkpoints import hushed, randomise
from doubles.tiny_families import add_words, write_family
from outrider import LLM, EngineConfig, SamplingParams
from outrider.core.draft import Draft
from outrider.core.errors import CheckpointError, ConfigError
from outrider.core.protocols import DraftRow
from outrider.plugins.gemma4 import assistant as nets

pytest.importorskip("transformers")
pytestmark = [pytest.mark.wide, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]

PROMPTS = [[(7 * i * i + 3 * i) % 96 for i in range(length)] for length in (30, 9)]
PARAMS = SamplingParams(max_tokens=24, ignore_eos=True)
KINDS = ["sliding_attention", "sliding_attention", "full_attention"]


def write_assistant(folder: Path, target: Path, *, grouped: bool = False, **changes: Any) -> Any:
    """An assistant for the tiny checkpoint `target`, and transformers' model of it. Its tokens may
    be `grouped`, in an order of their own."""
    theirs: dict[str, Any] = json.loads((target / "config.json").read_text())
    whole = theirs["per_layer_config"][str(theirs["layer_types"].index("full_attention"))]
    heads = theirs["num_key_value_heads"]
    text: dict[str, Any] = {
        **{key: theirs[key] for key in ("vocab_size", "head_dim", "sliding_window")},
        "hidden_size": 24,
        "intermediate_size": 36,
        "num_hidden_layers": 3,
        "num_kv_shared_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": heads,
        "num_global_key_value_heads": whole.get("num_key_value_heads", heads),
        "attention_k_eq_v": True,
        "global_head_dim": whole["head_dim"],
        "layer_types": KINDS,
        "max_position_embeddings": 256,
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 0,
        **changes,
    }
    with hushed():
        import transformers  # pyright: ignore[reportMissingTypeStubs]

        library: Any = transformers
        usual = library.Gemma4TextConfig.kv_sharing_modes

        def modes(config: Any) -> list[str]:
            # This version of transformers refuses models whose layers share all keys.
            layers = config.num_hidden_layers
            return (
                ["reuse"] * layers if config.num_kv_shared_layers == layers else usual.fget(config)
            )

        library.Gemma4TextConfig.kv_sharing_modes = property(modes)
        try:
            settings = library.Gemma4AssistantConfig(
                text_config=text,
                backbone_hidden_size=theirs["hidden_size"],
                use_ordered_embeddings=grouped,
                num_centroids=8,
                centroid_intermediate_top_k=3,
            )
            model = library.Gemma4AssistantForCausalLM(settings).eval()
        finally:
            library.Gemma4TextConfig.kv_sharing_modes = usual
        randomise(model, 5)
        model.tie_weights()
        if grouped:
            order = torch.randperm(96, generator=torch.Generator().manual_seed(1))
            model.masked_embedding.token_ordering.copy_(order)
        model.save_pretrained(folder)
    return model


def their_logits(target: Path, model: Any, tokens: Sequence[int], num: int) -> Tensor:
    """Logits of a greedy draft after `tokens`, the last of which the target has not read."""
    with hushed(), torch.no_grad():
        import transformers  # pyright: ignore[reportMissingTypeStubs]

        library: Any = transformers
        owner = library.AutoModelForCausalLM.from_pretrained(
            target, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        out = owner(
            torch.tensor([tokens[:-1]]), output_hidden_states=True, return_shared_kv_states=True
        )
        # A token sees a window of positions with its own, in which it has no key.
        seen = owner.config.sliding_window - 1
        shared = dict(out.shared_kv_states)
        shared[KINDS[0]] = tuple(rows[:, :, -seen:] for rows in shared[KINDS[0]])
        state, token = out.hidden_states[-1][:, -1:], torch.tensor([[tokens[-1]]])
        found: list[Tensor] = []
        for _ in range(num):
            embedded = owner.get_input_embeddings()(token)
            step = model(
                inputs_embeds=torch.cat([embedded, state], -1),
                position_ids=torch.tensor([[len(tokens) - 1]]),
                shared_kv_states=shared,
            )
            found.append(step.logits[0, -1])
            token, state = step.logits.argmax(-1), step.last_hidden_state
    return torch.stack(found)


def opened(folder: Path, draft: Path | None, **settings: Any) -> LLM:
    usual: dict[str, Any] = {"batch_size": 2, "page_size": 4, "prefill_chunk": 8}
    usual |= {"dtype": "float32", "drafter": "assistant", **settings}
    return LLM(folder, draft=draft, config=EngineConfig(**usual))


def texts(folder: Path, draft: Path | None, **settings: Any) -> list[Sequence[int]]:
    with closing(opened(folder, draft, **settings)) as llm:
        return [result.token_ids for result in llm.generate(PROMPTS, PARAMS)]


@pytest.mark.parametrize("grouped", [False, True])
def test_logits_are_those_of_transformers(
    grouped: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, draft = add_words(write_family(tmp_path / "a", "gemma4_shared")), tmp_path / "b"
    model = write_assistant(draft, folder, grouped=grouped)
    seen: list[Tensor] = []
    # The text and the number of logits before each draft.
    drafts: list[tuple[list[int], int]] = []
    logits, propose = nets.AssistantPath.logits, nets.AssistantDrafter.propose

    def kept(path: nets.AssistantPath, tokens: Sequence[int]) -> Tensor:
        seen.append(logits(path, tokens))
        return seen[-1].clone()

    def noted(drafter: nets.AssistantDrafter, rows: Sequence[DraftRow]) -> list[Draft]:
        drafts.append(([*rows[0].tokens], len(seen)))
        return propose(drafter, rows)

    monkeypatch.setattr(nets.AssistantPath, "logits", kept)
    monkeypatch.setattr(nets.AssistantDrafter, "propose", noted)
    with closing(opened(folder, draft, batch_size=1, k=4)) as llm:
        first = llm.generate([PROMPTS[0]], PARAMS)[0].token_ids[0]
    expected = their_logits(folder, model, [*PROMPTS[0], first], 4)
    found = torch.cat(seen[:4])
    # transformers gives the tokens of other groups one logit, below those of the chosen groups.
    chosen = expected > (expected.min(-1, keepdim=True).values if grouped else -torch.inf)
    assert (chosen.sum(-1) == (36 if grouped else 96)).all()
    torch.testing.assert_close(found[chosen], expected[chosen], atol=1e-4, rtol=1e-5)
    assert (found[~chosen] < -1e8).all()
    if grouped:
        return
    # A text that went on otherwise than drafted: the target took back what it had read of it.
    pairs = pairwise(drafts)
    tokens, start = next(new for old, new in pairs if len(new[0]) - len(old[0]) in (1, 2, 3))
    after = their_logits(folder, model, tokens, 4)
    torch.testing.assert_close(torch.cat(seen[start : start + 4]), after, atol=1e-4, rtol=1e-5)
    num, file = len(seen), write_gguf(draft, tmp_path / "a.gguf")
    with closing(opened(folder, file, batch_size=1, k=4)) as llm:
        llm.generate([PROMPTS[0]], PARAMS)
    torch.testing.assert_close(torch.cat(seen[num : num + 4]), expected, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize(
    ("name", "dtype"), [("gemma4_shared", "float32"), ("gemma4_moe", "bfloat16")]
)
def test_greedy_text_is_that_of_the_target(name: str, dtype: str, tmp_path: Path) -> None:
    folder, draft = add_words(write_family(tmp_path / "a", name)), tmp_path / "b"
    write_assistant(draft, folder, grouped=name == "gemma4_shared")
    expected = texts(folder, None, drafter="none", batch_size=1, dtype=dtype)
    ways: Sequence[dict[str, Any]] = (
        {"k": 4},
        {"k": 4, "tree_nodes": 8},
        {"k": 3, "batch_size": 1, "force_reference": True},
        {"k": 3, "schedule": "pd"},
        {"drafter": "auto"},
    )
    for way in ways:
        assert texts(folder, draft, dtype=dtype, **way) == expected, way


def test_the_assistant_of_another_target_is_refused(tmp_path: Path) -> None:
    folder, draft = add_words(write_family(tmp_path / "a", "gemma4")), tmp_path / "b"
    write_assistant(draft, folder, global_head_dim=24)
    with pytest.raises(CheckpointError, match="the assistant has key heads"):
        opened(folder, draft)
    other = add_words(write_family(tmp_path / "c", "gemma3_text"))
    with pytest.raises(ConfigError, match="is no Gemma 4"):
        opened(other, draft)


def test_suppressed_tokens_are_never_written(tmp_path: Path) -> None:
    """Whatever drafts, as with transformers' `suppress_tokens`; other tokens keep their order."""
    folder = add_words(write_family(tmp_path / "a", "gemma4_shared"))
    before = texts(folder, None, drafter="none")
    banned = sorted({*before[0][:2], *before[1][:2]})
    (folder / "generation_config.json").write_text(json.dumps({"suppress_tokens": banned}))
    after = texts(folder, None, drafter="none")
    assert not {token for ids in after for token in ids} & {*banned}
    assert texts(folder, None, drafter="recycling", k=3, tree_nodes=8) == after
    drawn = SamplingParams(max_tokens=24, temperature=2.0, seed=1, logprobs=True, ignore_eos=True)
    with closing(opened(folder, None, drafter="ngram", k=3)) as llm:
        (result,) = llm.generate([PROMPTS[0]], drawn)
    assert len(result.token_ids) == 24
    assert not {*result.token_ids} & {*banned}
