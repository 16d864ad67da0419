"""The drafters, a line each: what the rest of the program may know of a drafter by its name.

A drafter is added by a file with its class and a function that builds it, and by a line of KINDS,
or by another package (plugins.py); `builder` names that function, as "module:function". Nothing
else compares a drafter's name. The table imports no PyTorch, since the command line shows the
names, and no drafter: the module of one is imported when an engine is built with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from outrider.core.errors import ConfigError
from outrider.core.plugins import Plugins

# What drafts are made from: the text and tables alone, a draft model, heads of the drafter's own
# kind, a copy of the target, or whatever --draft names, if it names anything.
Source = Literal["text", "model", "heads", "copy", "draft"]
# What a drafter reads besides the text: the texts of a corpus, the request's prediction, a
# translator between two vocabularies, the states of the target's last layer.
Reads = Literal["corpus", "prediction", "translator", "last layer"]

AUTO = "auto"
OFF = "none"
# What --draft names if it names no heads, and the drafter that reads it.
MODEL = "model"
# The drafter that auto is where there is nothing to draft with, and the one that it is where a
# model or heads were found that nobody named: these then draft together with look-ups.
WITHOUT_DRAFT, WITH_FOUND = "suffix", "portfolio"
# Look-ups that depend on the request's own text alone.
OWN_TEXT = "ngram"
# The copy of the target that auto may make.
COPY = "quantised-self"
_BUILDERS = "outrider.engine.drafter_builders"


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadFormat:
    """How a folder of heads is known: by the `model_types` of its config.json, one of its `keys`,
    or a `name` within its architectures; `tensors` are those of a checkpoint that says nothing
    else. `window_key` says how long the texts were that the heads were trained on, `layers_key` how
    many layers heads of several have. Some may read `three_layers`. Heads without an `arena` keep
    no keys and values."""

    model_types: tuple[str, ...]
    keys: tuple[str, ...] = ()
    name: str = ""
    tensors: tuple[str, ...] = ()
    window_key: str = ""
    layers_key: str = ""
    three_layers: bool = False
    arena: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterKind:
    """A drafter as --drafter names it.

    With `branches` it can draft trees. `must_have` are those of `reads` without which it cannot
    draft. `settings` are the engine's settings that have an effect on this drafter and on no
    other that leaves them out. One that `drafts_ahead` can do so before a verdict. `needs_words`
    say what its source is, `not_in_process` what cannot live in a process of its own.
    `without_draft` is the drafter that it is where --draft names nothing; with `in_target` the
    target's own files may have its heads. One that `is_captured` runs within a CUDA graph. A copy
    of the target has `fewer_bits`, or fewer layers. One that `scores` says with which probability
    each of its tokens is accepted.
    """

    name: str
    builder: str
    source: Source = "text"
    branches: bool = False
    reads: tuple[Reads, ...] = ()
    must_have: tuple[Reads, ...] = ()
    settings: tuple[str, ...] = ()
    drafts: bool = True
    drafts_ahead: bool = False
    needs_words: str = ""
    not_in_process: str = ""
    without_draft: str = ""
    in_target: bool = False
    fewer_bits: bool = False
    scores: bool = False
    format: HeadFormat | None = None

    @property
    def folder(self) -> str | None:
        """What a folder must hold for this drafter: a model, or heads of its kind."""
        return {"model": MODEL, "heads": self.name}.get(self.source)

    @property
    def looks_up(self) -> bool:
        """Whether it needs no model, and so any engine can have it for a request."""
        return self.source == "text" and "last layer" not in self.reads

    @property
    def reads_draft(self) -> bool:
        """Whether --draft names what it drafts with."""
        return self.source in ("model", "heads", "draft")

    @property
    def has_process(self) -> bool:
        """Whether it may live in a process of its own."""
        return "drafter_home" in self.settings

    def build(self, context: Any) -> Any:
        """The drafter, built by its own function from a BuildContext (drafters/catalog.py). Raises
        ConfigError if another package's fails, or gives what has another name."""
        drafter = PLUGINS.build(self, context)
        if self.name not in KINDS and drafter.name != self.name:
            raise ConfigError(
                f"drafter {self.name!r} was built, and calls itself {drafter.name!r}.",
                hint=f"the `name` that {self.builder} gives must be {self.name!r}",
            )
        return drafter


def _table(*kinds: DrafterKind) -> dict[str, DrafterKind]:
    return {kind.name: kind for kind in kinds}


