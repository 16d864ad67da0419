"""Compiled kernels are built once and kept; whatever goes wrong is a sentence."""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from doubles.posing_compiler import (
    SOURCES,
    attempt,
    empty_library,
    later_process,
    libraries,
    names,
    num_builds,
    script,
)
from outrider.core import env
from outrider.kernels.native import build
from outrider.kernels.native import build as levels
from outrider.kernels.native.build import built_kernels, must_compile
from outrider.kernels.native.ops import NativeOps
from unit.kernels.paged_cases import Heads, chain, make_pass

pytestmark = [pytest.mark.wide, pytest.mark.usefixtures("one_source")]


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary files go in these tests, so that none meets the user's kernels."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def test_no_compiler_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert attempt("no-such-c++ -v", tmp_path).refusal == (
        "the C++ compiler 'no-such-c++ -v' was not found"
    )
    monkeypatch.setenv("PATH", str(tmp_path))
    assert attempt(None, tmp_path).refusal == (
        "no C++ compiler found (looked for c++, g++, clang++); "
        "this package brings no compiled kernels"
    )
    assert attempt("'c++", tmp_path).refusal == (
        'the C++ compiler "\'c++" is no command: No closing quotation'
    )


def test_whether_a_compiler_would_run_is_known_before(tmp_path: Path) -> None:
    compiler, cache = empty_library(tmp_path), tmp_path / "cache"
    assert must_compile(compiler, cache)
    assert attempt(compiler, cache).library is not None
    assert not must_compile(compiler, cache)
    # Without one nothing is compiled.
    assert not must_compile("no-such-c++", cache)


def test_a_failing_compiler_is_quoted(tmp_path: Path) -> None:
    compiler = script(
        tmp_path, "echo 'In file included' >&2", "echo 'x.h:1: error: boom' >&2; exit 1"
    )
    refusal = attempt(compiler, tmp_path / "cache").refusal
    assert refusal is not None
    assert refusal.endswith("failed: x.h:1: error: boom")
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [".lock"]


def test_a_failure_is_not_tried_twice(tmp_path: Path) -> None:
    compiler = script(tmp_path, f"echo >> '{tmp_path}/runs'; exit 1")
    first = attempt(compiler, tmp_path)
    tried = num_builds(tmp_path)
    assert tried > 0
    assert built_kernels(compiler, tmp_path) is first
    assert num_builds(tmp_path) == tried


def test_a_library_that_does_not_load_is_a_sentence(tmp_path: Path) -> None:
    listed = f"printf '%s\\0' {' '.join(sorted(names()))}"
    compiler = script(tmp_path, f'{listed} > "$out"')
    refusal = attempt(compiler, tmp_path / "cache").refusal
    assert refusal is not None
    assert refusal.startswith("the compiled kernels do not load: ")


def test_a_library_is_built_once_and_kept_alone(tmp_path: Path) -> None:
    compiler, cache_dir = empty_library(tmp_path), tmp_path / "deep" / "cache"
    for _ in range(2):
        assert attempt(compiler, cache_dir).library is not None
    assert num_builds(tmp_path) == 1
    (library,) = libraries(cache_dir)
    record = library.with_name(f"{library.name}.sha256")
    assert {*cache_dir.iterdir()} == {library, record, cache_dir / ".lock"}
    digest = hashlib.sha256(library.read_bytes()).hexdigest()
    assert record.read_text() == f"{digest}  {library.name}\n"
    assert {path.stat().st_mode & 0o777 for path in cache_dir.iterdir()} == {0o600}
    assert cache_dir.stat().st_mode & 0o777 == 0o700


def test_builders_at_once_do_not_disturb_each_other(tmp_path: Path) -> None:
    compiler, cache_dir = empty_library(tmp_path), tmp_path / "cache"
    built_kernels.cache_clear()
    with ThreadPoolExecutor(4) as pool:
        attempts = [pool.submit(built_kernels.__wrapped__, compiler, cache_dir) for _ in range(4)]
        results = [attempt.result() for attempt in attempts]
    assert all(result.library is not None for result in results)
    assert len(libraries(cache_dir)) == 1
    assert num_builds(tmp_path) == 1


def test_a_library_that_lacks_a_function_is_refused_by_its_name(tmp_path: Path) -> None:
    compiler = empty_library(tmp_path, lacks="outrider_forward")
    refusal = attempt(compiler, tmp_path / "cache").refusal
    assert refusal == "the compiled kernels do not load: it lacks outrider_forward"
    # The next process tries anew: the compiler may have been mended.
    assert attempt(empty_library(tmp_path), tmp_path / "cache").library is not None


