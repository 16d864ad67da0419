"""The weights that everybody loads: checkpoint folders, and GGUF files made from them once.

Tier A is the embedded pair. Tier B is its target at the cost of 0.4 billion parameters, which
writes the same text, with the same draft. What is made is kept under names that tell its weights,
so a later run finds it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from outrider.bench.machine import weights_digest
from outrider.bench.peers.contestants import FORMS, Weights
from outrider.core.errors import CheckpointError, MachineError
from outrider.lab.gguf_export import Wish, export
from outrider.lab.inflate import shape_called
from outrider.lab.inflate_files import write_inflated
from outrider.models.hf_config import read_config
from outrider.models.loading import resolve

TIERS = ("a", "b")
SHAPE = "0.4b"
# The nearest of llama.cpp's own rules; prompts travel as ids, so no rule is ever used.
PRE_TOKENIZER = "gpt-2"


@dataclass(frozen=True, slots=True)
class Store:
    """Where files that are made are kept, and who is told of it."""

    folder: Path
    tell: Callable[[str], None]


def tier_folders(tier: str, store: Store) -> tuple[Path, Path]:
    """Target and draft of `tier` (a or b), made if need be."""
    target, draft = resolve("outrider/embedded"), resolve("outrider/embedded-draft")
    return (_inflated(target, store) if tier == "b" else target), draft


def weights_of(
    target: Path, draft: Path | None, forms: Iterable[str], store: Store, *, gguf: bool
) -> Weights:
    """What contestants of these formats load; GGUF files only where `gguf` asks for them. Raises
    CheckpointError if the target is no model."""
    config = read_config(target)
    names = tuple(name for form in forms for name in FORMS[form]) if gguf else ()
    files: dict[Path, dict[str, Path]] = {target: {}, **({draft: {}} if draft else {})}
    refused: dict[str, str] = {}
    for name in names:
        for source, found in files.items():
            try:
                found[name] = _file(source, name, store)
            except (CheckpointError, MachineError) as error:
                refused[name] = f"no GGUF file of {source.name}: {error}"
    return Weights(
        target=target,
        draft=draft,
        vocab_size=config.vocab_size,
        stop_ids=tuple(config.stop_ids),
        target_gguf=files[target],
        draft_gguf=files[draft] if draft else {},
        no_gguf=refused,
    )


def digests(weights: Weights) -> dict[str, str]:
    """Fingerprints of the checkpoints, by their part."""
    draft = {"draft": weights_digest(weights.draft)} if weights.draft else {}
    return {"target": weights_digest(weights.target), **draft}


def _inflated(source: Path, store: Store) -> Path:
    place = store.folder / f"inflated-{SHAPE}-{weights_digest(source)}"
    if not (place / "config.json").exists():
        # Half a folder of a run that was stopped is in the way.
        for left in place.glob("*"):
            left.unlink()
        store.tell(f"inflating to {SHAPE}, once")
        for _ in write_inflated(source, shape_called(SHAPE), place, torch.bfloat16):
            pass
    return place


def _file(source: Path, form: str, store: Store) -> Path:
    try:
        store.folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise MachineError(
            f"{store.folder} cannot be made: {error.strerror or error}.",
            hint="name another folder with --peers-folder",
        ) from None
    path = store.folder / f"{source.name}-{weights_digest(source)}-{form}.gguf"
    if not path.exists():
        store.tell(f"writing {path.name}, once")
        for _ in export(source, path, Wish(form=form, pre_tokenizer=PRE_TOKENIZER)):
            pass
    return path