_EAGLE = HeadFormat(
    model_types=("eagle", "eagle3"),
    keys=("draft_vocab_size",),
    name="eagle",
    tensors=("fc.weight",),
    window_key="max_position_embeddings",
    layers_key="num_hidden_layers",
    three_layers=True,
)
_MEDUSA = HeadFormat(
    model_types=("outrider_medusa", "medusa"), keys=("medusa_num_heads",), arena=False
)

# In the order in which they are listed.
KINDS: Mapping[str, DrafterKind] = _table(
    DrafterKind(name=OFF, builder=f"{_BUILDERS}:build_none", drafts=False),
    DrafterKind(
        name=MODEL,
        builder=f"{_BUILDERS}:build_with_model",
        source="model",
        branches=True,
        settings=("drafter_home",),
        drafts_ahead=True,
        needs_words="a draft model",
    ),
    DrafterKind(
        name="bridge",
        builder=f"{_BUILDERS}:build_bridge",
        source="model",
        reads=("translator",),
        must_have=("translator",),
        needs_words="a draft model",
        not_in_process="a draft model with another vocabulary",
    ),
    DrafterKind(name=OWN_TEXT, builder=f"{_BUILDERS}:build_ngram", scores=True),
    DrafterKind(
        name="prediction",
        builder=f"{_BUILDERS}:build_prediction",
        reads=("prediction",),
        must_have=("prediction",),
    ),
    DrafterKind(
        name=WITHOUT_DRAFT,
        builder=f"{_BUILDERS}:build_suffix",
        branches=True,
        reads=("corpus",),
        scores=True,
    ),
    DrafterKind(name="recycling", builder=f"{_BUILDERS}:build_recycling", branches=True),
    DrafterKind(
        name="lookup",
        builder=f"{_BUILDERS}:build_lookup",
        branches=True,
        reads=("corpus", "prediction"),
        scores=True,
    ),
    DrafterKind(
        name=WITH_FOUND,
        builder=f"{_BUILDERS}:build_portfolio",
        source="draft",
        branches=True,
        reads=("corpus", "prediction"),
        not_in_process="the draft model of a portfolio",
        without_draft="lookup",
        scores=True,
    ),
    DrafterKind(
        name="eagle",
        builder=f"{_BUILDERS}:build_eagle",
        source="heads",
        branches=True,
        needs_words="eagle heads",
        format=_EAGLE,
    ),
    DrafterKind(
        name="eagle-lite", builder=f"{_BUILDERS}:build_eagle_lite", reads=("last layer",)
    ),
    DrafterKind(
        name="medusa",
        builder=f"{_BUILDERS}:build_medusa",
        source="heads",
        branches=True,
        needs_words="medusa heads",
        format=_MEDUSA,
    ),
    DrafterKind(
        name="medusa-lite",
        builder=f"{_BUILDERS}:build_medusa_lite",
        branches=True,
        reads=("last layer",),
    ),
    DrafterKind(
        name="block",
        builder=f"{_BUILDERS}:build_block",
        source="heads",
        branches=True,
        needs_words="block heads",
        format=HeadFormat(model_types=("outrider_block",)),
    ),
    DrafterKind(
        name="mtp",
        builder=f"{_BUILDERS}:build_mtp",
        source="heads",
        branches=True,
        needs_words="an MTP block",
        in_target=True,
        format=HeadFormat(model_types=("outrider_mtp",)),
    ),
    DrafterKind(
        name=COPY,
        builder=f"{_BUILDERS}:build_own",
        source="copy",
        branches=True,
        settings=("skip_layers",),
        fewer_bits=True,
    ),
    DrafterKind(
        name="layer-skip",
        builder=f"{_BUILDERS}:build_own",
        source="copy",
        branches=True,
        settings=("skip_layers",),
    ),
)  # fmt: skip

PLUGINS = Plugins("drafter", DrafterKind, (AUTO, *KINDS))
# What one from another package may be made from; formats of heads and copies are known by name.
_OUTSIDE_SOURCES = ("text", "model")


def drafter_named(name: str) -> DrafterKind:
    """Raises ConfigError for a name that nobody has, or a package that is broken."""
    if name in KINDS:
        return KINDS[name]
    kind = PLUGINS.load(name)
    if kind.source not in _OUTSIDE_SOURCES:
        raise ConfigError(
            f"drafter {name!r} says that its source is {kind.source!r}, which no package can add.",
            hint=f"its description may say {' or '.join(_OUTSIDE_SOURCES)}",
        )
    return kind


def every_drafter() -> list[DrafterKind]:
    """Those that are built in, then those of other packages."""
    return [*KINDS.values(), *PLUGINS.every()]
