"""`outrider draft check`: may this draft model draft for this target?"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from outrider.api.tokenizer import Difference, Tokenizer, first_differences
from outrider.cli.call import Call, needed
from outrider.cli.options import JsonOption
from outrider.cli.output import json_line, table
from outrider.core.errors import CheckpointError
from outrider.models.json_object import JsonObject
from outrider.models.loading import ALIASES, resolve

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
    """`shared` is the share of the draft's tokens that the target spells alike, under any id."""

    target: Side
    draft: Side
    differences: tuple[Difference, ...]
    shared: float

    @property
    def fits(self) -> bool:
        """Whether a drafted id means the same to the target."""
        return not self.differences and self.target.num_ids == self.draft.num_ids

    @property
    def advice(self) -> str:
        flags = f"--target {self.target.name} --draft {self.draft.name}"
        if self.fits:
            return f"it fits: outrider generate {flags} PROMPT"
        if self.differences:
            reason = "ids mean different tokens"
        else:
            reason = f"laws over {self.target.num_ids} and {self.draft.num_ids} ids do not compare"
        return (
            f"it does not fit as it is ({reason}). Either spell drafts anew, with {flags} "
            "--drafter bridge; or choose a draft of the target's family (outrider pairs); or "
            "draft without a model, with --drafter ngram."
        )


def check(call: Call[JsonOption]) -> int:
    """Compare the vocabularies of TARGET and DRAFT. Exit code 1 if they are not one."""
    target, draft = needed(call, "TARGET"), needed(call, "DRAFT", position=1)
    fit = compare(target, draft)
    if call.options.json:
        print(json_line(asdict(fit) | {"fits": fit.fits, "advice": fit.advice}))
        return 0 if fit.fits else 1
    sides = [("target", fit.target), ("draft", fit.draft)]
    rows = [(role, side.name, side.num_tokens, side.num_ids) for role, side in sides]
    print(table(rows, header=("", "model", "tokens", "ids in its law")))
    if fit.differences:
        print(f"\n{100 * fit.shared:.0f} % of the draft's tokens are tokens of the target.")
        print("The first ids that differ:")
        differing = [(d.token_id, _shown(d.first), _shown(d.second)) for d in fit.differences]
        print(table(differing, header=("id", "target", "draft")))
    print(f"\n{fit.advice}")
    return 0 if fit.fits else 1


def compare(target: str, draft: str) -> Fit:
    """Reads configs and tokenizers only. Raises CheckpointError."""
    folders = (small_files(target), small_files(draft))
    first, second = (Tokenizer.load(folder) for folder in folders)
    sizes = [JsonObject.read(folder / "config.json").integer("vocab_size") for folder in folders]
    known, tokens = (set(map(_plain, t.vocabulary.values())) for t in (first, second))
    return Fit(
        target=Side(target, len(first.vocabulary), sizes[0]),
        draft=Side(draft, len(second.vocabulary), sizes[1]),
        differences=tuple(first_differences(first, second)),
        shared=len(tokens & known) / max(len(tokens), 1),
    )


def small_files(name: str) -> Path:
    """The folder of a model; of a hub model that is not cached, no weights are downloaded."""
    if name in ALIASES or "/" not in name or Path(name).exists():
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


def _shown(token: str | None) -> str:
    return "(none)" if token is None else repr(token)
