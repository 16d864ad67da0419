"""Models with vocabularies of their own (the embedded draft under other ids, small tokenizers that
were trained on the packaged prompts), and translators between toy vocabularies.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import torch as safetensors_torch
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from doubles.tiny_checkpoints import (
    Variant,
    random_tensors,
    save_tensors,
    variant,
    write_checkpoint,
)
from outrider.api.tokenizer import Tokenizer
from outrider.models.loading import resolve
from outrider_lab.bench.workload import load_prompts

EMBEDDED = resolve("outrider/embedded")
EMBEDDED_DRAFT = resolve("outrider/embedded-draft")
END = "</s>"
PADDED_TOKENS = 300


def relabelled(folder: Path, *, num_merges: int | None = None) -> Path:
    """The embedded draft with its ids shuffled, in its tokenizer and its embedding alike.

    With fewer merges the same texts take more ids, all of which the model knows.
    """
    shutil.copytree(EMBEDDED_DRAFT, folder)
    path = folder / "tokenizer.json"
    data = json.loads(path.read_text("utf-8"))
    order = _shuffled(len(data["model"]["vocab"]))
    data["model"]["vocab"] = {token: order[i] for token, i in data["model"]["vocab"].items()}
    data["model"]["merges"] = data["model"]["merges"][:num_merges]
    for added in data["added_tokens"]:
        added["id"] = order[added["id"]]
    path.write_text(json.dumps(data), "utf-8")
    for name in ("config.json", "generation_config.json"):
        _edit(folder / name, bos_token_id=order[0], eos_token_id=order[0])
    tensors = cast("Any", safetensors_torch).load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.startswith("model.embed_tokens.")]:
        old_V = tensors[name]
        tensors[name] = torch.empty_like(old_V)
        tensors[name][torch.tensor(order)] = old_V
    save_tensors(folder / "model.safetensors", tensors)
    return folder


def byte_level(*, vocab_size: int = 600, with_lead: bool = False) -> Backend:
    """Byte pairs merged within words; with `with_lead` every text begins with `END`."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = cast("Any", pre_tokenizers.ByteLevel(add_prefix_space=False))
    backend.decoder = cast("Any", decoders.ByteLevel())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(_corpus(), trainer)
    if with_lead:
        template = processors.TemplateProcessing(single=f"{END} $A", special_tokens=[(END, 0)])
        backend.post_processor = cast("Any", template)
    return backend


def sentence_pieces(*, vocab_size: int = 600) -> Backend:
    """Pieces with a mark for spaces, one put before every text, and bytes for the unknown."""
    backend = Backend(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    marks = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    backend.normalizer = cast("Any", normalizers.Sequence(cast("Any", marks)))
    steps = [
        decoders.Replace("▁", " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
        decoders.Strip(" ", 1, 0),
    ]
    backend.decoder = cast("Any", decoders.Sequence(cast("Any", steps)))
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<unk>", END, *(f"<0x{byte:02X}>" for byte in range(256))],
        max_token_length=12,
        show_progress=False,
    )
    backend.train_from_iterator((line.replace(" ", "▁") for line in _corpus()), trainer)
    data = json.loads(backend.to_str())
    # Bytes are tokens like others; only a trainer asks for them as special ones.
    data["added_tokens"] = [added for added in data["added_tokens"] if added["id"] < 2]
    return Backend.from_str(json.dumps(data))


def tokenizer(make: Callable[[], Backend]) -> Tokenizer:
    return Tokenizer(make(), {}, ())


def random_checkpoint(folder: Path, backend: Backend, *, window: int = 256) -> Path:
    """A tiny random model that writes in `backend`'s vocabulary."""
    sizes = {"vocab_size": backend.get_vocab_size(), "max_position_embeddings": window}
    write_checkpoint(folder, Variant("random", {**sizes, "bos_token_id": 0, "eos_token_id": 0}))
    backend.save(str(folder / "tokenizer.json"))
    return folder


def padded_pair(folder: Path, target_rows: int, draft_rows: int) -> tuple[Path, Path]:
    """Tiny models over one tokenizer of `PADDED_TOKENS`, whose tables have so many rows. They agree
    somewhat. Rows beyond the tokenizer's end are likely in the target, and more so in the draft."""
    backend, shape = byte_level(vocab_size=PADDED_TOKENS), variant("llama2").config
    target = random_tensors({**shape, "vocab_size": max(target_rows, draft_rows)}, seed=1)
    noise = random_tensors({**shape, "vocab_size": max(target_rows, draft_rows)}, seed=2)
    draft = {name: tensor + noise[name] / 8 for name, tensor in target.items()}
    sides: list[Path] = []
    for name, rows, tensors, scale in (
        ("target", target_rows, target, 1), ("draft", draft_rows, draft, 4)
    ):  # fmt: skip
        place = random_checkpoint(folder / name, backend)
        _edit(place / "config.json", vocab_size=rows)
        head_VD = tensors["lm_head.weight"][:rows].clone()
        head_VD[PADDED_TOKENS:] *= scale
        embedding_VD = tensors["model.embed_tokens.weight"][:rows].clone()
        own = {"lm_head.weight": head_VD, "model.embed_tokens.weight": embedding_VD}
        save_tensors(place / "model.safetensors", {**tensors, **own})
        sides.append(place)
    return sides[0], sides[1]


@cache
def _corpus() -> tuple[str, ...]:
    texts = chain(load_prompts("humaneval")[:40], load_prompts("gsm8k")[:40])
    return tuple(line for text in texts for line in text.splitlines(keepends=True))


def _shuffled(count: int) -> Sequence[int]:
    order = list(range(count))
    random.Random(11).shuffle(order)
    return order


def _edit(path: Path, **changes: object) -> None:
    path.write_text(json.dumps(json.loads(path.read_text("utf-8")) | changes), "utf-8")


@dataclass(frozen=True, slots=True)
class Renaming:
    """Draft id (t + shift) % size for target id t."""

    size: int
    shift: int = 0

    def open(self) -> Renaming:
        return self

    def to_draft(self, tokens: Sequence[int]) -> list[int]:
        return [(token + self.shift) % self.size for token in tokens]

    def to_target(self, drafted: Sequence[int]) -> list[int]:
        return [(token - self.shift) % self.size for token in drafted]


@dataclass(frozen=True, slots=True)
class Digits:
    """Two draft ids, the digits to base `base`, for each of `size` target ids."""

    size: int
    base: int

    def open(self) -> Digits:
        return self

    def to_draft(self, tokens: Sequence[int]) -> list[int]:
        return [digit for token in tokens for digit in divmod(token, self.base)]

    def to_target(self, drafted: Sequence[int]) -> list[int]:
        pairs = zip(drafted[::2], drafted[1::2], strict=False)
        spelled: list[int] = []
        for high, low in pairs:
            if low >= self.base or high * self.base + low >= self.size:
                break
            spelled.append(high * self.base + low)
        return spelled


@dataclass(frozen=True, slots=True)
class Mute:
    """Finds no text in anything."""

    def open(self) -> Mute:
        return self

    def to_draft(self, tokens: Sequence[int]) -> list[int]:
        del tokens
        return []

    def to_target(self, drafted: Sequence[int]) -> list[int]:
        del drafted
        return []
