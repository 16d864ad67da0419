"""The verb that fetches models, for the table of verbs."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.cli.options import JsonOption
from outrider.cli.verb import Argument, Verb
from outrider.core.fields import setting


@dataclass(frozen=True, slots=True, kw_only=True)
class PullOptions(JsonOption):
    """Of `models pull`."""

    draft: str = setting(
        "auto",
        "Fetch this draft model or these heads too; auto is what `outrider pairs` knows for "
        "TARGET, none is none.",
    )
    revision: str | None = setting(
        None, "A branch, tag or commit of TARGET; TARGET@REVISION says the same."
    )


PULL = Verb(
    name="pull",
    target="outrider.cli.pull:pull",
    text="Fetch a model from the hub, and the draft that goes with it.",
    example="outrider models pull Qwen/Qwen3-8B",
    arguments=(Argument(name="TARGET", text="A hub id, such as Qwen/Qwen3-8B."),),
    options=PullOptions,
)
