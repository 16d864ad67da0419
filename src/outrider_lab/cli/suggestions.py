"""What can draft for a target: found, not measured.

Suggestions come in the order in which they are worth trying: what was trained for this target, then
draft models that share its vocabulary, then the target itself in fewer bits, then its text. What is
not here yet says how to get it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from shlex import quote

from outrider.api.found import MOST_OF_TARGET, models_beside, num_weight_bytes, same_ids
from outrider.cli.models import LocalModel, local_models, read_spec, small_files
from outrider.core.errors import CheckpointError
from outrider.core.plugins import KINDS
from outrider.models.checkpoint import CONFIG, open_checkpoint
from outrider.models.families import DECODER_FAMILIES
from outrider.models.heads import find_heads, has_own_mtp, name_of, own_mtp_depth
from outrider.pairs.catalog import draft_of, list_pairs
from outrider_lab.cli.draft_fit import SMALL_FILES
from outrider_lab.train.target import read_decoder_config


@dataclass(frozen=True, slots=True, kw_only=True)
class Suggestion:
    """`draft` is what --draft names, None where the drafter needs nothing. `ready` says that it is
    on this machine."""

    drafter: str
    draft: str | None
    ready: bool
    reason: str
    command: str

    @property
    def contestant(self) -> str:
        """The word of `outrider bench drafters` for it."""
        return f"{self.drafter}={self.draft}" if self.draft else self.drafter


def suggestions(target: str) -> list[Suggestion]:
    """In the order in which they are worth trying. Raises CheckpointError if there is no such
    target."""
    folder = small_files(target, *SMALL_FILES)
    here = [model for model in local_models() if model.refusal is None]
    asked: list[Callable[[str, Path], Iterator[Suggestion]]] = [
        _own_mtp,
        _heads,
        partial(_pairs, here),
        partial(_local, here),
        _without_files,
        _from_packages,
        _training,
    ]
    found: dict[tuple[str, str | None], Suggestion] = {}
    for ask in asked:
        for one in ask(target, folder):
            found.setdefault((one.drafter, one.draft), one)
    return list(found.values())


def _generate(target: str, *flags: str) -> str:
    return " ".join(["outrider generate", f"--target {quote(target)}", *flags, "PROMPT"])


def _own_mtp(target: str, folder: Path) -> Iterator[Suggestion]:
    """Of a model that is not cached only the small files are here, and its config is believed."""
    announced = own_mtp_depth(folder) > 0
    here = any(folder.glob("*.safetensors"))
    there = has_own_mtp(folder) if here else announced
    if there or announced:
        yield Suggestion(
            drafter="mtp",
            draft=None,
            ready=here and there,
            reason="the checkpoint has an MTP block of its own, trained with it"
            if there
            else "config.json announces an MTP block, and its tensors are not in the files: fetch "
            "the whole checkpoint",
            command=_generate(target, "--drafter mtp"),
        )


def _heads(target: str, folder: Path) -> Iterator[Suggestion]:
    for kind, heads in find_heads(folder).items():
        name = name_of(heads)
        yield Suggestion(
            drafter=kind,
            draft=name,
            ready=True,
            reason=f"{kind} heads of the target's sizes lie beside it",
            command=_generate(target, f"--draft {quote(name)}"),
        )


def _pairs(here: Sequence[LocalModel], target: str, folder: Path) -> Iterator[Suggestion]:
    """By the target's hub id, or by a folder that has its name."""
    names = {target.lower(), Path(target).name.lower()} if folder.exists() else {target.lower()}
    ready = {model.name for model in here}
    for pair in list_pairs():
        known = pair.target_model_id.lower()
        if not pair.supported or not names & {known, known.rpartition("/")[2]}:
            continue
        draft = pair.draft_to_load
        if draft is None:
            # The target drafts for itself, which is suggested of every target.
            continue
        flags = [f"--draft {quote(draft)}"]
        flags += [f"--drafter {pair.drafter}"] if pair.drafter != "auto" else []
        built_in = draft_of(target) == draft
        yield Suggestion(
            drafter="model" if pair.drafter == "auto" else pair.drafter,
            draft=draft,
            ready=draft in ready,
            reason=f"known pair {pair.pair_name}: {pair.notes}",
            command=_generate(target, *([] if built_in else flags)),
        )


def _local(here: Sequence[LocalModel], target: str, folder: Path) -> Iterator[Suggestion]:
    """Smaller models on this machine with the same vocabulary."""
    own_bytes = num_weight_bytes(folder)
    known = {model.folder: model.name for model in here}
    beside = {place: str(place) for place in models_beside(folder)}
    for place, name in (beside | known).items():
        if place == folder or not own_bytes:
            continue
        share = num_weight_bytes(place) / own_bytes
        if not 0 < share <= MOST_OF_TARGET or not same_ids(folder, place):
            continue
        yield Suggestion(
            drafter="model",
            draft=name,
            ready=True,
            reason=f"on this machine, the same vocabulary, {100 * share:.0f} % of the target's "
            "bytes",
            command=_generate(target, f"--draft {quote(name)}"),
        )


# Bits a weight below which a copy in 4 bits, which has five with its scales, saves next to nothing.
_FEW_BITS = 7


def _without_files(target: str, folder: Path) -> Iterator[Suggestion]:
    """Copies of the target first, then drafters that read its text."""
    family = open_checkpoint(folder).document(CONFIG).text("model_type", "")
    advised = (kind for kind in KINDS.values() if kind.advice)
    for kind in sorted(advised, key=lambda one: one.source != "copy"):
        if kind.fewer_bits and _has_few_bits(target, folder):
            continue
        if kind.source != "copy" or family in DECODER_FAMILIES:
            yield Suggestion(
                drafter=kind.name,
                draft=None,
                ready=True,
                reason=kind.advice,
                command=_generate(target, f"--drafter {kind.name}"),
            )


def _has_few_bits(target: str, folder: Path) -> bool:
    """Whether a copy of the target in 4 bits would hardly be smaller than its files."""
    try:
        num_parameters = read_spec(target).num_parameters
    except CheckpointError:
        return False
    return 0 < 8 * num_weight_bytes(folder) < _FEW_BITS * num_parameters


def _from_packages(target: str, folder: Path) -> Iterator[Suggestion]:
    del folder
    for kind in KINDS.every():
        if kind.looks_up and not kind.must_have:
            yield Suggestion(
                drafter=kind.name,
                draft=None,
                ready=True,
                reason=f"comes with package {KINDS.package(kind.name)}, and drafts from the text",
                command=_generate(target, f"--drafter {kind.name}"),
            )


def _training(target: str, folder: Path) -> Iterator[Suggestion]:
    try:
        read_decoder_config(folder)
    except CheckpointError:
        # It cannot teach.
        return
    yield Suggestion(
        drafter="model",
        draft="my-draft",
        ready=False,
        reason="a draft model trained on your own text, on this machine",
        command=f"outrider train draft my-draft TEXTS --target {quote(target)}",
    )
    if "eagle" not in find_heads(folder):
        yield Suggestion(
            drafter="eagle",
            draft="my-eagle",
            ready=False,
            reason="EAGLE heads trained on your own text; mtp, medusa and block are made alike",
            command=f"outrider train eagle my-eagle TEXTS --target {quote(target)}",
        )
