"""Kernels that a wheel brings: by level of CPU and by sources, and only as its RECORD has them."""

from __future__ import annotations

import hashlib
import os
import sys
import tempfile
from base64 import urlsafe_b64encode
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from doubles.posing_compiler import attempt, empty_library, libraries, num_builds
from outrider.core import env
from outrider.kernels.native import build
from outrider.kernels.native import build as levels
from outrider.kernels.native.build import LEVELS, Level, levels_here, library_name

INSIDE = Path("outrider/kernels/native/lib")


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary files go in these tests, so that none meets the user's kernels."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def cpu(monkeypatch: pytest.MonkeyPatch, folder: Path, flags: str, machine: str) -> list[str]:
    """Levels of a CPU that says so of itself."""
    name = "Features" if machine == "aarch64" else "flags\t"
    told = folder / "cpuinfo"
    told.write_text(f"processor\t: 0\n{name}\t: {flags}\n\nprocessor\t: 1\n")
    monkeypatch.setattr(levels, "_CPUINFO", told)
    monkeypatch.setattr("platform.machine", lambda: machine)
    return [level.name for level in levels_here()]


def test_a_cpu_gets_the_best_level_whose_instructions_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs = {level.name: " ".join(level.needs) for level in LEVELS}
    assert cpu(monkeypatch, tmp_path, "fp asimd", "aarch64") == ["arm64"]
    assert cpu(monkeypatch, tmp_path, "sse2", "x86_64") == ["x86-64"]
    assert cpu(monkeypatch, tmp_path, needs["avx2"], "AMD64") == ["avx2", "x86-64"]
    for name in ("avx2-vnni", "avx512", "avx512-vnni", "avx512-bf16"):
        found = cpu(monkeypatch, tmp_path, needs[name], "x86_64")
        assert found[0] == name
        assert found[-2:] == ["avx2", "x86-64"]
    without_fma = needs["avx512-bf16"].replace("fma", "")
    assert cpu(monkeypatch, tmp_path, without_fma, "x86_64") == ["x86-64"]
    assert cpu(monkeypatch, tmp_path, "", "riscv64") == []


def test_a_system_that_does_not_tell_has_the_lowest_level(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    monkeypatch.setattr(levels, "_CPUINFO", tmp_path / "absent")
    assert [level.name for level in levels_here()] == ["x86-64"]


def test_other_sources_or_flags_have_another_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    level = LEVELS[0]
    names = {library_name(level), library_name(replace(level, flags=("-mavx512f",)))}
    monkeypatch.setattr(levels, "FLAGS", (*levels.FLAGS, "-g"))
    names.add(library_name(level))
    (tmp_path / "sources").mkdir()
    monkeypatch.setattr(levels, "SOURCES", tmp_path / "sources")
    names.add(library_name(level))
    assert len(names) == 4


@dataclass(frozen=True)
class Wheel:
    """An installed wheel whose library for this CPU has every function, and computes nothing."""

    library: Path
    record: Path
    cache_dir: Path
    level: Level

    def write_record(self) -> None:
        digest = hashlib.sha256(self.library.read_bytes()).digest()
        told = urlsafe_b64encode(digest).decode().rstrip("=")
        self.record.write_text(f"{INSIDE / self.library.name},sha256={told},1\n")


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one_source: None) -> Wheel:
    del one_source
    attempt(empty_library(tmp_path), tmp_path / "made")
    site, (made,) = tmp_path / "site", libraries(tmp_path / "made")
    info = site / "outrider-9.dist-info"
    (site / INSIDE).mkdir(parents=True)
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.4\nName: outrider\nVersion: 9\n")
    level = levels_here()[0]
    found = Wheel(site / INSIDE / library_name(level), info / "RECORD", tmp_path / "cache", level)
    found.library.write_bytes(made.read_bytes())
    found.write_record()
    monkeypatch.setattr(sys, "path", [str(site), *sys.path])
    monkeypatch.setattr(levels, "FOLDER", found.library.parent)
    # There is no compiler.
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    return found


