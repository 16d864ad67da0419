"""Drafters, rules and controllers of other packages: found by name, and never before."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from outrider.core.config import EngineConfig
from outrider.core.errors import ConfigError
from outrider.core.params import SamplingParams
from outrider.core.plugins import KINDS, drafter_named, every_drafter, installed
from outrider.core.resolve import resolve
from outrider.verify.rules import rule_for

Install = Callable[[str, str], Path]
DRAFTER = "[outrider.drafters]\n{name} = {name}_package:KIND\n"
MODULE = """
from outrider.core.plugins import DrafterKind
def build(context):
    raise RuntimeError("no table")
KIND = DrafterKind(name="{name}", build=build{more})
"""


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Puts a package with entry points where packages are looked for."""
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    installed.cache_clear()

    def put(name: str, entry_points: str, module: str = "") -> Path:
        info = tmp_path / f"{name}-1.2.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.2\n")
        (info / "entry_points.txt").write_text(entry_points)
        installed.cache_clear()
        path = tmp_path / f"{name}_package.py"
        path.write_text(module)
        return path

    yield lambda name, module: put(name, DRAFTER.format(name=name), module)
    for name in [name for name in sys.modules if name.endswith("_package")]:
        del sys.modules[name]
    installed.cache_clear()


def module(name: str, more: str = "") -> str:
    return MODULE.format(name=name, more=more)


def test_a_name_is_taken_wherever_a_built_in_one_is(install: Install) -> None:
    install("echoing", module("echoing"))
    config = EngineConfig(drafter="echoing")
    resolved = resolve(config, None)
    assert (resolved.drafter.name, resolved.choosable[0]) == ("echoing", "echoing")
    assert SamplingParams(drafter="echoing").drafter == "echoing"
    with_ngram = resolve(EngineConfig(drafter="ngram"), None)
    assert "echoing" in with_ngram.choosable
    asked = with_ngram.of_request(SamplingParams(drafter="echoing"))
    assert asked.drafter == "echoing"
    assert [kind.name for kind in every_drafter()] == [*KINDS, "echoing"]


def test_an_unknown_name_is_answered_with_those_of_packages(install: Install) -> None:
    install("echoing", module("echoing"))
    with pytest.raises(ConfigError, match="unknown value 'echoin'") as told:
        EngineConfig(drafter="echoin")
    assert "did you mean 'echoing'" in str(told.value.hint)


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("import nowhere_to_be_found", "ModuleNotFoundError: No module named 'nowhere"),
        ("raise SystemExit(3)", "SystemExit"),
        ("", "AttributeError"),
        ("KIND = 3", "echoing_package:KIND is no DrafterKind of that name"),
        (module("other"), "echoing_package:KIND is no DrafterKind of that name"),
        (module("echoing", ", source='magic', what=1"), "TypeError"),
    ],
)
def test_a_broken_package_is_named(install: Install, code: str, why: str) -> None:
    install("echoing", code)
    with pytest.raises(ConfigError, match=r"'echoing' of package echoing 1\.2 cannot be") as told:
        drafter_named("echoing")
    assert why in str(told.value)
    assert "pip install --upgrade echoing" in str(told.value.hint)
    # Nobody who asks for another one is in its way.
    assert [kind.name for kind in every_drafter()] == [*KINDS]


def test_what_a_package_may_draft_from_is_bounded(install: Install) -> None:
    install("echoing", module("echoing", ", source='heads'"))
    with pytest.raises(ConfigError, match="source is 'heads'") as told:
        drafter_named("echoing")
    assert "text or model" in str(told.value.hint)


def test_a_builder_that_fails_is_the_packages_fault(install: Install) -> None:
    install("echoing", module("echoing"))
    with pytest.raises(ConfigError, match=r"echoing 1\.2 cannot be used: RuntimeError: no table"):
        KINDS.build(drafter_named("echoing"), None)


@pytest.mark.parametrize("name", ["ngram", "auto"])
def test_a_built_in_name_cannot_be_taken(install: Install, name: str) -> None:
    path = install(name, "raise RuntimeError('it was imported')")
    assert drafter_named("ngram") is KINDS["ngram"]
    with pytest.raises(ConfigError, match=f"package {name} 1.2 names a drafter '{name}'") as told:
        EngineConfig(drafter="echoing")
    assert f"pip uninstall {name}" in str(told.value.hint)
    # A list of all does without it.
    assert [kind.name for kind in every_drafter()] == [*KINDS]
    assert path.exists()


def test_two_packages_cannot_have_one_name(install: Install, tmp_path: Path) -> None:
    install("echoing", module("echoing"))
    info = tmp_path / "twin-3.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: twin\nVersion: 3.0\n")
    (info / "entry_points.txt").write_text("[outrider.drafters]\nechoing = twin:KIND\n")
    installed.cache_clear()
    with pytest.raises(ConfigError, match="names a drafter 'echoing', and that name is that of"):
        drafter_named("echoing")


RULE = """
from outrider.core.plugins import RuleKind
from outrider.verify.exact import TokenRule
KIND = RuleKind(name="strict", build=TokenRule, exact={exact})
"""


def test_a_rule_says_whether_it_claims_to_be_exact(install: Install, tmp_path: Path) -> None:
    install("echoing", RULE.format(exact=True))
    entry_points = "[outrider.rules]\nstrict = echoing_package:KIND\n"
    (tmp_path / "echoing-1.2.dist-info" / "entry_points.txt").write_text(entry_points)
    installed.cache_clear()
    assert EngineConfig(sampler="strict").claims_exact
    assert rule_for("strict").exact
    with pytest.raises(ConfigError, match="'strict' is another package's and has no threshold"):
        rule_for("strict", 0.5)
    # A request may choose none that is not known to be exact.
    with pytest.raises(ConfigError, match="sampler: unknown value 'strict'"):
        SamplingParams(sampler="strict")


def test_a_rule_and_its_description_must_agree(install: Install, tmp_path: Path) -> None:
    install("echoing", RULE.format(exact=False))
    entry_points = "[outrider.rules]\nstrict = echoing_package:KIND\n"
    (tmp_path / "echoing-1.2.dist-info" / "entry_points.txt").write_text(entry_points)
    installed.cache_clear()
    assert not EngineConfig(sampler="strict").claims_exact
    with pytest.raises(ConfigError, match="says exact=True, and its description exact=False"):
        rule_for("strict")


@pytest.mark.wide
def test_packages_are_looked_for_only_when_asked(install: Install, tmp_path: Path) -> None:
    """Neither metadata nor a package is read at import, nor for what is built in."""
    install("echoing", "raise RuntimeError('it was imported')")
    script = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "import outrider; from outrider.core.plugins import installed\n"
        "outrider.EngineConfig(drafter='ngram', sampler='token', controller='band')\n"
        "assert installed.cache_info().misses == 0\n"
        "assert 'importlib.metadata' not in sys.modules\n"
        "outrider.EngineConfig(drafter='echoing')\n"
        "assert installed.cache_info().misses == 1\n"
        "assert 'echoing_package' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", script], check=False, timeout=240)
    assert done.returncode == 0
