"""The template of a package from outside, installed as its users would: it is found by name, its
own tests pass, and a rule of it that is wrong gets no certificate."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from doubles.command_line import Command
from outrider import LLM
from outrider.core.config import EngineConfig
from outrider.core.plugins import installed
from outrider.plugins.proof import algebra, check
from outrider.plugins.proof.algebra import prove_rule
from outrider.plugins.proof.cases import FIXED
from outrider.plugins.proof.check import Effort
from outrider.plugins.proof.distributions import exact_samplers
from outrider_lab.proof import mutants, parity
from outrider_lab.proof.certificate import own_reports
from outrider_lab.proof.parity import PROMPTS

pytestmark = [pytest.mark.wide, pytest.mark.weights]

TEMPLATE = Path(__file__).parents[3] / "examples" / "outside_drafter"
PROMPT, TOKENS = "def quicksort(items):", 40
LITTLE = Effort(
    num_generated=1,
    num_texts=200,
    num_walked=2,
    num_walked_own=20,
    num_races=10,
    num_engine=5,
    greedy_tokens=16,
)


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the template was installed; its build leaves the checkout as it is."""
    folder = tmp_path_factory.mktemp("outside")
    return put(shutil.copytree(TEMPLATE, folder / "source"), folder / "there")


def put(source: Path, place: Path) -> Path:
    """Installs the package of a folder; returns where it is."""
    words = "install --quiet --no-index --no-deps --no-build-isolation --disable-pip-version-check"
    subprocess.run(
        [sys.executable, "-m", "pip", *words.split(), "--target", place, source],
        check=True,
        timeout=120,
    )
    return place


@contextmanager
def found(place: Path) -> Generator[None]:
    """This process finds what is installed there, and those that it starts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(place))
        patch.setattr(sys, "path", [str(place), *sys.path])
        installed.cache_clear()
        yield
    installed.cache_clear()
    modules = {path.stem for path in place.iterdir()}
    for name in [name for name in sys.modules if name.partition(".")[0] in modules]:
        del sys.modules[name]


@pytest.fixture
def beside(package: Path) -> Iterator[Path]:
    with found(package):
        yield package


def test_the_smallest_package_is_the_two_files_of_the_page(
    outrider: Command, tmp_path: Path
) -> None:
    page = (TEMPLATE.parents[1] / "docs" / "extending.md").read_text("utf-8")
    part = page.partition("## The smallest package")[2]
    source = tmp_path / "cycle-drafter"
    source.mkdir()
    for name, kind in (("pyproject.toml", "toml"), ("cycle_drafter.py", "python")):
        (source / name).write_text(part.partition(f"```{kind}\n")[2].partition("```")[0])
    words = ("generate", PROMPT, "--max-tokens", str(TOKENS), "--drafter")
    plain = outrider(*words, "none", "--quiet").out
    assert "unknown" in outrider(*words, "cycle").err
    with found(put(source, tmp_path / "there")):
        shown = outrider(*words, "cycle", "--json")
        assert outrider(*words, "cycle", "--quiet").out == plain
    record = json.loads(shown.out.splitlines()[-1])
    assert record["stats"]["drafter"] == "cycle"
    assert record["stats"]["num_drafted"] > 0


def ran(*words: str) -> str:
    done = subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.usefixtures("beside")
def test_the_command_line_finds_it(outrider: Command) -> None:
    words = ("generate", PROMPT, "--max-tokens", str(TOKENS), "--quiet", "--drafter")
    assert ran("-m", "outrider", *words, "bigram") == outrider(*words, "none").out


@pytest.mark.usefixtures("beside")
def test_its_own_tests_pass() -> None:
    tests = str(TEMPLATE / "tests")
    shown = ran("-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", tests, tests)
    assert "9 passed" in shown


@pytest.mark.usefixtures("beside")
def test_engines_and_requests_take_it() -> None:
    with LLM(drafter="ngram", controller="halves", k=4) as llm:
        assert "bigram" in llm.drafters
        plain, own = (
            llm.generate([PROMPT], max_tokens=TOKENS, drafter=drafter)[0]
            for drafter in ("none", "bigram")
        )
        assert (own.token_ids, own.stats.drafter) == (plain.token_ids, "bigram")
        assert own.stats.num_accepted > 0
        assert not own.drafter_failed


@pytest.fixture
def little(monkeypatch: pytest.MonkeyPatch) -> None:
    """A certificate with little to do."""
    monkeypatch.setattr(check, "Effort", lambda: LITTLE)
    monkeypatch.setattr(algebra, "FIXED", FIXED[:6])
    monkeypatch.setattr(parity, "PROMPTS", PROMPTS[9:10])
    for bugs in ("DECISIONS", "KEYS", "ROUNDS"):
        monkeypatch.setattr(mutants, bugs, [])


@pytest.mark.usefixtures("beside")
def test_its_rule_is_exact() -> None:
    own = exact_samplers("lookalike")[-1]
    assert own.name == "lookalike"
    assert prove_rule(own, FIXED[:12]).holds


@pytest.mark.usefixtures("little")
def test_a_rule_that_claims_too_much_gets_no_certificate(beside: Path, outrider: Command) -> None:
    path = beside / "outside_drafter" / "rule.py"
    right = path.read_text()
    path.write_text(right.replace(" == token]", " >= 0]"))
    try:
        words = ("--drafter", "bigram", "--draft", "none", "--sampler", "lookalike")
        shown = outrider("verify", "outrider/embedded", *words)
    finally:
        path.write_text(right)
    assert shown.code == 1
    told = " ".join(shown.out.split())
    assert "problem: lookalike, disjoint supports: total variation 1.0e+00" in told
    assert "NOT CERTIFIED: exact algebra and chi-square ensemble and same text failed." in told
    assert "next: mend rule 'lookalike' in its own package" in told


@pytest.mark.parametrize(("chosen", "holds"), [("bigram", [True]), ("ngram", [])])
def test_its_drafter_is_enumerated(beside: Path, chosen: str, holds: list[bool]) -> None:
    del beside
    assert [check.holds for check in own_reports(EngineConfig(drafter=chosen))] == holds
