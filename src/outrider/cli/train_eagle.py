"""`outrider train eagle`: heads that draft from a target's hidden states, beside it as it is."""

from __future__ import annotations

from outrider.cli.call import Call
from outrider.cli.train import open_drafter, train
from outrider.cli.train_options import EagleOptions


def eagle(call: Call[EagleOptions]) -> int:
    """Train EAGLE heads for --target."""
    from outrider.train.eagle import eagle_recipe

    options = call.options
    session = open_drafter(call)
    recipe = eagle_recipe(
        session,
        draft_vocab_size=options.draft_vocab,
        ffn_size=options.ffn,
        num_turns=options.turns,
        dtype=options.dtype,
    )
    return train(call, session.text, recipe, target=options.target)
