"""Folders of drafters in the formats of publishers' libraries, and the drafts of these libraries.

`tests/golden/drafters` has a file for each case: config and shapes of a folder that the library
wrote, and its drafts for beginnings of TEXT with random weights, which `drawn` makes anew with the
same bits. `scripts/drafter_cases.py` writes the files.

Shapes:  P = tokens, L = captured layers, D = hidden size, K = drafted positions, V = vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from doubles.tiny_checkpoints import Variant, random_tensor, save_tensors, variant
from outrider.core.protocols import DraftNeeds, HiddenStates, StepRow
from outrider.models.llama import LlamaModel

CASES = Path(__file__).parents[1] / "golden" / "drafters"
TARGET = Variant(
    "drafted", {**variant("qwen3").changes, "num_hidden_layers": 8, "tie_word_embeddings": False}
)
TEXT = tuple((place * place * 7 + 3 * place + 5) % 89 for place in range(48))
# Lengths of beginnings of TEXT, up to the pending token. From one to the next the target accepts a
# part of a draft, all of it, and more than a draft has.
CUTS = (1, 2, 5, 6, 10, 30, 37)
MASK = 95


@dataclass(frozen=True, slots=True)
class Case:
    """A folder, and drafts by the length of the text. `ids` are those that are drafted, if not all.
    `probs_KV` are distributions for the last text: of all positions, or of the first one alone if
    later ones depend on drafted tokens."""

    name: str
    config: Mapping[str, Any]
    shapes: Mapping[str, tuple[int, ...]]
    drafts: Mapping[int, tuple[int, ...]]
    probs_KV: Tensor
    ids: tuple[int, ...] | None

    @classmethod
    def read(cls, path: Path) -> Case:
        values = json.loads(path.read_text())
        return cls(
            path.stem,
            values["config"],
            {name: tuple(shape) for name, shape in values["shapes"].items()},
            {int(length): tuple(draft) for length, draft in values["drafts"].items()},
            torch.tensor(values["probs"]),
            None if values["ids"] is None else tuple(values["ids"]),
        )

    def write(self, folder: Path) -> Path:
        """Write the folder as its library does."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config))
        save_tensors(folder / "model.safetensors", drawn(self.shapes, self.ids))
        return folder


def drawn(
    shapes: Mapping[str, Sequence[int]], ids: Sequence[int] | None, *, seed: int = 11
) -> dict[str, Tensor]:
    """Random tensors in the order of names, the same bits everywhere; tables of drafted `ids`."""
    rng = torch.Generator().manual_seed(seed)
    found: dict[str, Tensor] = {}
    for name in sorted(shapes):
        shape = tuple(shapes[name])
        if name == "d2t" and ids is not None:
            found[name] = torch.tensor(ids) - torch.arange(len(ids))
        elif name == "t2d" and ids is not None:
            found[name] = torch.zeros(shape, dtype=torch.bool)
            found[name][list(ids)] = True
        else:
            found[name] = random_tensor(name, shape, rng)
    return found


def states_of(target: LlamaModel, needs: DraftNeeds, seq_id: int, length: int) -> HiddenStates:
    """Read TEXT up to `length` tokens, after what was read; return the target's states."""
    state = target.state
    start = state.length(seq_id)
    if length > start:
        row = StepRow.chain(seq_id, TEXT[start:length], logits_from=length - start)
        target.step([row], needs)
        state.commit({seq_id: range(length - start)})
    return HiddenStates(length, partial(state.hidden, seq_id))
