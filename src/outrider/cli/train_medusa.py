"""`outrider train medusa`: heads that guess several tokens at once from a target's last state."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from outrider.cli.call import Call
from outrider.cli.train import open_drafter, train
from outrider.cli.train_options import MedusaOptions

if TYPE_CHECKING:
    from outrider.train.medusa import HeadInit


def medusa(call: Call[MedusaOptions]) -> int:
    """Train Medusa heads for --target."""
    from outrider.train.medusa import medusa_recipe

    options = call.options
    session = open_drafter(call)
    recipe = medusa_recipe(
        session,
        num_heads=options.heads,
        num_layers=options.layers,
        init=cast("HeadInit", options.init),
        dtype=options.dtype,
    )
    return train(call, session.text, recipe, target=options.target)
