"""From a user's wishes to recipes of whole models: a draft for a target, a model from scratch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor

from outrider.api.tokenizer import Tokenizer, first_differences
from outrider.core.clock import host_rows
from outrider.core.errors import ConfigError, VocabularyError
from outrider.core.params import SamplingParams
from outrider.kernels.operators import DTYPES
from outrider.models.checkpoint import CONFIG, open_checkpoint
from outrider.models.configs import LlamaConfig
from outrider.models.loading import resolve
from outrider_lab.train.draft_model import DraftRecipe, PretrainRecipe
from outrider_lab.train.folder import fill, tokenizer_files
from outrider_lab.train.hybrid import NUM_KEPT, HybridRecipe, Teacher
from outrider_lab.train.llama_module import read_llama_config
from outrider_lab.train.loop import Export, TrainRecipe
from outrider_lab.train.losses import DistributionCache
from outrider_lab.train.recipe import of_session
from outrider_lab.train.session import RunWish, Session, TextSession, open_text, write_texts
from outrider_lab.train.shapes import draft_of, small_hybrid, small_llama
from outrider_lab.train.target import FrozenTarget, read_decoder_config
from outrider_lab.train.tokens import tensor_of

# Held-out windows that a figure of a language model is the mean of.
_HELD_OUT_WINDOWS = 32
_START = "begin from a draft of the target's own family, or leave --start out"
_TEACHER = "name the teacher with --tokenizer as well, or leave --teacher out"


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftWish:
    """`start` names a model to begin from; then sizes are its own. 0 leaves a size to the target.
    `temperature` is that of the student's own text, which `on_policy` of the steps learn from."""

    hidden_size: int = 0
    num_layers: int = 0
    start: str = ""
    reverse: float = 0.0
    on_policy: float = 0.0
    temperature: float = 1.0
    dtype: str = "bfloat16"


@dataclass(frozen=True, slots=True, kw_only=True)
class PretrainWish:
    """`tokenizer` is a model, or a folder with a tokenizer.json; `family` llama or hybrid."""

    tokenizer: str
    family: str = "llama"
    teacher: str = ""
    hidden_size: int
    num_layers: int
    dtype: str = "bfloat16"


def draft_recipe(session: Session, wish: DraftWish) -> DraftRecipe:
    """Raises VocabularyError if `start` reads ids differently from the target."""
    text, target = session.text, session.target
    start = resolve(wish.start) if wish.start else None
    config = draft_of(target.config, hidden_size=wish.hidden_size, num_layers=wish.num_layers)
    if start is not None:
        _check_vocabulary(text.tokenizer, start, target.config.vocab_size, _START)
        config = read_llama_config(start)
    return DraftRecipe(
        **of_session(session, wish.dtype),
        config=config,
        cache=_distributions(text, NUM_KEPT),
        reverse=wish.reverse,
        on_policy=wish.on_policy,
        num_kept=NUM_KEPT,
        start=start,
        raw={} if start is None else open_checkpoint(start).document(CONFIG).values,
        copied=tokenizer_files(target.folder),
        writer=own_writer(wish.temperature, text.wish.device) if wish.on_policy else None,
    )


def own_writer(temperature: float, device: str) -> Callable[[Export, Tensor, int, int], Tensor]:
    """A `Writer`: the student, as it is, goes on from given ids through the engine."""

    def write(export: Export, given_BT: Tensor, num_written: int, step: int) -> Tensor:
        rows = host_rows(given_BT)
        params = SamplingParams(
            max_tokens=num_written,
            temperature=temperature,
            ignore_eos=True,
            seed=step * len(rows),
        )
        # The engine chooses its own types; those of the loss must not reach it.
        plain = torch.autocast(given_BT.device.type, enabled=False)
        with TemporaryDirectory() as folder, plain:
            fill(Path(folder), export, "", {})
            texts = write_texts(folder, rows, params, device=device)
        return torch.tensor(texts, device=given_BT.device)

    return write


def open_pretrain(wish: RunWish, model: PretrainWish) -> tuple[TextSession, TrainRecipe[Any]]:
    """A model from scratch. Its window is eight times the one it learns in, as positions go on.

    Raises ConfigError for a teacher of a Llama, VocabularyError for one that reads ids differently.
    """
    if model.teacher and model.family != "hybrid":
        raise ConfigError(
            "a Llama that learns from another model is a draft of it.",
            hint=f"outrider train draft --target {model.teacher}, with --hidden and --layers",
        )
    folder = resolve(model.tokenizer)
    loaded = Tokenizer.load(folder)
    sizes = small_hybrid if model.family == "hybrid" else small_llama
    config = sizes(
        vocab_size=loaded.vocab_size,
        hidden_size=model.hidden_size,
        num_layers=model.num_layers,
        max_tokens=8 * wish.window,
        stop_ids=loaded.stop_ids,
    )
    if model.teacher:
        _check_vocabulary(loaded, resolve(model.teacher), config.vocab_size, _TEACHER)
    text = open_text(wish, folder, config.vocab_size)
    held_out_BT = _held_out(text, wish.window).to(text.device)
    shared: dict[str, Any] = {
        "held_out_BT": held_out_BT,
        "window": wish.window,
        "dtype": DTYPES[model.dtype],
        "copied": tokenizer_files(folder),
    }
    if isinstance(config, LlamaConfig):
        return text, PretrainRecipe(config=config, **shared)
    teacher = _teacher(text, model.teacher) if model.teacher else None
    return text, HybridRecipe(config=config, teacher=teacher, **shared)


def _teacher(text: TextSession, name: str) -> Teacher:
    windows, bfloat16 = text.windows(), text.plan.bfloat16
    target = FrozenTarget(
        resolve(name), device=text.device, max_tokens=windows.window, bfloat16=bfloat16
    )
    return Teacher(target, _distributions(text, NUM_KEPT))


def _distributions(text: TextSession, num_kept: int) -> DistributionCache:
    windows = text.windows()
    return DistributionCache(
        text.work,
        windows.digest[:8],
        num_windows=windows.num_windows,
        window=windows.window,
        num_kept=num_kept,
    )


def _held_out(text: TextSession, window: int) -> Tensor:
    ids = text.tokens.held_out
    num_windows = min(_HELD_OUT_WINDOWS, len(ids) // window)
    part = ids[: num_windows * window]
    return tensor_of(part, np.dtype(np.int64)).view(num_windows, window)


def _check_vocabulary(tokenizer: Tokenizer, other: Path, num_ids: int, hint: str) -> None:
    theirs, config = Tokenizer.load(other), read_decoder_config(other)
    differences = first_differences(tokenizer, theirs)
    if differences or config.vocab_size != num_ids:
        first = differences[0].token_id if differences else min(config.vocab_size, num_ids)
        raise VocabularyError(
            f"{other} and the target read ids differently, first id {first}.", hint=hint
        )
