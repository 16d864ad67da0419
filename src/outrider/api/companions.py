"""Drafts that a target has without being named: found with it, or in the cache of the hub.

The checkpoint's own MTP block comes first: it was trained with the target and costs least. Heads of
the target's sizes within its folder or next to it follow, then draft models. A draft model must
give every id the target's meaning and have at most half of the target's weights. Of several the
smallest is used, and those next to the target precede those of the cache. Names and sizes are
compared first, since a tokenizer takes a moment to read.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from outrider.api.tokenizer import Tokenizer, first_differences
from outrider.core.config import EngineConfig
from outrider.core.drafter_kinds import AUTO, KINDS, MODEL
from outrider.core.errors import OutriderError
from outrider.models.documents import read_document
from outrider.models.draft_heads import find_heads, has_own_mtp, own_mtp_depth
from outrider.models.families import LLAMA_FAMILIES
from outrider.models.gguf.folder import parts_of
from outrider.models.heads import kind_of
from outrider.models.hf_config import FAMILIES, read_config, read_model_type
from outrider.models.hub_cache import cached_models
from outrider.models.published.scheme import Scheme, scheme_in
from outrider.models.qwen_hybrid_config import HYBRID_FAMILIES

# A draft model that is not this much smaller costs more than it gains.
MOST_OF_TARGET = 0.5
_CONFIG = "config.json"
_MTP = "mtp"
# Families whose decoders share their tables with heads.
_WITH_HEADS = (*LLAMA_FAMILIES, *HYBRID_FAMILIES)
# Tables of one vocabulary differ by no more than this share of their rows: padding.
_MOST_PADDING = 1 / 16
# Most folders of one parent folder that are searched; one with more does not hold models.
_MOST_FOLDERS = 200


@dataclass(frozen=True, slots=True)
class FoundDraft:
    """The folder with the draft, the kind of drafter that reads it, and words for the note."""

    folder: Path
    kind: str
    words: str


def found_draft(target: Path) -> FoundDraft | None:
    """The first draft found for the model in `target`; None if there is none."""
    if _has_own_mtp(target):
        return FoundDraft(target, _MTP, "the checkpoint's own MTP block")
    if reads_heads(target):
        for kind, folder in find_heads(target).items():
            words = f"{KINDS[kind].needs_words} in {folder.name}, found with the target"
            return FoundDraft(folder, kind, words)
    model = companion_of(target)
    return None if model is None else FoundDraft(model, MODEL, _where(model))


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
        may = _announces_mtp(target) or read_model_type(target) in HYBRID_FAMILIES
        return may and has_own_mtp(target)
    return False


def reads_heads(target: Path) -> bool:
    """True if the model in `target` can share its tables with heads, as our own decoders can."""
    with suppress(OutriderError):
        return not target.is_file() and read_model_type(target) in _WITH_HEADS
    return False


def _where(found: Path) -> str:
    """The name and location of the model in `found`, in the cache or elsewhere."""
    store = found.parents[1].name if found.parent.name == "snapshots" else ""
    name = store.removeprefix("models--").replace("--", "/") or found.name
    return f"{name}, which {'is in the cache' if store else 'lies next to the target'}"


def companion_of(target: Path) -> Path | None:
    """The folder of a draft model for the model in `target`, None if there is none."""
    own = num_weight_bytes(target)
    for candidates in (models_beside(target), _cached()):
        sizes = {folder: num_weight_bytes(folder) for folder in candidates if folder != target}
        small = [folder for folder, size in sizes.items() if 0 < size <= MOST_OF_TARGET * own]
        for folder in sorted(small, key=lambda folder: (sizes[folder], folder)):
            if _runs(folder) and same_ids(target, folder):
                return folder
    return None


def same_ids(target: Path, draft: Path) -> bool:
    """True if every id means the same to both models; their tables may be padded differently."""
    with suppress(OutriderError):
        small, large = sorted(_vocab_size(folder) for folder in (target, draft))
        if kind_of(draft) == MODEL and large - small <= _MOST_PADDING * large:
            return not first_differences(Tokenizer.load(target), Tokenizer.load(draft), limit=1)
    return False


def num_weight_bytes(folder: Path) -> int:
    """Bytes of the model in `folder`, or in a GGUF file, that a pass reads. Published matrices that
    no kernel multiplies in their stored form become 16-bit numbers. Raises CheckpointError if one
    of several GGUF files is missing."""
    files = parts_of(folder) if folder.is_file() else folder.glob("*.safetensors")
    num_bytes = sum(path.stat().st_size for path in files)
    scheme = None if folder.is_file() else _scheme_of(folder)
    if scheme is None or scheme.has_blocks:
        return num_bytes
    return num_bytes * 16 // min(scheme.bits)


def _scheme_of(folder: Path) -> Scheme | None:
    with suppress(OutriderError):
        return scheme_in(folder)
    return None


def _vocab_size(folder: Path) -> int:
    return read_document(folder / _CONFIG).integer("vocab_size", 0, least=0)


def _runs(folder: Path) -> bool:
    """True if one of our own decoders runs the model."""
    with suppress(OutriderError):
        return read_config(folder).family in FAMILIES
    return False


def models_beside(target: Path) -> list[Path]:
    """Folders of models within `target` and next to it."""
    return [*_models_in(target.glob("*/")), *_models_in(target.parent.glob("*/"))]


def _cached() -> list[Path]:
    """The newest snapshot of each model in the hub's cache."""
    return _models_in(one.snapshot for one in cached_models() if one.snapshot is not None)


def _models_in(folders: Iterable[Path]) -> list[Path]:
    with suppress(OSError):
        some = islice(folders, _MOST_FOLDERS)
        return sorted(folder for folder in some if (folder / _CONFIG).is_file())
    return []
