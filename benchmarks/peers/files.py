"""The weights of a tier, for everybody: checkpoint folders, and GGUF files made from them once.

Tier A is the embedded pair. Tier B is its target at the cost of 0.4 billion parameters, which
writes the same text, with the same draft.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from peers.cells import FORMS, Weights

from outrider.bench.fingerprint import weights_digest
from outrider.models.gguf_export import Wish, export
from outrider.models.inflate import shape_called
from outrider.models.inflate_files import write_inflated
from outrider.models.loading import resolve

SHAPE = "0.4b"
# The nearest of llama.cpp's own rules; prompts travel as ids, so no rule is ever used.
PRE_TOKENIZER = "gpt-2"


def weights_of(
    tier: str, forms: Iterable[str], folder: Path, tell: Callable[[str], None]
) -> Weights:
    """Find or make what `tier` (a or b) needs below `folder`."""
    target, draft = resolve("outrider/embedded"), resolve("outrider/embedded-draft")
    if tier == "b":
        target = _inflated(target, folder, tell)
    wanted = tuple(name for form in forms for name in FORMS[form])
    return Weights(target, draft, _files(target, wanted, folder), _files(draft, wanted, folder))


def _inflated(source: Path, folder: Path, tell: Callable[[str], None]) -> Path:
    place = folder / f"inflated-{SHAPE}-{weights_digest(source)}"
    if not (place / "config.json").exists():
        # Half a folder of a run that was stopped is in the way.
        for left in place.glob("*"):
            left.unlink()
        tell(f"inflating to {SHAPE}, once")
        for _ in write_inflated(source, shape_called(SHAPE), place, torch.bfloat16):
            pass
    return place


def _files(source: Path, names: tuple[str, ...], folder: Path) -> dict[str, Path]:
    """The file of each number format."""
    folder.mkdir(parents=True, exist_ok=True)
    digest = weights_digest(source)
    found = {name: folder / f"{source.name}-{digest}-{name}.gguf" for name in names}
    for name, path in found.items():
        if not path.exists():
            list(export(source, path, Wish(form=name, pre_tokenizer=PRE_TOKENIZER)))
    return found
