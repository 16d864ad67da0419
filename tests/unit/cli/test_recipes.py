"""Every recipe is a settings file that is understood, says what it is for, and stands in the page;
those that this machine can run write the target's own text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import cast

import pytest

from doubles.command_line import Command
from outrider.cli.call import Call, call_of
from outrider.core.settings import DEFAULT, file, resolve
from outrider_lab.bench.studies.sweep_recipes import RECIPES as STUDIES
from outrider_lab.cli.bench_options import SweepOptions
from outrider_lab.cli.sweep_setup import Setup, set_up

pytestmark = pytest.mark.wide

ROOT = Path(__file__).parents[3]
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
PAGE = ROOT / "docs" / "engines.md"
# Those that arrange the same work otherwise, on the embedded pair and without more machines.
SAME_TEXT = ("baseline", "pd", "pdv", "pdv-always", "ssd", "auto", "overcommit", "bounded-queue")


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_recipe_is_understood(path: Path) -> None:
    resolved = resolve(file(path))
    resolved.engine()
    resolved.sampling()
    resolved.program()
    decided = [item for item in resolved.chosen.values() if item.origin != DEFAULT]
    assert decided
    assert all(item.origin.startswith(str(path)) for item in decided)
    assert path.read_text("utf-8").startswith("# ")


def test_the_page_lists_all_recipes_and_no_others() -> None:
    lines = PAGE.read_text("utf-8").splitlines()
    listed = [line.split("`")[1] for line in lines if line.startswith("| `recipes/")]
    assert sorted(listed) == [f"recipes/{path.name}" for path in RECIPES]


@pytest.mark.sample(2)
@pytest.mark.weights
@pytest.mark.slow
@pytest.mark.parametrize("name", SAME_TEXT)
def test_a_recipe_writes_the_target_s_own_text(outrider: Command, name: str) -> None:
    texts = [
        outrider("generate", "def add(", "--max-tokens", "8", "--json", "--config", str(path))
        for path in (ROOT / "recipes" / "off.yaml", ROOT / "recipes" / f"{name}.yaml")
    ]
    assert [shown.code for shown in texts] == [0, 0], texts[1].err
    assert len({json.loads(shown.out)["text"] for shown in texts}) == 1


EXPERIMENTS = sorted((ROOT / "recipes" / "experiments").glob("*.yaml"))


def planned(**given: str) -> Setup:
    call = call_of(SweepOptions.verb, (), {**given, "output_dir": "out"})
    return set_up(cast("Call[SweepOptions]", call))


def test_every_published_study_is_an_experiment_file() -> None:
    assert [path.stem for path in EXPERIMENTS] == sorted(STUDIES)


@pytest.mark.parametrize("path", EXPERIMENTS, ids=lambda path: path.stem)
def test_an_experiment_file_is_the_study_of_its_name(path: Path) -> None:
    written, named = planned(experiment=str(path)), planned(preset=path.stem)
    assert [set(grid) for grid in written.grids] == [set(grid) for grid in named.grids]
    for part in ("subjects", "terms", "recipe", "warmup", "plots"):
        assert getattr(written, part) == getattr(named, part), part
    elsewhere = planned(experiment=str(path), pair="embedded")
    assert [one.name for one in elsewhere.subjects] == ["embedded"]
