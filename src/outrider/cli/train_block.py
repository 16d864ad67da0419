"""`outrider train block`: a net that guesses several places in one pass, and how sure it is."""

from __future__ import annotations

from outrider.cli.call import Call
from outrider.cli.train import open_drafter, train
from outrider.cli.train_options import BlockOptions


def block(call: Call[BlockOptions]) -> int:
    """Train a block net for --target."""
    from outrider.train.block import block_recipe, block_sizes

    options = call.options
    session = open_drafter(call)
    sizes = block_sizes(
        session.target.config,
        num_places=options.places,
        num_context=options.context_tokens,
        num_layers=options.layers,
    )
    recipe = block_recipe(session, sizes, dtype=options.dtype)
    return train(call, session.text, recipe, target=options.target)
