"""The drafters that can be compared, and the words by which a user names a contestant.

A contestant is a drafter, what it drafts from (a draft model, a folder of heads, or nothing but the
text and the target), its K, and the nodes of its trees; 0 nodes are chains. A word says so as

    NAME[=DRAFT][:K][+NODES]        ngram   model=DRAFT:8   eagle=heads/eagle+16

A new drafter joins the comparison by a line of KNOWN.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from outrider.core.config import DRAFTERS, EngineConfig
from outrider.core.errors import ConfigError, did_you_mean

OFF, ALL = "off", "all"
# A chain and a tree of one drafter differ in this only; 16 nodes and the root are 17 rows.
DEFAULT_NODES = 16

Source = Literal["text", "model", "heads", "target"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """`source` is what it drafts from; a drafter from heads or from the target itself needs no
    other model. One that is not `common` takes part only where it is named."""

    source: Source
    branches: bool = False
    common: bool = True


KNOWN: Mapping[str, Known] = {
    "ngram": Known(source="text"),
    "suffix": Known(source="text", branches=True),
    "recycling": Known(source="text", branches=True),
    "lookup": Known(source="text", branches=True),
    "model": Known(source="model", branches=True),
    "portfolio": Known(source="model", branches=True),
    "mtp": Known(source="heads", branches=True),
    "eagle": Known(source="heads", branches=True),
    "medusa": Known(source="heads", branches=True),
    "block": Known(source="heads", branches=True),
    "eagle-lite": Known(source="target"),
    "medusa-lite": Known(source="target", branches=True),
    "quantised-self": Known(source="target"),
    "layer-skip": Known(source="target"),
    # It spells drafts anew, which a draft model of the same vocabulary does not need.
    "bridge": Known(source="model", common=False),
    # It has nothing to follow unless the caller guesses the text.
    "prediction": Known(source="text", common=False),
}
_OF_NO_USE = ("auto", "none")
_WORD = re.compile(r"(?P<drafter>[\w-]+)(=(?P<draft>.+?))?(:(?P<k>\d+))?(\+(?P<nodes>\d+))?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Contestant:
    """`name` is what results call it. `k` None is the setting's own, or for a tree as deep as its
    nodes allow: it is a chain where the text is sure."""

    name: str
    drafter: str
    draft: str | None = None
    k: int | None = None
    tree_nodes: int = 0

    @property
    def source(self) -> Source:
        return known(self.drafter).source

    def config(self, base: EngineConfig) -> EngineConfig:
        """`base` with this drafter. Rounds are recorded, for all contestants alike. Raises
        ConfigError for a K that cannot be."""
        k = max(base.k, self.tree_nodes - 1) if self.k is None else self.k
        return replace(base, drafter=self.drafter, k=k, tree_nodes=self.tree_nodes, profile=True)


PLAIN = Contestant(name=OFF, drafter="none")


def known(drafter: str) -> Known:
    """A drafter without a line here is taken to need nothing; loading says what it lacks."""
    return KNOWN.get(drafter, Known(source="text"))


def available() -> tuple[str, ...]:
    """Drafters of this version, in the order of KNOWN."""
    here = [name for name in DRAFTERS if name not in _OF_NO_USE]
    listed = [name for name in KNOWN if name in here]
    return (*listed, *(name for name in here if name not in KNOWN))


def contestants_named(words: str) -> list[Contestant]:
    """Plain decoding, then what `words` name, each once; `all` is every common drafter, and its
    trees where it can branch. Raises ConfigError."""
    found = [PLAIN]
    for word in (word.strip() for word in words.split(",")):
        if word == ALL:
            found += _common()
        elif word and word != OFF:
            found.append(_read(word))
    if len(found) == 1:
        raise ConfigError(
            "--drafters names none.", hint=f"--drafters {ALL}, or some of {', '.join(available())}"
        )
    return list({contestant.name: contestant for contestant in found}.values())


def _common() -> list[Contestant]:
    found: list[Contestant] = []
    for name in available():
        if known(name).common:
            found.append(Contestant(name=name, drafter=name))
        if known(name).common and known(name).branches:
            nodes = DEFAULT_NODES
            found.append(Contestant(name=f"{name}+{nodes}", drafter=name, tree_nodes=nodes))
    return found


def _read(word: str) -> Contestant:
    match = _WORD.fullmatch(word)
    if match is None:
        raise ConfigError(
            f"--drafters: {word!r} names no contestant.", hint="write NAME[=DRAFT][:K][+NODES]"
        )
    drafter = match["drafter"]
    if drafter not in available():
        raise ConfigError(f"unknown drafter {drafter!r}.", hint=did_you_mean(drafter, available()))
    return Contestant(
        name=word,
        drafter=drafter,
        draft=match["draft"],
        k=None if match["k"] is None else int(match["k"]),
        tree_nodes=int(match["nodes"] or 0),
    )
