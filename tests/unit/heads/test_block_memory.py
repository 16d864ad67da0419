"""Keys and values of block drafters: shared by equal beginnings, right after failures."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from doubles.published_drafters import CASES, TEXT, Case
from outrider.core.errors import NumericsError, given
from outrider.plugins.heads.block_drafts import AtOnce, BlockDrafter
from outrider.plugins.heads.blocks import Backbone
from outrider.plugins.heads.native_blocks import NativeBlocks
from outrider.plugins.heads.native_choice import Chooser
from unit.heads.test_published_drafters import Pair, drafter_in

NAMES = ("dflash", "dflash-window")


@pytest.fixture(params=NAMES)
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Pair:
    case = Case.read(CASES / f"{request.param}.json")
    return Pair(case, *drafter_in(case.write(tmp_path), chunk=8))


def backbone_of(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> Backbone:
    """The backbone of the pair's drafter, as its next pass shows it."""
    seen: list[Backbone] = []
    write = Backbone.write

    def watched(self: Backbone, *args: object, **kwargs: object) -> object:
        seen.append(self)
        return write(self, *args, **kwargs)  # pyright: ignore[reportArgumentType]

    with monkeypatch.context() as patch:
        patch.setattr(Backbone, "write", watched)
        pair.drafter.propose([pair.states(0, 6)])
    return seen[0]


def test_equal_beginnings_share_pages(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    pair.open(0)
    backbone = backbone_of(pair, monkeypatch)
    pair.drafter.propose([pair.states(0, 30)])
    free = backbone.state.num_free_tokens
    pair.target.state.open(1, ())
    pair.drafter.open(1, TEXT[:30])
    assert backbone.state.length(1) == 28
    assert backbone.state.num_free_tokens == free
    (draft,) = pair.drafter.propose([pair.states(1, 30)])
    assert draft.tokens == pair.case.drafts[30]
    pair.drafter.close(0)
    pair.drafter.close(1)
    assert backbone.state.num_free_tokens == 512 + 2 * 8


@pytest.mark.parametrize("fails", ["in the layers", "behind the layers"])
def test_a_failed_pass_changes_no_later_draft(
    pair: Pair, fails: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair.open(0)
    backbone = backbone_of(pair, monkeypatch)
    assert backbone.state.length(0) == 5

    asked = pair.states(0, 10)

    def fail(*_args: object, **_kwargs: object) -> None:
        raise NumericsError("the layers")

    with monkeypatch.context() as patch:
        if fails == "in the layers":
            patch.setattr(Backbone, "_feed", fail)
            patch.setattr(NativeBlocks, "__call__", fail)
        else:
            patch.setattr(AtOnce, "__call__", fail)
            patch.setattr(Chooser, "made", lambda *_: None)
        with pytest.raises(NumericsError):
            pair.drafter.propose([asked])
    assert backbone.state.num_staged(0) == 0
    assert backbone.state.length(0) == (5 if fails == "in the layers" else 9)
    for _ in range(2):  # The same text may be drafted for again.
        (draft,) = pair.drafter.propose([pair.states(0, 10)])
        assert draft.tokens == pair.case.drafts[10]


def test_it_drafts_nothing_before_the_target_has_read_the_text(pair: Pair) -> None:
    pair.open(0)
    row = pair.states(0, 10)
    hidden = given(row.hidden, "states")
    assert hidden.length == 9
    assert isinstance(pair.drafter, BlockDrafter)
    (draft,) = pair.drafter.propose([replace(row, tokens=list(TEXT[:12]))])
    assert draft.tokens == ()
