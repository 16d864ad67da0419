"""What every run opens before its recipe is made: folder, device, text, and the target's exam."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import nn

from outrider.api.tokenizer import Tokenizer
from outrider.core.errors import ConfigError
from outrider.core.files import Kind, read_text
from outrider.models.loading import pick_device, prepare_torch, resolve
from outrider.train.card import Made, model_card, provenance_record
from outrider.train.data import Heard, find_files, unheard
from outrider.train.exam import Exam, HeldOut
from outrider.train.folder import STATE, Claimed, claim, fill, unwritable
from outrider.train.llama_module import read_llama_config
from outrider.train.loop import Job, Plan, Recipe, Trainer
from outrider.train.target import FrozenTarget
from outrider.train.tokens import TokenFiles, Windows, Wish, tokenised
from outrider.train.writing import Written, continue_greedily, written_by

M = TypeVar("M", bound=nn.Module)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunWish:
    """What a user says of any run. `words` name texts (data.py); `prompts` are those after which
    the target writes what figures are measured on, `exam_tokens` each. Where `written` is above 0,
    so many tokens that the target writes itself are learned from, and the texts are only what it
    goes on from."""

    folder: Path
    words: tuple[str, ...]
    plan: Plan
    prompts: tuple[str, ...] = ()
    exam_tokens: int = 64
    k: int = 4
    batch_size: int = 4
    window: int = 256
    text: Wish = field(default_factory=Wish)
    written: int = 0
    device: str = "auto"
    threads: int = 0
    fresh: bool = False
    heard: Heard = unheard


@dataclass(frozen=True, slots=True, kw_only=True)
class TextSession:
    """A run's folder, device and text."""

    wish: RunWish
    claimed: Claimed
    device: torch.device
    plan: Plan
    tokenizer: Tokenizer
    tokens: TokenFiles
    written: Written | None = None

    @property
    def work(self) -> Path:
        return self.claimed.work

    def windows(self) -> Windows:
        """What is learned from."""
        if self.written is None:
            return self.given()
        return replace(self.given(), ids=self.written.ids, digest=self.written.digest)

    def given(self) -> Windows:
        """The texts as they were given."""
        wish = self.wish
        return Windows(
            self.tokens.tokens,
            self.tokens.record.digest[:16],
            wish.batch_size,
            wish.window,
            wish.plan.seed,
        )

    def trainer(self, recipe: Recipe[M]) -> Trainer[M]:
        job = Job(
            recipe=recipe,
            batches=self.windows(),
            plan=self.plan,
            file=self.work / STATE,
            device=self.device,
        )
        return Trainer(job)

    def finish(
        self, trainer: Trainer[M], recipe: Recipe[M], target: str, told: Mapping[str, object]
    ) -> None:
        """Write the folder, with its card. `told` is of the command and the machine."""
        made = Made(
            name=self.wish.folder.name,
            recipe=recipe.name,
            target=target,
            num_parameters=sum(one.numel() for one in trainer.module.parameters()),
            num_text_tokens=self.tokens.record.num_tokens,
            files=self.tokens.record.files,
            standing=trainer.standing,
            facts={**recipe.facts, **self.windows().facts, "written": self.wish.written},
            told=told,
        )
        fill(self.wish.folder, trainer.export(), model_card(made), provenance_record(made))


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """A run that learns from a target: its text, the frozen target, and the exam."""

    text: TextSession
    target_name: str
    target: FrozenTarget
    exam: Exam


def open_text(wish: RunWish, tokenizer_folder: Path, vocab_size: int) -> TextSession:
    """Claim the folder and tokenise the text.

    Raises ConfigError, VocabularyError, CheckpointError or MachineError, each with a hint.
    """
    wish.heard("reading the texts", 0.0)
    files = find_files(wish.words)
    claimed = claim(wish.folder, fresh=wish.fresh)
    with claimed.begun():
        prepare_torch(deterministic=False, threads=wish.threads)
        device = pick_device(wish.device)
        tokenizer = Tokenizer.load(tokenizer_folder)
        return TextSession(
            wish=wish,
            claimed=claimed,
            device=device,
            # Narrow numbers pay where there are units for them; on a CPU float32 is as fast or
            # faster.
            plan=replace(wish.plan, bfloat16=device.type == "cuda"),
            tokenizer=tokenizer,
            tokens=tokenised(files, tokenizer, vocab_size, claimed.work, wish.text, wish.heard),
        )


def open_session(wish: RunWish, target: str) -> Session:
    """`open_text` with the target's tokenizer, and the target itself."""
    folder = resolve(target)
    config = read_llama_config(folder)
    text = open_text(wish, folder, config.vocab_size)
    if wish.written:
        text = replace(
            text,
            written=_own_text(wish, folder, text),
        )
    texts = _exam_texts(wish, folder, text.work / "exam.json")
    longest = max([wish.window, *(len(one.ids) for one in texts)])
    frozen = FrozenTarget(
        folder, device=text.device, max_tokens=longest, bfloat16=text.plan.bfloat16
    )
    exam = Exam(texts, text.device, wish.k)
    return Session(text=text, target_name=target, target=frozen, exam=exam)


def _own_text(wish: RunWish, target: Path, text: TextSession) -> Written:
    try:
        return written_by(
            *(target, text.given(), wish.written, text.work), device=wish.device, heard=wish.heard
        )
    except OSError as error:
        raise unwritable(text.work, error) from error


def _exam_texts(wish: RunWish, target: Path, path: Path) -> tuple[HeldOut, ...]:
    """The target's text after the prompts: written once a run, and kept."""
    asked = json.dumps([str(target), wish.exam_tokens, list(wish.prompts)])
    key = hashlib.sha256(asked.encode()).hexdigest()
    try:
        kept = cast("dict[str, Any]", json.loads(read_text(path, Kind.RESULTS)))
        if kept["key"] == key:
            return tuple(HeldOut(tuple(ids), num_prompt) for ids, num_prompt in kept["texts"])
    except (OSError, ValueError, KeyError, TypeError):
        pass
    wish.heard("writing what the target says after the held-out prompts", 0.0)
    texts = continue_greedily(target, wish.prompts, num_tokens=wish.exam_tokens, device=wish.device)
    if wish.prompts and not texts:
        raise ConfigError(
            f"none of the {len(wish.prompts)} prompts fits the target's window with "
            f"{wish.exam_tokens} tokens after it.",
            hint="name shorter prompts with --prompts",
        )
    pairs = [[list(one.ids), one.num_prompt] for one in texts]
    try:
        path.write_text(json.dumps({"key": key, "texts": pairs}), encoding="utf-8")
    except OSError as error:
        raise unwritable(path, error) from error
    return texts
