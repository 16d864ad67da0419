"""What a folder of Medusa heads says of itself, and whether it fits a target.

The published form is a `config.json` with `medusa_num_heads` and `medusa_num_layers` beside
`medusa_lm_head.safetensors` (or `model.safetensors`), with tensors `0.0.linear.weight`,
`0.0.linear.bias`, `0.1.weight` (head, layer), or the same behind `medusa_head.`. Ours may leave
out the last matrix of a head, which is then the target's own, and may add `tree_chances`: at which
rank of a head's candidates text was found, counted when the heads were trained.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from outrider.core.errors import CheckpointError
from outrider.core.spec import ModelSpec
from outrider.core.tree import Chances
from outrider.models.json_object import JsonObject

MODEL_TYPE = "medusa"
_OTHER_TARGET = "choose heads that were trained for this very target, or train some: "
_TRAIN = "`outrider train medusa`"


@dataclass(frozen=True, slots=True)
class MedusaConfig:
    """`num_layers` residual blocks a head. `chances` are empty where nobody counted."""

    num_heads: int
    num_layers: int = 1
    chances: Chances = ()


def read_medusa_config(folder: Path, target: ModelSpec) -> MedusaConfig:
    """Raises CheckpointError for a file that is wrong or says it belongs to another target."""
    values = JsonObject.read(folder / "config.json")
    for key, size in (("hidden_size", target.hidden_size), ("vocab_size", target.vocab_size)):
        if values.has(key) and values.integer(key) != size:
            raise CheckpointError(
                f"{values.where}: the heads have {key} {values.integer(key)}, the target {size}.",
                hint=f"{_OTHER_TARGET}{_TRAIN}",
            )
    num_heads = values.integer("medusa_num_heads")
    return MedusaConfig(
        num_heads=num_heads,
        num_layers=values.integer("medusa_num_layers", 1),
        chances=_chances(values, num_heads),
    )


def config_values(config: MedusaConfig, target: ModelSpec) -> dict[str, object]:
    """What `config.json` holds; chances round to six digits, and none is 0."""
    return {
        "model_type": MODEL_TYPE,
        "medusa_num_heads": config.num_heads,
        "medusa_num_layers": config.num_layers,
        "hidden_size": target.hidden_size,
        "vocab_size": target.vocab_size,
        "tree_chances": {
            str(place): [round(share, 6) for share in shares if share >= 1e-6]
            for place, shares in enumerate(config.chances)
        },
    }


def _chances(values: JsonObject, num_heads: int) -> Chances:
    stored = values.child("tree_chances")
    if stored is None:
        return ()
    places = [stored.numbers(str(place)) for place in range(num_heads) if stored.has(str(place))]
    for shares in places:
        if any(a < b for a, b in pairwise(shares)) or sum(shares) > 1.001:
            raise CheckpointError(
                f"{stored.where} must hold shares that do not rise, 1 at most in all.",
                hint="remove tree_chances; trees are then shaped by the heads' own laws",
            )
    return places if places and places[0] else ()
