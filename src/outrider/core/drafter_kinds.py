"""The table of drafters: everything that the rest of the program may know of a drafter by its name.

To add a drafter, write a file with its class and a function that builds it, and add a line to KINDS
(or use another package, plugins.py); `builder` names that function, as "module:function". Nothing
else compares a drafter's name. The table imports no PyTorch, since the command line shows the
names, and no drafter: a drafter's module is imported when an engine is built with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from outrider.core.errors import ConfigError
from outrider.core.plugins import Plugins

# The source of drafts: the text and tables alone, a draft model, heads of the drafter's own kind, a
# copy of the target, or anything that --draft names.
Source = Literal["text", "model", "heads", "copy", "draft"]
# Inputs of a drafter in addition to the text: the texts of a corpus, the request's prediction, a
# translator between two vocabularies, the states of the target's last layer.
Reads = Literal["corpus", "prediction", "translator", "last layer"]

AUTO = "auto"
OFF = "none"
# The source that --draft names unless it names heads, and the drafter that reads it.
MODEL = "model"
# The meaning of auto where no model or heads were found; and its meaning where a model or heads
# were found without being named: these then draft together with look-ups.
WITHOUT_DRAFT, WITH_FOUND = "suffix", "portfolio"
# Look-ups that depend on the request's own text alone.
OWN_TEXT = "ngram"
# The copy of the target that auto may make.
COPY = "quantised-self"
_BUILDERS = "outrider.engine.drafter_builders"


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadFormat:
    """Marks of a folder of heads: one of the `model_types` or `keys` of its config.json, or a
    `name` within its architectures; `tensors` identify a checkpoint whose config says nothing else.
    `window_key` names the length of the texts that the heads were trained on, `layers_key` the
    number of layers of heads that have several. Heads with `three_layers` may read three layers of
    the target. Heads without an `arena` store no keys and values."""

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

    A drafter that `branches` can draft trees. It cannot draft without `must_have`, a part of
    `reads`. `settings` are engine settings that affect only the drafters that list them. A drafter
    that `drafts_ahead` can draft before a verdict. `needs_words` is the source in words,
    `not_in_process` a part that cannot live in a process of its own. `without_draft` is the drafter
    that stands in where --draft names nothing; with `in_target` the target's own files may hold its
    heads. A copy of the target has `fewer_bits`, or fewer layers. A drafter that `scores` gives the
    acceptance probability of each of its tokens.
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
        """Content of a folder for this drafter: a model, or heads of its kind."""
        return {"model": MODEL, "heads": self.name}.get(self.source)

    @property
    def looks_up(self) -> bool:
        """True if it needs no model, so that any engine can use it for a request."""
        return self.source == "text" and "last layer" not in self.reads

    @property
    def reads_draft(self) -> bool:
        """True if --draft names its source."""
        return self.source in ("model", "heads", "draft")

    @property
    def has_process(self) -> bool:
        """True if it may live in a process of its own."""
        return "drafter_home" in self.settings

    def build(self, context: Any) -> Any:
        """The drafter, built by its own function from a BuildContext (drafters/catalog.py). Raises
        ConfigError if a plugin's function fails, or returns a drafter of another name."""
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

# In the order of listings.
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
# Sources of plugins; formats of heads and copies are known by name.
_OUTSIDE_SOURCES = ("text", "model")


def drafter_named(name: str) -> DrafterKind:
    """The drafter called `name`. Raises ConfigError for an unknown name, or a broken package."""
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
    """Every drafter: built-in ones, then those of other packages."""
    return [*KINDS.values(), *PLUGINS.every()]
