"""Who may use tiles: a machine's own word, a trial in another process, the kernel's permission."""

from __future__ import annotations

import ctypes
import platform
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from outrider.core import env
from outrider.kernels.native import build
from outrider.kernels.native import build as levels
from outrider.kernels.native import cpu as tiles
from outrider.kernels.native.build import built_kernels
from outrider.kernels.native.cpu import tiles_refusal

pytestmark = pytest.mark.wide

CSRC = Path(build.__file__).parent / "csrc"
EMULATOR = Path(__file__).with_name("amx_emulator.cpp")
TRIED = ("team", "attention", "quantised", "tiles_linear", "tiles_quantised", "tiles_check")
FORBIDDEN = "AMX: the kernel forbids it"

Double = Callable[..., ctypes.CDLL]


def compile_with(*words: str) -> None:
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    subprocess.run([compiler, *words], check=True, capture_output=True)


def no_trial(library: Path) -> None:
    pytest.fail(f"a trial of {library}")


@pytest.fixture
def double(tmp_path: Path) -> Double:
    """A library that answers as it is told; its check may do anything."""

    def make(check: str = "return 0;", *, missing: int = 0, permit: int = 1) -> ctypes.CDLL:
        source, library = tmp_path / "double.cpp", tmp_path / "double.so"
        source.write_text(
            f'extern "C" int outrider_tiles_missing() {{ return {missing}; }}\n'
            f'extern "C" int outrider_tiles_permit() {{ return {permit}; }}\n'
            f'extern "C" int outrider_tiles_check() {{ {check} }}\n'
        )
        compile_with("-shared", "-fPIC", str(source), "-o", str(library))
        return ctypes.CDLL(str(library))

    return make


@pytest.mark.parametrize(
    ("check", "refusal"),
    [
        ("__builtin_trap();", "AMX: its trial crashed: Illegal instruction"),
        ("return 3;", FORBIDDEN),
        ("return 4;", "AMX: its trial gave wrong sums"),
        ("return 9;", "AMX: its trial failed: it gave no message"),
    ],
)
def test_what_goes_wrong_in_the_trial_is_a_sentence(
    double: Double, tmp_path: Path, check: str, refusal: str
) -> None:
    assert tiles_refusal(double(check)) == refusal
    assert not (tmp_path / "double.tiles").exists()


def test_a_trial_that_hangs_is_ended(double: Double, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "TRIAL_SECONDS", 0.5)
    refusal = tiles_refusal(double("for (volatile int i = 0;;) i = i + 1;"))
    assert refusal is not None
    assert refusal.startswith("AMX: its trial did not run: ")
    assert "timed out" in refusal


def test_a_trial_is_passed_once(
    double: Double, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert tiles_refusal(double()) is None
    assert (tmp_path / "double.tiles").exists()
    monkeypatch.setattr(tiles, "_trial", no_trial)
    assert tiles_refusal(ctypes.CDLL(str(tmp_path / "double.so"))) is None


def test_permission_is_asked_for_by_this_process_too(double: Double) -> None:
    assert tiles_refusal(double(permit=0)) == FORBIDDEN


def test_a_library_without_a_file_cannot_be_tried(double: Double, tmp_path: Path) -> None:
    library = double()
    (tmp_path / "double.so").unlink()
    refusal = tiles_refusal(library)
    assert refusal is not None
    assert refusal.startswith("AMX: its trial failed: ")
    assert "double.so" in refusal


@pytest.mark.parametrize(
    ("missing", "part"), [(1, "this CPU"), (2, "operating system"), (3, "compiler")]
)
def test_what_is_missing_is_told_without_a_trial(
    double: Double, monkeypatch: pytest.MonkeyPatch, missing: int, part: str
) -> None:
    monkeypatch.setattr(tiles, "_trial", no_trial)
    refusal = tiles_refusal(double(missing=missing))
    assert refusal is not None
    assert refusal.startswith("AMX: ")
    assert part in refusal


def test_this_cpu_answers_by_its_flags() -> None:
    cpuinfo = Path("/proc/cpuinfo")
    built = built_kernels(env.compiler(), env.cache_folder())
    if built.library is None or not cpuinfo.exists():
        pytest.skip(built.refusal or "no /proc/cpuinfo")
    if "OUTRIDER_SOFTWARE" in (env.compiler() or ""):
        pytest.skip("instructions of the CPU's are replaced by plain C++")
    if "amx_int8" not in cpuinfo.read_text():
        assert tiles_refusal(built.library) == "AMX: this CPU has no tiles for bfloat16 and int8"


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="AMX is of x86-64")
def test_the_trial_passes_on_emulated_instructions(tmp_path: Path) -> None:
    """The very code that runs on AMX, each tile instruction emulated when this CPU refuses it."""
    program = tmp_path / "trial"
    sources = [CSRC / f"{name}.cpp" for name in TRIED]
    amx = ("-march=native", "-mamx-tile", "-mamx-int8", "-mamx-bf16")
    words = [*levels.FLAGS, "-O1", *amx, f"-I{CSRC}", *map(str, sources), str(EMULATOR)]
    compile_with(*words, "-o", str(program))
    assert subprocess.run([program], check=False, timeout=240).returncode == 0
