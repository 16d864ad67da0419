"""How the tree must look: sizes, empty __init__ files, one reader of the environment."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "outrider"
SOURCES = sorted(PACKAGE.rglob("*.py"))
MAX_LINES = 400
FORBIDDEN = {"pickle", "marshal", "dill", "cloudpickle", "shelve"}


def names(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", SOURCES, ids=names)
def test_files_stay_short(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= MAX_LINES


def test_init_files_are_empty_but_for_the_root() -> None:
    full = [path for path in PACKAGE.rglob("__init__.py") if path.stat().st_size]
    assert full == [PACKAGE / "__init__.py"]


@pytest.mark.parametrize("path", SOURCES, ids=names)
def test_nothing_is_unpickled_and_nothing_swallowed(path: Path) -> None:
    """No module that can run a file's code, and no `except:` that hides what went wrong."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            assert not FORBIDDEN & {alias.name.split(".")[0] for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            assert (node.module or "").split(".")[0] not in FORBIDDEN
        if isinstance(node, ast.ExceptHandler):
            assert node.type is not None


@pytest.mark.parametrize("path", SOURCES, ids=names)
def test_only_one_module_reads_the_environment(path: Path) -> None:
    readers = {
        node.attr
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv")
    }
    assert not readers or path == PACKAGE / "core" / "env.py"


@pytest.mark.parametrize("path", SOURCES, ids=names)
def test_only_the_command_line_prints(path: Path) -> None:
    if path.is_relative_to(PACKAGE / "cli"):
        return
    calls = [
        node
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    ]
    assert "print" not in {ast.unparse(call.func) for call in calls}


def test_importing_the_package_does_nothing() -> None:
    """No heavy module, no variable needed, and names resolve only when used."""
    script = (
        "import sys, outrider\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules\n"
        "assert outrider.SamplingParams().max_tokens == 128\n"
        "assert outrider.EngineConfig().k == 4\n"
        "assert 'torch' not in sys.modules\n"
        "assert set(outrider.__all__) <= set(dir(outrider))\n"
        "try:\n"
        "    outrider.nothing\n"
        "except AttributeError as error:\n"
        "    assert 'nothing' in str(error)\n"
        "else:\n"
        "    raise SystemExit(1)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], check=False, env={}, timeout=60)
    assert done.returncode == 0


def test_scripts_are_valid_shell() -> None:
    for name in ("setup", "lib.sh", "demo", "test", "check", "lint", "bench", "clean"):
        done = subprocess.run(["sh", "-n", str(ROOT / "scripts" / name)], check=False, timeout=60)
        assert done.returncode == 0
