"""Drafts that a target has without being named: found with it, in the hub's cache, or made of it.

Drafter auto drafts with all that are found: the checkpoint's own MTP block, one folder of heads,
one draft model, and a copy of the target in fewer bits. Rounds choose among them by what was
measured (drafters/portfolio.py).

Of several heads those that were measured to gain most where they were made are used; heads that
were not measured count as plain decoding, and the own block comes before them: it was trained with
the target and costs least. Heads that were measured to lose do not join it. A draft model must give
every id the target's meaning and have at most half of the target's weights. Of several the smallest
is used, and those next to the target precede those of the cache. Names and sizes are compared
first, since a tokenizer takes a moment to read.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from outrider.api.tokenizer import Tokenizer, first_differences
from outrider.core.config import EngineConfig
from outrider.core.errors import OutriderError
from outrider.core.plugins import AUTO, COPY, KINDS, MODEL
from outrider.core.resolve import can_join
from outrider.core.spec import DecoderConfig, Scheme
from outrider.drafters.common.draft_model import why_no_copy
from outrider.models.checkpoint import CONFIG, Checkpoint, open_checkpoint, scheme_in
from outrider.models.families import (
    DELTA_FAMILIES,
    FAMILIES,
    NUMBERED_MTP,
    model_type_of,
    read_config,
)
from outrider.models.heads import find_heads, has_own_mtp, kind_of, own_mtp_depth, worth_of
from outrider.models.names import cached_models

# A draft model that is not this much smaller costs more than it gains.
MOST_OF_TARGET = 0.5
# The drafter that reads the checkpoint's own MTP block.
OWN_BLOCK = "mtp"
# Families whose decoders share their tables with heads.
_WITH_HEADS = (*NUMBERED_MTP, *DELTA_FAMILIES)
# Tables of one vocabulary differ by no more than this share of their rows: padding.
_MOST_PADDING = 1 / 16
# Most folders of one parent folder that are searched; one with more does not hold models.
_MOST_FOLDERS = 200


@dataclass(frozen=True, slots=True)
class FoundDraft:
    """The folder with the draft, the kind of drafter that reads it, and words for the note. `gain`
    is the speed-up over plain decoding that its maker measured, None if it was not measured."""

    folder: Path
    kind: str
    words: str
    gain: float | None = None

    @property
    def measured(self) -> str:
        """The measured gain in words, to follow the name; "" without one."""
        return "" if self.gain is None else f" (measured where it was made: {self.gain:.2f} times)"


@dataclass(frozen=True, slots=True)
class FoundDrafts:
    """The drafts that a target has without being named, in the order of preference, and words on
    each that was looked at and does not draft, with the reason."""

    drafts: tuple[FoundDraft, ...] = ()
    passed: tuple[str, ...] = ()

    @property
    def words(self) -> str:
        """Words on all drafts."""
        *most, last = [one.words + one.measured for one in self.drafts]
        return f"{', '.join(most)} and {last}" if most else last

    @property
    def short(self) -> str:
        """The names of all drafts, and of look-ups."""
        *most, last = [one.words.partition(",")[0] for one in self.drafts]
        return f"{', '.join(['look-ups in the text', *most])} and {last}"


def found_drafts(
    folder: Path, target: DecoderConfig, config: EngineConfig, *, without: Collection[str] = ()
) -> FoundDrafts:
    """The drafts of the model in `folder`, except those of the kinds in `without`."""
    drafts: list[FoundDraft] = []
    passed: list[str] = []
    searches = is_searched(config)
    if searches:
        heads = _ranked_heads(folder)
        together = _together(heads, folder)
        drafts += [one for one in together if one.kind not in without]
        passed += [_why_not(other, together[0]) for other in heads if other not in together]
    model = companion_of(folder) if searches and MODEL not in without else None
    if model is not None:
        drafts.append(FoundDraft(model, MODEL, _where(model), _gain(model, MODEL)))
    if COPY not in without:
        no_copy = why_no_copy(folder, target, config)
        words = f"a copy of the model in {config.self_quantise}"
        drafts += [] if no_copy else [FoundDraft(folder, COPY, words)]
        passed += [f"a copy in 4 bits {no_copy}"] if no_copy else []
    if len(drafts) > 1 and not can_join(config):
        first, *rest = drafts
        passed += [f"{one.words}: several drafts need one lane and one process" for one in rest]
        drafts = [first]
    return FoundDrafts(tuple(drafts), tuple(passed))


def _ranked_heads(target: Path) -> list[FoundDraft]:
    """Heads of the target, those with the highest measured gain first."""
    found: list[FoundDraft] = []
    if _has_own_mtp(target):
        found.append(_own_block(target))
    if reads_heads(target):
        for kind, folder in find_heads(target).items():
            words = f"{KINDS[kind].needs_words} in {folder.name}, found with the target"
            found.append(FoundDraft(folder, kind, words, _gain(folder, kind)))
    return sorted(found, key=lambda one: -(1.0 if one.gain is None else one.gain))


def _own_block(target: Path) -> FoundDraft:
    words = "the checkpoint's own MTP block"
    return FoundDraft(target, OWN_BLOCK, words, _gain(target, OWN_BLOCK))


def _together(ranked: Sequence[FoundDraft], target: Path) -> list[FoundDraft]:
    """The ranked heads that draft: the best folder, and the own block of the `target`. Heads of the
    same kind do not join the block, nor heads that are known to lose."""
    own = [one for one in ranked if one.folder == target]
    others = [one for one in ranked if one.folder != target]
    if own:
        pays = [one for one in others if one.gain is None or one.gain > 1]
        others = [one for one in pays if one.kind != OWN_BLOCK]
    kept = (*own, *others[:1])
    return [one for one in ranked if one in kept]


def joining_block(target: Path, kinds: Sequence[str], config: EngineConfig) -> FoundDrafts:
    """The own MTP block of the `target` if it joins what was named, of these `kinds`: heads of one
    other kind."""
    is_heads = len(kinds) == 1 and KINDS[kinds[0]].source == "heads" and OWN_BLOCK not in kinds
    joins = is_heads and can_join(config) and _has_own_mtp(target)
    return FoundDrafts((_own_block(target),) if joins else ())


def _gain(folder: Path, kind: str) -> float | None:
    """The speed-up that the folder states for its best draft length; None if it states none."""
    worth = worth_of(folder, kind)
    return None if worth is None else worth.speed_up(worth.best_k)


def _why_not(other: FoundDraft, first: FoundDraft) -> str:
    """Words on heads that do not draft, since those that come `first` do."""
    known = "were measured to gain less" if other.gain is not None else "were not measured"
    same = first.gain is None and other.gain is None
    why = "come after the first kind" if same else known
    return f"{other.words}{other.measured}: one folder of heads drafts, and these {why}"


def is_searched(config: EngineConfig) -> bool:
    """True if drafts are searched for: in one process, unless a drafter was named, or a controller
    that never stops drafting."""
    left_to_us = config.drafter == AUTO and config.controller in (AUTO, "goodput")
    return left_to_us and config.most_k > 0 and config.tensor_parallel == 1


def why_none(target: Path, config: EngineConfig) -> str:
    """The reason for which the model in `target` has no draft in or next to its folder."""
    if not is_searched(config):
        only = "are searched for only with --controller auto or goodput, and in one process"
        return f"MTP blocks, heads and draft models {only}"
    lacks = "config.json announces an MTP block that is not in the files, and no"
    own = lacks if _announces_mtp(target) else "no MTP block,"
    return f"{own} heads or draft model was found with the target"


def _announces_mtp(target: Path) -> bool:
    with suppress(OutriderError):
        return reads_heads(target) and own_mtp_depth(target) > 0
    return False


def _has_own_mtp(target: Path) -> bool:
    """True if it has an MTP block; a hybrid may have one that its config.json does not announce."""
    with suppress(OutriderError):
        may = _announces_mtp(target) or model_type_of(open_checkpoint(target)) in DELTA_FAMILIES
        return may and has_own_mtp(target)
    return False


def reads_heads(target: Path) -> bool:
    """True if the model in `target` can share its tables with heads, as our own decoders can."""
    with suppress(OutriderError):
        checkpoint = open_checkpoint(target)
        return not checkpoint.is_gguf and model_type_of(checkpoint) in _WITH_HEADS
    return False


def _where(found: Path) -> str:
    """The name and location of the model in `found`, in the cache or elsewhere."""
    store = found.parents[1].name if found.parent.name == "snapshots" else ""
    name = store.removeprefix("models--").replace("--", "/") or found.name
    return f"draft model {name}, which {'is in the cache' if store else 'lies next to the target'}"


def companion_of(target: Path) -> Path | None:
    """The folder of a draft model for the model in `target`, None if there is none."""
    own = num_weight_bytes(target)
    # The newest snapshot of each model in the hub's cache.
    cached = _models_in(one.snapshot for one in cached_models() if one.snapshot is not None)
    for candidates in (models_beside(target), cached):
        sizes = {folder: num_weight_bytes(folder) for folder in candidates if folder != target}
        small = [folder for folder, size in sizes.items() if 0 < size <= MOST_OF_TARGET * own]
        for folder in sorted(small, key=lambda folder: (sizes[folder], folder)):
            if _runs(folder) and same_ids(target, folder):
                return folder
    return None


def same_ids(target: Path, draft: Path) -> bool:
    """True if every id means the same to both models; their tables may be padded differently."""
    with suppress(OutriderError):
        configs = [open_checkpoint(folder).document(CONFIG) for folder in (target, draft)]
        small, large = sorted(config.integer("vocab_size", 0, least=0) for config in configs)
        if kind_of(draft) == MODEL and large - small <= _MOST_PADDING * large:
            return not first_differences(Tokenizer.load(target), Tokenizer.load(draft), limit=1)
    return False


def num_weight_bytes(folder: Path) -> int:
    """Bytes of the model in `folder`, or in a GGUF file, that a pass reads. Published matrices that
    no kernel multiplies in their stored form become 16-bit numbers. Raises CheckpointError if one
    of several GGUF files is missing."""
    checkpoint = open_checkpoint(folder)
    num_bytes = checkpoint.num_bytes
    scheme = _scheme_of(checkpoint)
    if scheme is None or scheme.has_blocks:
        return num_bytes
    return num_bytes * 16 // min(scheme.bits)


def _scheme_of(checkpoint: Checkpoint) -> Scheme | None:
    with suppress(OutriderError):
        return scheme_in(checkpoint)
    return None


def _runs(folder: Path) -> bool:
    """True if one of our own decoders runs the model."""
    with suppress(OutriderError):
        return read_config(folder).family in FAMILIES
    return False


def models_beside(target: Path) -> list[Path]:
    """Folders of models within `target` and next to it."""
    return [*_models_in(target.glob("*/")), *_models_in(target.parent.glob("*/"))]


def _models_in(folders: Iterable[Path]) -> list[Path]:
    with suppress(OSError):
        some = islice(folders, _MOST_FOLDERS)
        return sorted(folder for folder in some if (folder / CONFIG).is_file())
    return []
