"""A library is loaded only if it is ours: what was damaged, given away or planted is built again.

What would run a stranger's code is shown with a library whose constructor writes a file.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from doubles.posing_compiler import (
    attempt,
    empty_library,
    later_process,
    libraries,
    linker,
    names,
    num_builds,
)
from outrider.core.errors import CapacityError
from outrider.kernels.native import build

pytestmark = [pytest.mark.wide, pytest.mark.usefixtures("one_source")]


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary files go in these tests, so that none meets the user's kernels."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def put(library: Path, data: bytes) -> None:
    """In the place of a file that this process has mapped, which would end it if it were cut."""
    mode = library.stat().st_mode
    library.unlink()
    library.write_bytes(data)
    library.chmod(mode)


def cut(library: Path) -> None:
    """To a length that the loader still maps: its first touch of what is missing is SIGBUS."""
    put(library, library.read_bytes()[: library.stat().st_size // 2])


def turn_a_bit(library: Path) -> None:
    data = bytearray(library.read_bytes())
    data[-1] ^= 1
    put(library, bytes(data))


def write_another(library: Path) -> None:
    put(library, b"garbage")


def empty(library: Path) -> None:
    put(library, b"")


def forget_the_record(library: Path) -> None:
    library.with_name(f"{library.name}.sha256").unlink()


def break_the_record(library: Path) -> None:
    library.with_name(f"{library.name}.sha256").write_bytes(b"\xff" * 10_000)


def let_others_write(library: Path) -> None:
    library.chmod(0o666)


def make_a_link(library: Path) -> None:
    library.rename(library.with_suffix(".elsewhere"))
    library.symlink_to(library.with_suffix(".elsewhere"))


def make_a_fifo(library: Path) -> None:
    library.unlink()
    os.mkfifo(library)


def give_away(library: Path) -> None:
    """As only root can."""
    os.chown(library, 12345, -1)


DAMAGE = [
    cut,
    turn_a_bit,
    write_another,
    empty,
    forget_the_record,
    break_the_record,
    let_others_write,
    make_a_link,
    make_a_fifo,
    give_away,
]


def test_a_library_that_is_not_as_it_was_built_is_built_again(tmp_path: Path) -> None:
    """One process meets all that is damaged; each takes a second to start."""
    compiler = empty_library(tmp_path)
    damages = DAMAGE if os.geteuid() == 0 else [one for one in DAMAGE if one is not give_away]
    cache_dirs = [tmp_path / damage.__name__ for damage in damages]
    for damage, cache_dir in zip(damages, cache_dirs, strict=True):
        attempt(compiler, cache_dir)
        (library,) = libraries(cache_dir)
        damage(library)
    before = num_builds(tmp_path)
    assert before == len(damages)
    # In a process of its own: this one has the whole libraries loaded already.
    assert later_process(compiler, *cache_dirs) == "loaded"
    assert num_builds(tmp_path) == before + len(damages)


def test_memory_that_ends_is_no_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler, cache_dir = empty_library(tmp_path), tmp_path / "cache"
    attempt(compiler, cache_dir)

    def full(name: str) -> ctypes.CDLL:
        raise OSError(f"{name}: failed to map segment from shared object")

    monkeypatch.setattr(ctypes, "CDLL", full)
    with pytest.raises(CapacityError, match="memory ended while loading kernels"):
        attempt(compiler, cache_dir)
    assert num_builds(tmp_path) == 1


def planted(tmp_path: Path, cache_dir: Path, compiler: str) -> Path:
    """A library under the very name that is looked for, with all names and a fitting record, by
    somebody who can write to `cache_dir`; the file that its constructor writes."""
    ran = tmp_path / "ran"
    functions = "".join(f"void {name}(void) {{}}\n" for name in sorted(names()))
    source = (
        "#include <stdio.h>\n__attribute__((constructor)) static void run(void)"
        f'{{ fclose(fopen("{ran}", "w")); }}\n{functions}'
    )
    attempt(compiler, tmp_path / "to learn its name")
    (known,) = libraries(tmp_path / "to learn its name")
    cache_dir.mkdir()
    library = cache_dir / known.name
    command = linker(tmp_path, source, "planted.c").replace("$out", str(library))
    subprocess.run(command, shell=True, check=True)
    digest = hashlib.sha256(library.read_bytes()).hexdigest()
    library.with_name(f"{library.name}.sha256").write_text(f"{digest}  {library.name}\n")
    return ran


def share(folder: Path) -> None:
    folder.chmod(0o777)


def share_with_a_group(folder: Path) -> None:
    folder.chmod(0o770)


def give_the_folder_away(folder: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can give a folder away")
    os.chown(folder, 12345, -1)


def share_the_folder_above(folder: Path) -> None:
    folder.parent.chmod(0o777)


def link_the_folder(folder: Path) -> None:
    folder.rename(folder.with_name("elsewhere"))
    folder.symlink_to(folder.with_name("elsewhere"))


@pytest.mark.parametrize(
    "expose",
    [
        share,
        share_with_a_group,
        give_the_folder_away,
        share_the_folder_above,
        link_the_folder,
    ],
)
def test_a_library_that_others_could_plant_is_not_loaded(
    tmp_path: Path,
    temporary: Path,
    caplog: pytest.LogCaptureFixture,
    expose: Callable[[Path], None],
) -> None:
    compiler, cache_dir = empty_library(tmp_path), tmp_path / "shared" / "outrider"
    cache_dir.parent.mkdir()
    ran = planted(tmp_path, cache_dir, compiler)
    expose(cache_dir)
    built = attempt(compiler, cache_dir)
    assert built.library is not None
    assert not ran.exists()
    private = temporary / f"outrider-{os.geteuid()}"
    assert built.folder == private
    assert private.stat().st_mode & 0o777 == 0o700
    assert any("neither loaded from" in message for message in caplog.messages)


def test_the_planted_library_would_have_run(tmp_path: Path) -> None:
    compiler, cache_dir = empty_library(tmp_path), tmp_path / "cache"
    ran = planted(tmp_path, cache_dir, compiler)
    (library,) = libraries(cache_dir)
    ctypes.CDLL(str(library))
    assert ran.exists()


def test_a_folder_that_others_may_read_is_closed_to_them(tmp_path: Path) -> None:
    compiler, cache_dir = empty_library(tmp_path), tmp_path / "cache"
    cache_dir.mkdir(mode=0o755)
    assert attempt(compiler, cache_dir).folder == cache_dir
    assert cache_dir.stat().st_mode & 0o777 == 0o700


def test_a_squatted_temporary_folder_is_not_used(tmp_path: Path, temporary: Path) -> None:
    compiler = empty_library(tmp_path)
    squatted = temporary / f"outrider-{os.geteuid()}"
    squatted.mkdir()
    squatted.chmod(0o777)
    built = attempt(compiler, None)
    assert built.library is not None
    assert built.folder is None
    assert list(squatted.iterdir()) == []
    assert Path(built.library._name).is_file()  # pyright: ignore[reportPrivateUsage]
    (alone,) = (path for path in temporary.iterdir() if path != squatted)
    assert alone.stat().st_mode & 0o777 == 0o700


def test_a_library_in_a_read_only_cache_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler, cache_dir = empty_library(tmp_path), tmp_path / "cache"
    attempt(compiler, cache_dir)

    def read_only(*_: object) -> None:
        return None

    monkeypatch.setattr(build, "_made_once", read_only)
    assert attempt(compiler, cache_dir).folder == cache_dir
    assert num_builds(tmp_path) == 1
