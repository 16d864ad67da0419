"""What every run opens before its recipe is made: folder, device, text, and the target's exam.

A drafter is asked about text that the target writes, so that is the text to learn from where there
is time to write it; with the student's own text it learns to go on from its own mistakes (on-policy
distillation: Agarwal et al., 2024, "On-policy distillation of language models").
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from outrider.api.llm import LLM
from outrider.api.tokenizer import Tokenizer
from outrider.core.clock import host_ints
from outrider.core.config import EngineConfig
from outrider.core.errors import ConfigError
from outrider.core.files import FileKind, read_text, writing
from outrider.core.params import SamplingParams
from outrider.kernels.operators import pick_device
from outrider.models.loading import prepare_torch, resolve
from outrider_lab.train.data import Heard, find_files, unheard
from outrider_lab.train.folder import (
    STATE,
    Claimed,
    Made,
    claim,
    fill,
    model_card,
    provenance_record,
)
from outrider_lab.train.loop import Trainer, TrainJob, TrainPlan, TrainRecipe
from outrider_lab.train.target import Exam, FrozenTarget, HeldOut, read_decoder_config
from outrider_lab.train.tokens import TokenFiles, TokenOptions, Windows, tokenised

# Texts that are written in one call.
_TOGETHER = 64
# And those that the engine runs at once.
_BATCH = 16


def continue_greedily(
    model: Path | str, prompts: Sequence[str], *, num_tokens: int, device: str = "auto"
) -> tuple[HeldOut, ...]:
    """Each prompt and the model's greedy text after it, without speculation."""
    with closing(_plain(model, device)) as llm:
        ids = [tuple(ids) for ids in llm.tokenizer.encode_batch(prompts)]
        fitting = [one for one in ids if one and len(one) + num_tokens <= llm.spec.max_tokens]
        results = llm.generate(fitting, SamplingParams(max_tokens=num_tokens))
        return tuple(
            HeldOut((*prompt, *result.token_ids), len(prompt))
            for prompt, result in zip(fitting, results, strict=True)
        )


def write_texts(
    model: Path | str,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    *,
    device: str = "auto",
) -> list[list[int]]:
    """Each prompt of token ids with what the model writes after it; text i draws with seed
    `params.seed` + i."""
    each = [params.numbered(place) for place in range(len(prompts))]
    with closing(_plain(model, device)) as llm:
        return _written(llm, prompts, each)


@dataclass(frozen=True, slots=True)
class WrittenText:
    """Text of a model's own, in whole windows; `digest` says what it was written after."""

    ids: NDArray[np.integer[Any]]
    digest: str


def written_by(
    model: Path,
    given: Windows,
    num_tokens: int,
    folder: Path,
    *,
    device: str = "auto",
    heard: Heard = unheard,
) -> WrittenText:
    """About `num_tokens` in windows of which the first quarter is given and the rest written, every
    other one greedily and the others drawn at temperature 1.

    It is added to a file in `folder` as it comes, so a run that was killed goes on writing.
    """
    facts = (given.digest, given.window, given.seed, str(model))
    digest = hashlib.sha256(repr(facts).encode()).hexdigest()[:16]
    path = folder / f"written-{digest[:8]}.bin"
    num_rows = max(1, num_tokens // given.window)
    row_bytes = given.window * given.ids.dtype.itemsize
    num_there = path.stat().st_size // row_bytes if path.is_file() else 0
    with path.open("r+b" if path.is_file() else "wb") as stream, ExitStack() as stack:
        stream.seek(num_there * row_bytes)
        llm: LLM | None = None
        for first in range(num_there, num_rows, _TOGETHER):
            heard("writing the target's own text", first / num_rows)
            # Loaded only if there is something to write.
            llm = llm or stack.enter_context(closing(_plain(model, device)))
            rows = _write_rows(llm, given, range(first, min(first + _TOGETHER, num_rows)))
            stream.write(np.asarray(rows, dtype=given.ids.dtype).tobytes())
            stream.flush()
    ids = np.memmap(path, dtype=given.ids.dtype, mode="r", shape=(num_rows * given.window,))
    return WrittenText(ids, f"{digest}-{num_rows}")


def _write_rows(llm: LLM, given: Windows, numbers: Iterable[int]) -> list[list[int]]:
    num_given = max(1, given.window // 4)
    params = [
        SamplingParams(
            max_tokens=given.window - num_given,
            temperature=float(number % 2),
            seed=number,
            ignore_eos=True,
        )
        for number in numbers
    ]
    return _written(llm, [host_ints(given.at(one.rng_seed)[:num_given]) for one in params], params)


def _written(
    llm: LLM, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams]
) -> list[list[int]]:
    results = llm.generate(list(prompts), params)
    return [[*prompt, *result.token_ids] for prompt, result in zip(prompts, results, strict=True)]


def _plain(model: Path | str, device: str) -> LLM:
    return LLM(model, config=EngineConfig(drafter="none", device=device, batch_size=_BATCH))


M = TypeVar("M", bound=nn.Module)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunWish:
    """What a user says of any run. `words` name texts (data.py); `prompts` are those after which
    the target writes what figures are measured on, `exam_tokens` each. Where `written` is above 0,
    so many tokens that the target writes itself are learned from, and the texts are only what it
    goes on from."""

    folder: Path
    words: tuple[str, ...]
    plan: TrainPlan
    prompts: tuple[str, ...] = ()
    exam_tokens: int = 64
    k: int = 4
    batch_size: int = 4
    window: int = 256
    text: TokenOptions = field(default_factory=TokenOptions)
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
    plan: TrainPlan
    tokenizer: Tokenizer
    tokens: TokenFiles
    written: WrittenText | None = None

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

    def trainer(self, recipe: TrainRecipe[M]) -> Trainer[M]:
        job = TrainJob(
            recipe=recipe,
            batches=self.windows(),
            plan=self.plan,
            file=self.work / STATE,
            device=self.device,
        )
        return Trainer(job)

    def finish(
        self, trainer: Trainer[M], recipe: TrainRecipe[M], target: str, told: Mapping[str, object]
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
    config = read_decoder_config(folder)
    text = open_text(wish, folder, config.vocab_size)
    if wish.written:
        given = text.given()
        with writing(text.work):
            own = written_by(
                *(folder, given, wish.written, text.work), device=wish.device, heard=wish.heard
            )
        text = replace(text, written=own)
    texts = _exam_texts(wish, folder, text.work / "exam.json")
    longest = max([wish.window, *(len(one.ids) for one in texts)])
    frozen = FrozenTarget(
        folder, device=text.device, max_tokens=longest, bfloat16=text.plan.bfloat16
    )
    exam = Exam(texts, text.device, wish.k)
    return Session(text=text, target=frozen, exam=exam)


def _exam_texts(wish: RunWish, target: Path, path: Path) -> tuple[HeldOut, ...]:
    """The target's text after the prompts: written once a run, and kept."""
    asked = json.dumps([str(target), wish.exam_tokens, list(wish.prompts)])
    key = hashlib.sha256(asked.encode()).hexdigest()
    try:
        kept = cast("dict[str, Any]", json.loads(read_text(path, FileKind.RESULTS)))
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
    with writing(path):
        path.write_text(json.dumps({"key": key, "texts": pairs}), encoding="utf-8")
    return texts
