"""`outrider train` and its parts, as the table of verbs has them."""

from __future__ import annotations

from outrider.cli.train_options import (
    BlockOptions,
    DraftOptions,
    EagleOptions,
    MedusaOptions,
    MtpOptions,
    PretrainOptions,
    TokenizerOptions,
)
from outrider.cli.verb import Argument, Verb

_TRAINED = (
    Argument(name="FOLDER", text="Where to write it; a new folder, or that of a stopped run."),
    Argument(
        name="TEXTS",
        text="Files, folders or JSON lines; python is the Python source of this machine.",
        many=True,
    ),
)

TRAIN = Verb(
    name="train",
    text="Make a drafter, a model or a tokenizer from text, on this machine.",
    example="outrider train draft my-draft python --tokens 9000 --steps 5 --exam-prompts 2",
    parts=(
        Verb(
            name="draft",
            target="outrider.cli.train:draft",
            text="Distil a draft model from a target.",
            example="outrider train draft my-draft python --tokens 9000 --steps 5 --exam-prompts 2",
            arguments=_TRAINED,
            options=DraftOptions,
        ),
        Verb(
            name="block",
            target="outrider.cli.train_block:block",
            text="Train a block net, which guesses several places in one pass.",
            example="outrider train block my-net python --tokens 9000 --steps 5 --exam-prompts 2",
            arguments=_TRAINED,
            options=BlockOptions,
        ),
        Verb(
            name="medusa",
            target="outrider.cli.train_medusa:medusa",
            text="Train Medusa heads, which guess several tokens at once.",
            example="outrider train medusa heads python --tokens 9000 --steps 5 --exam-prompts 2",
            arguments=_TRAINED,
            options=MedusaOptions,
        ),
        Verb(
            name="eagle",
            target="outrider.cli.train_eagle:eagle",
            text="Train EAGLE heads, which draft from a target's hidden states.",
            example="outrider train eagle heads python --tokens 9000 --steps 5 --exam-prompts 2",
            arguments=_TRAINED,
            options=EagleOptions,
        ),
        Verb(
            name="mtp",
            target="outrider.cli.train_mtp:mtp",
            text="Train MTP blocks, which draft from a target's hidden states.",
            example="outrider train mtp my-block python --tokens 9000 --steps 5 --exam-prompts 2",
            arguments=_TRAINED,
            options=MtpOptions,
        ),
        Verb(
            name="pretrain",
            target="outrider.cli.train:pretrain",
            text="Train a language model from scratch.",
            example="outrider train pretrain my-model python --tokens 20000 --steps 5",
            arguments=_TRAINED,
            options=PretrainOptions,
        ),
        Verb(
            name="tokenizer",
            target="outrider.cli.train:tokenizer",
            text="Make a byte-level BPE vocabulary.",
            example="outrider train tokenizer my-tokenizer python --tokens 100000 --size 2048",
            arguments=_TRAINED,
            options=TokenizerOptions,
        ),
    ),
)
