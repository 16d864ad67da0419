"""`outrider train mtp`: blocks for multi-token prediction, beside a target that stays as it is."""

from __future__ import annotations

from outrider.cli.call import Call
from outrider.cli.train import open_drafter, train
from outrider.cli.train_options import MtpOptions


def mtp(call: Call[MtpOptions]) -> int:
    """Train MTP blocks for --target."""
    from outrider.train.mtp import mtp_recipe

    options = call.options
    session = open_drafter(call)
    recipe = mtp_recipe(
        session, num_blocks=options.blocks, num_turns=options.turns, dtype=options.dtype
    )
    return train(call, session.text, recipe, target=options.target)
