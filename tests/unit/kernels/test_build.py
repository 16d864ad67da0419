from __future__ import annotations

import platform
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from outrider.core import env
from outrider.kernels import build
from outrider.kernels.build import Built, built_kernels
from outrider.kernels.native import NativeOps
from unit.kernels.paged_cases import Heads, chain, make_pass


def script(folder: Path, *lines: str) -> str:
    """A command that poses as a compiler; `$out` is the file it should write."""
    path = folder / "posing c++"
    find_output = 'for word; do out="$last"; last="$word"; done; out="$last"'
    version = '[ "$1" = --version ] && echo 1.0 && exit 0'
    path.write_text("\n".join(["#!/bin/sh", version, find_output, *lines, ""]))
    path.chmod(0o755)
    return f"'{path}'"


def empty_library(folder: Path) -> str:
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler to make an empty library with")
    link = f'{compiler} -shared -x c++ /dev/null -o "$out" && echo >> "{folder}/runs"'
    return script(folder, f'case "$out" in *.so) {link};; esac')


def num_builds(folder: Path) -> int:
    runs = folder / "runs"
    return len(runs.read_text().splitlines()) if runs.exists() else 0


def attempt(compiler: str | None, cache_dir: Path | None) -> Built:
    """As in a new process."""
    built_kernels.cache_clear()
    return built_kernels(compiler, cache_dir)


def test_no_compiler_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert attempt("no-such-c++ -v", tmp_path).refusal == (
        "the C++ compiler 'no-such-c++ -v' was not found"
    )
    monkeypatch.setenv("PATH", str(tmp_path))
    assert attempt(None, tmp_path).refusal == (
        "no C++ compiler found (looked for c++, g++, clang++)"
    )
    assert attempt("'c++", tmp_path).refusal == (
        'the C++ compiler "\'c++" is no command: No closing quotation'
    )


def test_a_failing_compiler_is_quoted(tmp_path: Path) -> None:
    compiler = script(
        tmp_path, "echo 'In file included' >&2", "echo 'x.h:1: error: boom' >&2; exit 1"
    )
    refusal = attempt(compiler, tmp_path / "cache").refusal
    assert refusal is not None
    assert refusal.endswith("failed: x.h:1: error: boom")
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_failure_is_not_tried_twice(tmp_path: Path) -> None:
    compiler = script(tmp_path, f"echo >> '{tmp_path}/runs'; exit 1")
    first = attempt(compiler, tmp_path)
    tried = num_builds(tmp_path)
    assert tried > 0
    assert built_kernels(compiler, tmp_path) is first
    assert num_builds(tmp_path) == tried


def test_a_library_that_does_not_load_is_a_sentence(tmp_path: Path) -> None:
    compiler = script(tmp_path, 'echo "not a library" > "$out"')
    refusal = attempt(compiler, tmp_path / "cache").refusal
    assert refusal is not None
    assert refusal.startswith("the compiled kernels do not load: ")


def test_a_library_is_built_once_and_kept_alone(tmp_path: Path) -> None:
    compiler, cache_dir = empty_library(tmp_path), tmp_path / "deep" / "cache"
    for _ in range(2):
        assert attempt(compiler, cache_dir).library is not None
    assert num_builds(tmp_path) == 1
    assert [path.suffix for path in cache_dir.iterdir()] == [".so"]


def test_builders_at_once_do_not_disturb_each_other(tmp_path: Path) -> None:
    compiler, cache_dir = empty_library(tmp_path), tmp_path / "cache"
    built_kernels.cache_clear()
    with ThreadPoolExecutor(4) as pool:
        attempts = [pool.submit(built_kernels.__wrapped__, compiler, cache_dir) for _ in range(4)]
        results = [attempt.result() for attempt in attempts]
    assert all(result.library is not None for result in results)
    assert len(list(cache_dir.iterdir())) == 1


@pytest.mark.parametrize("damage", [b"", b"garbage"])
def test_a_damaged_library_is_built_again(tmp_path: Path, damage: bytes) -> None:
    compiler, damaged = empty_library(tmp_path), tmp_path / "damaged"
    attempt(compiler, tmp_path / "whole")
    (library,) = (tmp_path / "whole").iterdir()
    damaged.mkdir()
    (damaged / library.name).write_bytes(damage)
    assert attempt(compiler, damaged).library is not None
    assert num_builds(tmp_path) == 2


def test_another_cpu_or_source_has_another_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler, cache_dir = empty_library(tmp_path), tmp_path / "cache"
    attempt(compiler, cache_dir)
    monkeypatch.setattr(build, "cpu_identity", lambda: "another CPU")
    attempt(compiler, cache_dir)
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-g"))
    attempt(compiler, cache_dir)
    assert len(list(cache_dir.iterdir())) == 3


@pytest.mark.parametrize("cached", [True, False])
def test_without_a_writable_cache_it_builds_elsewhere(tmp_path: Path, cached: bool) -> None:
    compiler = empty_library(tmp_path)
    file = tmp_path / "file"
    file.touch()
    assert attempt(compiler, file / "cache" if cached else None).library is not None
    assert num_builds(tmp_path) == 1


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="a Zen is an x86-64")
@pytest.mark.parametrize("heads", [Heads(2, 2, 80), Heads(5, 1, 6)], ids=str)
def test_tuned_for_a_zen_every_chain_is_fused(heads: Heads) -> None:
    """GCC prefers products and sums apart in short chains there, such as one query's last vector,
    whose bits would then not be those that it has beside other queries."""
    compiler = f"{env.compiler() or 'c++'} -mtune=znver3"
    built = built_kernels(compiler, env.cache_folder())
    if built.library is None:
        pytest.skip(str(built.refusal))
    ops = NativeOps(built.library, torch.float32, 1)
    case = make_pass([chain(40, 60)], heads=heads, dtype=torch.float32)
    size = heads.num_heads * heads.head_dim
    together_NO, alone_NO = torch.empty(2, 60, size)
    ops.attention(case.qkv_NE, case.k_GSD, case.v_GSD, case.plan, 0.125, together_NO)
    for row in range(60):
        one = case.rows([row])
        ops.attention(one.qkv_NE, one.k_GSD, one.v_GSD, one.plan, 0.125, alone_NO[row : row + 1])
    assert torch.equal(together_NO, alone_NO)
