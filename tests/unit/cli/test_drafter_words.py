"""What is said of drafters that cannot be as asked, of trees that are none, and when it is said."""

from __future__ import annotations

import sys
from io import StringIO

import pytest

from doubles.command_line import Command
from outrider.api.loading import idle_settings
from outrider.cli.main import run
from outrider.core.config import EngineConfig
from outrider.core.plugins import KINDS
from outrider.core.resolve import ResolvedConfig

# Whatever the nodes of a draft may be, these draft chains.
CHAINS_ONLY = [kind.name for kind in KINDS.values() if kind.drafts and not kind.branches]
MODELLESS = [kind.name for kind in KINDS.values() if kind.drafts and not kind.reads_draft]

PROMPT = "def add(a, b):"


@pytest.mark.weights
def test_heads_that_do_not_ship_are_missed_by_name(outrider: Command) -> None:
    """The embedded target's draft model is not taken for what was asked for."""
    shown = outrider("generate", PROMPT, "--drafter", "block")
    assert shown.code == 2
    assert "needs block heads, and none was given" in shown.err
    assert "outrider draft suggest" in shown.err
    assert "outrider train block" in shown.err


@pytest.mark.parametrize("drafter", MODELLESS)
def test_a_draft_that_nobody_reads_is_refused(outrider: Command, drafter: str) -> None:
    words = ("--draft", "outrider/embedded-draft", "--drafter", drafter)
    shown = outrider("generate", PROMPT, *words)
    assert shown.code == 2
    assert f"--drafter {drafter} reads none" in shown.err


@pytest.mark.parametrize(
    ("drafter", "changes", "said"),
    [
        *((name, {}, f"no effect on drafter {name}") for name in CHAINS_ONLY),
        ("model", {"tree_nodes": 4}, "tree_nodes=4 is not above k=4"),
        ("model", {"schedule": "ssd"}, "no effect with schedule ssd"),
        ("model", {"drafter_home": "process"}, "no effect on a draft model in a process"),
    ],
)
def test_trees_that_are_chains_are_noted(
    drafter: str, changes: dict[str, object], said: str
) -> None:
    config = EngineConfig(**({"tree_nodes": 15} | changes))  # pyright: ignore[reportArgumentType]
    assert any(said in note for note in idle_settings(ResolvedConfig(config, KINDS[drafter])))


@pytest.mark.parametrize("controller", ["goodput", "band"])
def test_a_controller_of_nothing_is_noted(controller: str) -> None:
    config = EngineConfig(controller=controller)
    said = f"controller {controller} has no effect on drafter none"
    assert said in idle_settings(ResolvedConfig(config, KINDS["none"]))
    assert said not in idle_settings(ResolvedConfig(config, KINDS["model"]))


@pytest.mark.parametrize("drafter", ["none", *(n for n, kind in KINDS.items() if kind.branches)])
def test_trees_that_are_trees_are_not(drafter: str) -> None:
    assert idle_settings(ResolvedConfig(EngineConfig(tree_nodes=15), KINDS[drafter])) == ()
    assert idle_settings(ResolvedConfig(EngineConfig(), KINDS[drafter])) == ()


@pytest.mark.weights
@pytest.mark.usefixtures("outrider")
@pytest.mark.parametrize("more", [(), ("--n", "2", "--temperature", "0.5")], ids=["one", "several"])
def test_notes_stand_on_lines_of_their_own(
    monkeypatch: pytest.MonkeyPatch, more: tuple[str, ...]
) -> None:
    """Both streams are one terminal, where a note must not go on in the text's last line."""
    both = StringIO()
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, both)
    assert run(["generate", PROMPT, "--context", "40", "--max-tokens", "100", *more]) == 0
    shown = both.getvalue()
    assert shown.count("note: at most") == shown.count("\nnote: at most") == 1