def test_two_processes_at_once_build_once(tmp_path: Path) -> None:
    compiler, cache_dir = empty_library(tmp_path, "sleep 1"), tmp_path / "cache"
    with ThreadPoolExecutor(3) as pool:
        told = [pool.submit(later_process, compiler, cache_dir) for _ in range(3)]
        assert [one.result() for one in told] == ["loaded"] * 3
    assert num_builds(tmp_path) == 1


def test_a_process_that_waits_too_long_builds_for_itself(
    tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler, cache_dir = empty_library(tmp_path), tmp_path / "cache"
    monkeypatch.setattr(build, "WAIT_SECONDS", 0.2)
    cache_dir.mkdir(mode=0o700)
    holder = (
        "import fcntl, sys, time; file = open(sys.argv[1], 'w');"
        "fcntl.flock(file, fcntl.LOCK_EX); print('held', flush=True); time.sleep(600)"
    )
    command = [sys.executable, "-c", holder, str(cache_dir / ".lock")]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            built = attempt(compiler, cache_dir)
        finally:
            process.kill()
    assert built.library is not None
    assert built.folder == temporary / f"outrider-{os.geteuid()}"


def test_what_a_killed_build_left_is_swept(tmp_path: Path) -> None:
    compiler, cache_dir = empty_library(tmp_path, "sleep 60"), tmp_path / "cache"
    program = (
        "import sys, pathlib; from outrider.kernels.native.build import built_kernels;"
        "built_kernels(sys.argv[1], pathlib.Path(sys.argv[2]))"
    )
    command = [sys.executable, "-c", program, compiler, str(cache_dir)]
    with subprocess.Popen(command, start_new_session=True) as process:
        deadline = time.monotonic() + 240
        while not list(cache_dir.glob("build-*")) and time.monotonic() < deadline:
            time.sleep(0.02)
        # With the compilers that it started.
        os.killpg(process.pid, signal.SIGKILL)
    assert list(cache_dir.glob("build-*"))
    (cache_dir / ".kernels-1.so.abc.part").write_bytes(b"half")
    assert attempt(empty_library(tmp_path), cache_dir).library is not None
    assert {path.suffix for path in cache_dir.iterdir()} <= {".so", ".sha256", ""}
    assert not list(cache_dir.glob("build-*"))


def test_a_log_says_that_it_compiles(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="outrider.progress")
    compiler = empty_library(tmp_path)
    attempt(compiler, tmp_path / "cache")
    assert any(message.startswith("Compiling the native kernels") for message in caplog.messages)
    caplog.clear()
    attempt(compiler, tmp_path / "cache")
    assert caplog.messages == []


def test_another_cpu_or_source_has_another_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler, cache_dir = empty_library(tmp_path), tmp_path / "cache"
    attempt(compiler, cache_dir)
    monkeypatch.setattr(build, "cpu_identity", lambda: "another CPU")
    attempt(compiler, cache_dir)
    monkeypatch.setattr(build, "FLAGS", (*levels.FLAGS, "-g"))
    attempt(compiler, cache_dir)
    assert len(libraries(cache_dir)) == 3


@pytest.mark.parametrize("home", ["missing", "read-only", "none"])
def test_without_a_writable_cache_it_builds_once_elsewhere(
    tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch, home: str
) -> None:
    compiler, cache_dir = empty_library(tmp_path), tmp_path / "cache"
    if home == "missing":
        (tmp_path / "file").touch()
        cache_dir = tmp_path / "file" / "cache"
    elif home == "read-only":
        cache_dir.mkdir(mode=0o700)
        access = os.access

        def read_only(path: Path, mode: int) -> bool:
            return path != cache_dir and access(path, mode)

        monkeypatch.setattr(os, "access", read_only)
    for _ in range(2):
        built = attempt(compiler, None if home == "none" else cache_dir)
        assert built.library is not None
        assert built.folder == temporary / f"outrider-{os.geteuid()}"
    assert num_builds(tmp_path) == 1


@pytest.mark.deep
@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="a Zen is an x86-64")
@pytest.mark.parametrize("heads", [Heads(2, 2, 80), Heads(5, 1, 6)], ids=str)
def test_tuned_for_a_zen_every_chain_is_fused(
    heads: Heads, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GCC prefers products and sums apart in short chains there, such as one query's last vector,
    whose bits would then not be those that it has beside other queries."""
    monkeypatch.setattr(build, "SOURCES", SOURCES)
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