@pytest.mark.wide
def test_the_library_of_the_wheel_is_loaded_without_a_compiler(wheel: Wheel) -> None:
    for built in (attempt(None, wheel.cache_dir), attempt(None, wheel.cache_dir)):
        assert built.library is not None
        assert built.folder == wheel.cache_dir
        assert built.origin == f"the wheel's, for CPUs of level {wheel.level.name}"
        (kept,) = libraries(wheel.cache_dir)
        assert kept.read_bytes() == wheel.library.read_bytes()
        assert built.library._name == str(kept)  # pyright: ignore[reportPrivateUsage]


@pytest.mark.wide
def test_a_copy_that_was_damaged_is_made_again(wheel: Wheel) -> None:
    attempt(None, wheel.cache_dir)
    (kept,) = libraries(wheel.cache_dir)
    kept.unlink()
    kept.write_bytes(b"garbage")
    assert attempt(None, wheel.cache_dir).library is not None
    assert kept.read_bytes() == wheel.library.read_bytes()


@pytest.mark.wide
def test_another_cpu_keeps_what_it_measures_apart(
    wheel: Wheel, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt(None, wheel.cache_dir)
    monkeypatch.setattr(build, "cpu_identity", lambda: "another CPU")
    attempt(None, wheel.cache_dir)
    assert len(libraries(wheel.cache_dir)) == 2


@pytest.mark.wide
@pytest.mark.parametrize(
    ("damage", "why"),
    [
        ("a byte", "is not the file that the wheel brought, by its RECORD"),
        ("no line", "is in no RECORD of an installed wheel"),
        ("no RECORD", "is in no RECORD of an installed wheel"),
        ("a pipe", "cannot be read: it is a pipe, not a regular file"),
    ],
)
def test_what_is_not_as_the_wheel_brought_it_is_not_loaded(
    wheel: Wheel, caplog: pytest.LogCaptureFixture, damage: str, why: str
) -> None:
    if damage == "a byte":
        wheel.library.write_bytes(wheel.library.read_bytes() + b"\0")
    elif damage == "no line":
        wheel.record.write_text("outrider/__init__.py,,\n")
    elif damage == "no RECORD":
        wheel.record.unlink()
    else:
        wheel.library.unlink()
        os.mkfifo(wheel.library)
    built = attempt(None, wheel.cache_dir)
    assert built.library is None
    assert built.refusal == (
        f"no C++ compiler found (looked for c++, g++, clang++); {wheel.library} {why}"
    )
    assert caplog.messages == [
        f"The wheel's kernels are not used: {wheel.library} {why}; reinstall outrider."
    ]


@pytest.mark.wide
def test_what_is_not_as_the_wheel_brought_it_is_compiled(
    wheel: Wheel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheel.record.unlink()
    (tmp_path / "bin").mkdir()
    (tmp_path / "posing c++").rename(tmp_path / "bin" / "c++")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    built = attempt(None, wheel.cache_dir)
    assert built.origin == f"compiled here by {tmp_path / 'bin' / 'c++'}"
    assert built.unbrought.endswith("is in no RECORD of an installed wheel")


@pytest.mark.wide
def test_other_sources_find_no_library(wheel: Wheel) -> None:
    wheel.library.rename(wheel.library.with_name("kernels-other.so"))
    refusal = attempt(None, wheel.cache_dir).refusal
    assert refusal is not None
    assert refusal.endswith("brings no compiled kernels for these sources and this CPU")


@pytest.mark.wide
def test_a_compiler_that_is_named_compiles(
    wheel: Wheel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", os.defpath)
    before = num_builds(tmp_path)
    compiler = f"'{tmp_path / 'posing c++'}'"
    monkeypatch.setenv("CXX", compiler)
    built = attempt(env.compiler(), wheel.cache_dir)
    assert (built.origin, built.unbrought) == (f"compiled here by {compiler}", "")
    assert num_builds(tmp_path) == before + 1


@pytest.mark.wide
def test_where_nothing_can_be_kept_the_library_is_loaded_as_it_lies(
    wheel: Wheel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "trusted_folders", lambda _: [])  # pyright: ignore
    built = attempt(None, wheel.cache_dir)
    assert built.folder is None
    assert built.library is not None
    assert built.library._name == str(wheel.library)  # pyright: ignore[reportPrivateUsage]
