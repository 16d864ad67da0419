"""May these drafts be verified by this target: vocabularies, windows, positions, sizes, weights.

A draft model must give every id the meaning that the target gives it. Heads must have been trained
for this very target. What is wrong stops a pair, a caution may cost acceptance or length.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from shlex import quote

from outrider.api.tokenizer import Difference, Tokenizer, first_differences
from outrider.bench.drafters.heads import Remark, rope_in_words, size_remarks, weight_remarks
from outrider.core.errors import CheckpointError, OutriderError
from outrider.models.families import LlamaConfig
from outrider.models.heads import DraftKind, kind_of
from outrider.models.hf_config import read_config
from outrider.models.json_object import JsonObject
from outrider.models.loading import ALIASES, HEAD_ALIASES, resolve

# Enough to compare vocabularies; weights stay where they are.
_SMALL_FILES = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
]


@dataclass(frozen=True, slots=True)
class Side:
    """One model: tokens in its tokenizer, and ids that its law is over."""

    name: str
    num_tokens: int
    num_ids: int


@dataclass(frozen=True, slots=True)
class Fit:
    """`shared` is the share of the draft's tokens that the target spells alike, under any id. Heads
    (of a `kind` that is not "model") have the target's own tokens, perhaps a part of them."""

    kind: DraftKind
    target: Side
    draft: Side
    differences: tuple[Difference, ...]
    shared: float
    remarks: tuple[Remark, ...] = ()

    @property
    def same_ids(self) -> bool:
        """Whether a drafted id means the same to the target."""
        equal = self.kind != "model" or self.target.num_ids == self.draft.num_ids
        return equal and not self.differences

    @property
    def fits(self) -> bool:
        return self.same_ids and not self.wrong

    @property
    def wrong(self) -> list[str]:
        return [remark.text for remark in self.remarks if remark.wrong]

    @property
    def advice(self) -> str:
        flags = f"--target {quote(self.target.name)} --draft {quote(self.draft.name)}"
        if self.fits:
            return f"it fits: outrider generate {flags} PROMPT"
        if self.wrong:
            return (
                f"it does not fit: {self.wrong[0]}. `outrider draft suggest "
                f"{quote(self.target.name)}` says what does; `outrider train` makes a draft for a "
                "target of your own."
            )
        if self.differences:
            reason = "ids mean different tokens"
        else:
            reason = f"laws over {self.target.num_ids} and {self.draft.num_ids} ids do not compare"
        return (
            f"it does not fit as it is ({reason}). Either spell drafts anew, with {flags} "
            "--drafter bridge; or choose a draft of the target's family (outrider pairs); or "
            "draft without a model, with --drafter ngram."
        )


def compare(target: str, draft: str) -> Fit:
    """Reads configs and tokenizers, and of a draft whose weights are here, those too. Raises
    CheckpointError."""
    first = small_files(target)
    second = small_files(draft)
    kind = kind_of(second)
    return (
        _heads(target, first, draft, second)
        if kind != "model"
        else _models(target, first, draft, second)
    )


def _models(target: str, first: Path, draft: str, second: Path) -> Fit:
    ours, theirs = Tokenizer.load(first), Tokenizer.load(second)
    known, tokens = (set(map(_plain, t.vocabulary.values())) for t in (ours, theirs))
    return Fit(
        kind="model",
        target=Side(target, len(ours.vocabulary), _vocab_size(first)),
        draft=Side(draft, len(theirs.vocabulary), _vocab_size(second)),
        differences=tuple(first_differences(ours, theirs)),
        shared=len(tokens & known) / max(len(tokens), 1),
        remarks=(*_model_remarks(first, second), *_weights(second)),
    )


def _heads(target: str, first: Path, draft: str, second: Path) -> Fit:
    num_tokens, num_ids = len(Tokenizer.load(first).vocabulary), _vocab_size(first)
    config = JsonObject.read(second / "config.json")
    drafted = config.integer("draft_vocab_size", config.integer("vocab_size", num_ids))
    return Fit(
        kind=kind_of(second),
        target=Side(target, num_tokens, num_ids),
        draft=Side(draft, num_tokens, drafted),
        differences=(),
        shared=min(drafted / num_ids, 1.0),
        remarks=(*size_remarks(first, second), *_weights(second)),
    )


def _model_remarks(first: Path, second: Path) -> Iterator[Remark]:
    """Cautions: windows and positions of two models that run beside each other."""
    try:
        ours, theirs = read_config(first), read_config(second)
    except OutriderError as error:
        yield Remark(False, f"windows cannot be compared: {error}".rstrip("."))
        return
    if theirs.max_tokens < ours.max_tokens:
        yield Remark(
            False,
            f"the draft's window is {theirs.max_tokens} tokens and the target's "
            f"{ours.max_tokens}: no text of this pair is longer than the shorter one",
        )
    if not (isinstance(ours, LlamaConfig) and isinstance(theirs, LlamaConfig)):
        return
    if (ours.rope.kind, ours.rope.theta) != (theirs.rope.kind, theirs.rope.theta):
        yield Remark(
            False,
            f"the draft turns positions with {rope_in_words(theirs.rope)} and the target with "
            f"{rope_in_words(ours.rope)}: each reads its own, but they were trained for texts of "
            "other lengths, and acceptance may fall far into a text",
        )


def _weights(folder: Path) -> list[Remark]:
    if any(folder.glob("*.safetensors")):
        return weight_remarks(folder)
    return [Remark(False, "its weights are not here: only what describes them was compared")]


def _vocab_size(folder: Path) -> int:
    return JsonObject.read(folder / "config.json").integer("vocab_size")


def small_files(name: str) -> Path:
    """The folder of a model; of a hub model that is not cached, no weights are downloaded."""
    if name in (*ALIASES, *HEAD_ALIASES) or "/" not in name or Path(name).exists():
        return resolve(name)
    from huggingface_hub import snapshot_download  # pyright: ignore[reportUnknownVariableType]
    from huggingface_hub.errors import HFValidationError

    repo, _, revision = name.partition("@")
    try:
        found = snapshot_download(repo, revision=revision or None, allow_patterns=_SMALL_FILES)
    except (OSError, HFValidationError) as error:
        reason = (str(error) or "no reason given").splitlines()[0]
        raise CheckpointError(
            f"no model {name!r}: no such folder, and its tokenizer is not to be had from the hub "
            f"({reason})",
            hint="`outrider models list` shows what is on this machine",
        ) from None
    return Path(found)


def _plain(token: str) -> str:
    """Tokenizers mark a space in two ways."""
    return token.replace("\u2581", " ").replace("\u0120", " ")
