"""What is dropped of a prompt, and what the rest says, as transformers sees it.

The attention weights that transformers reports are the votes; a mask over its dense attention, one
for each head, is the compacted model. With one layer no key depends on what another head dropped.

Shapes:  H = query heads, T = tokens, G = KV heads, B = chosen keys, M = budget, D = head size.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from doubles.rig import Request, Rig, model_drafter
from doubles.tiny_checkpoints import Variant, random_llama, variant, write_checkpoint
from outrider.cache.pool import POOLED, Keep
from outrider.core.clock import host_rows
from outrider.core.params import SamplingParams
from outrider.core.protocols import DraftNeeds, StepRow
from outrider.drafters.none import NoDrafter
from outrider.models.decoder import LoadOptions, ModelCapacity
from outrider.models.llama import LlamaModel
from outrider.models.loading import load_model
from outrider.plugins.compaction import Compaction

KEEP = Keep(budget=20, window=6)
TEXT = [(7 * i * i + 3 * i) % 96 for i in range(47)]
LLAMA, CAPACITY = variant("llama2"), ModelCapacity(num_slots=512, page_size=4)


def transformers_model(folder: Path) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import transformers  # pyright: ignore[reportMissingTypeStubs]

        transformers.utils.logging.disable_progress_bar()
        loader: Any = transformers.AutoModelForCausalLM
        return loader.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        ).eval()


def chosen(weights_HTT: Tensor, num_kv_heads: int) -> Tensor:
    """kept_GM by the attention weights of one layer."""
    before = weights_HTT.shape[-1] - KEEP.window
    votes_HT = weights_HTT[:, before:].sum(1)[:, :before]
    votes_GT = votes_HT.view(num_kv_heads, -1, before).mean(1)
    pooled_GT = functional.avg_pool1d(votes_GT, POOLED, stride=1, padding=POOLED // 2)
    best_GB = pooled_GT.topk(KEEP.budget - KEEP.window).indices.sort().values
    window_W = torch.arange(before, weights_HTT.shape[-1]).expand(num_kv_heads, -1)
    return torch.cat([best_GB, window_W], dim=1)


def load(folder: Path) -> LlamaModel:
    model = load_model(folder, LoadOptions(capacity=CAPACITY, device="cpu"))
    assert isinstance(model, LlamaModel)
    return model


def rows_of(kept_GM: Tensor, all_2GTD: Tensor) -> Tensor:
    heads_G1 = torch.arange(len(kept_GM))[:, None]
    return all_2GTD[:, heads_G1, kept_GM]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama2", "wide_heads", "qwen3", "one_kv_head"])
def test_the_kept_keys_are_those_with_the_weight(name: str, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, variant(name))
    theirs, ours = transformers_model(folder), load(folder)
    with torch.no_grad():
        weights = theirs(torch.tensor([TEXT]), output_attentions=True).attentions
    ours.state.open(0, ())
    ours.step([StepRow.chain(0, TEXT, logits_from=len(TEXT))], DraftNeeds())
    ours.state.commit({0: range(len(TEXT))})
    before = ours.state.read(0).clone()
    ours.compact(0, KEEP)
    after = ours.state.read(0)
    for depth, weights_1HTT in enumerate(weights):
        kept_GM = chosen(weights_1HTT[0], ours.config.num_kv_heads)
        assert torch.equal(after[depth], rows_of(kept_GM, before[depth]))


def masked_greedy(theirs: Any, kept_GM: Tensor, num_heads: int, num_tokens: int) -> list[int]:
    """Greedy text of dense attention in which rows from the prompt's last token on see, of the
    prompt before it, what was kept."""
    text, end = list(TEXT), len(TEXT) - 1
    kept_HM = kept_GM.repeat_interleave(num_heads // len(kept_GM), 0)
    for _ in range(num_tokens):
        size = len(text)
        sees_HTT = torch.ones(num_heads, size, size).tril().bool()
        sees_HTT[:, end:, :end] = False
        for head, places in enumerate(host_rows(kept_HM)):
            sees_HTT[head, end:, places] = True
        mask_1HTT = torch.zeros(1, num_heads, size, size)
        mask_1HTT.masked_fill_(~sees_HTT, torch.finfo(torch.float32).min)
        with torch.no_grad():
            logits_1TV = theirs(torch.tensor([text]), attention_mask=mask_1HTT).logits
        text.append(int(logits_1TV[0, -1].argmax()))
    return text[len(TEXT) :]


def our_texts(model: LlamaModel, num_tokens: int) -> Iterator[list[int]]:
    params = SamplingParams(max_tokens=num_tokens)
    draft = random_llama(seed=3, capacity=CAPACITY)
    for drafter, chunk in ((NoDrafter(), 64), (NoDrafter(), 5), (model_drafter(draft), 9)):
        rig = Rig(model, drafter, chunk=chunk, compaction=Compaction(KEEP))
        yield rig.run([Request(TEXT, params)])[0]


@pytest.mark.slow
def test_the_text_is_that_of_attention_under_a_mask(tmp_path: Path) -> None:
    one = Variant("one_layer", {**LLAMA.changes, "num_hidden_layers": 1, "num_key_value_heads": 2})
    folder = write_checkpoint(tmp_path, one)
    theirs, ours = transformers_model(folder), load(folder)
    with torch.no_grad():
        (weights_1HTT,) = theirs(torch.tensor([TEXT[:-1]]), output_attentions=True).attentions
    kept_GM = chosen(weights_1HTT[0], 2)
    wanted = masked_greedy(theirs, kept_GM, weights_1HTT.shape[1], 16)
    assert wanted != Rig(ours).run([Request(TEXT, SamplingParams(max_tokens=16))])[0]
    for text in our_texts(ours, 16):
        assert text == wanted
