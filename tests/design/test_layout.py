"""How the tree must look: sizes, what an __init__ holds, one reader of the environment."""

from __future__ import annotations

import ast
import gc
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

import outrider
from checks.sources import LAB, PACKAGE, files, nodes, trees

ROOT = Path(__file__).parents[2]
SOURCES = files()
MAX_LINES = 600
FORBIDDEN = {"pickle", "marshal", "dill", "cloudpickle", "shelve"}


# Each rule is one test over all files: a test for every file and rule takes longer to count than to
# run.
def names(paths: Iterable[Path]) -> list[str]:
    return [str(path.relative_to(ROOT)) for path in paths]


def test_files_stay_short() -> None:
    long = [p for p in SOURCES if len(p.read_text(encoding="utf-8").splitlines()) > MAX_LINES]
    assert names(long) == []


def test_files_that_sources_name_exist() -> None:
    """In docstrings and comments, also of C++: a path with its folder, from the package, the lab or
    the root, or from a folder of the file's own path."""
    own = PACKAGE / "kernels" / "native"
    named = [
        (path, name, [PACKAGE, LAB, ROOT, own.parent, *path.parents[: len(path.parts)]])
        for path in (*SOURCES, *sorted((own / "csrc").iterdir()))
        for name in re.findall(
            r"(?<![\w/.:{}*<])\w+(?:/\w+)+\.py\b", path.read_text(encoding="utf-8")
        )
    ]
    assert len(named) > 100
    assert [
        f"{path.relative_to(ROOT)}: {name}"
        for path, name, folders in named
        if not any((folder / name).exists() for folder in folders)
    ] == []


def test_the_map_of_folders_is_whole() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    folders = [
        path.parent
        for path in SOURCES
        if path.name == "__init__.py" and path.parent.parent in (PACKAGE, PACKAGE / "plugins", LAB)
    ]
    assert len(folders) > 30
    assert [
        name
        for name in names(folders)
        if name != "src/outrider/plugins" and not re.search(rf"{name}\s", text)
    ] == []


def test_a_folder_says_what_it_offers() -> None:
    """A top folder has a docstring in its `__init__`; that of a folder in it may be empty."""
    inits = [path for path in SOURCES if path.name == "__init__.py"]
    must = [path for path in inits if path.stat().st_size or path.parent.parent in (PACKAGE, LAB)]
    assert names(path for path in must if ast.get_docstring(trees()[path]) is None) == []


def test_an_init_imports_only_what_its_package_offers() -> None:
    bad: list[Path] = []
    for path in (path for path in SOURCES if path.name == "__init__.py"):
        package = ".".join(path.parent.relative_to(PACKAGE.parent).parts)
        for node in trees()[path].body:
            match node:
                case ast.Import():
                    bad.append(path)
                case ast.ImportFrom(module=module) if module not in ("__future__", "typing"):
                    bad += [] if f"{module}.".startswith(f"{package}.") else [path]
                case _:
                    pass
    assert names(bad) == []


def test_nothing_is_unpickled_and_nothing_swallowed() -> None:
    """No module that can run a file's code, and no `except:` that hides what went wrong."""
    bad: list[Path] = []
    for path, found in nodes().items():
        for node in found:
            match node:
                case ast.Import(names=aliases):
                    modules = {alias.name.split(".")[0] for alias in aliases}
                    bad += [path] if FORBIDDEN & modules else []
                case ast.ImportFrom(module=module):
                    bad += [path] if (module or "").split(".")[0] in FORBIDDEN else []
                case ast.ExceptHandler(type=None):
                    bad.append(path)
                case _:
                    pass
    assert names(bad) == []


def test_only_one_module_reads_the_environment() -> None:
    readers = {
        path
        for path, found in nodes().items()
        for node in found
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv")
    }
    assert names(readers) == names([PACKAGE / "core" / "env.py"])


def test_only_the_command_line_prints() -> None:
    """Modules of cli/, and those of plugins' verbs."""
    printing = {
        path
        for path, found in nodes().items()
        if not (path.is_relative_to(PACKAGE / "cli") or path.is_relative_to(LAB / "cli"))
        if path.name != "verbs.py"
        for node in found
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        if node.func.id == "print"
    }
    assert names(printing) == []


def test_importing_the_package_does_nothing() -> None:
    """No heavy module, no variable needed, and names resolve only when used."""
    script = (
        "import sys, outrider\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules\n"
        "assert outrider.SamplingParams().max_tokens == 128\n"
        "assert outrider.EngineConfig().most_k == 4\n"
        "assert 'torch' not in sys.modules\n"
        "assert set(outrider.__all__) <= set(dir(outrider))\n"
        "try:\n"
        "    outrider.nothing\n"
        "except AttributeError as error:\n"
        "    assert 'nothing' in str(error)\n"
        "else:\n"
        "    raise SystemExit(1)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], check=False, env={}, timeout=240)
    assert done.returncode == 0


def test_building_kernels_imports_no_torch() -> None:
    """Neither a wheel's nor the first start's, and tests start many builders."""
    script = "import sys, outrider.kernels.native.build; sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], check=False, timeout=240)
    assert done.returncode == 0


@pytest.mark.parametrize("collects", [True, False])
def test_a_name_of_the_package_leaves_the_collector_as_it_was(
    collects: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(outrider.__dict__["_HOMES"], "LLM", "outrider.nowhere")
    was = gc.isenabled()
    try:
        (gc.enable if collects else gc.disable)()
        assert outrider.SamplingParams.__name__ == "SamplingParams"
        assert gc.isenabled() is collects
        with pytest.raises(ModuleNotFoundError, match="nowhere"):
            _ = outrider.LLM
        assert gc.isenabled() is collects
    finally:
        (gc.enable if was else gc.disable)()


# What one run in a hundred needs is imported where it is made: each module takes milliseconds.
IDLE = {
    *("engine.cuda_graph.build", "plugins.lanes.process.client", "plugins.lanes.ahead.drafter"),
    *("drafters.suffix", "drafters.ngram", "drafters.bridge"),
    *("plugins.heads.hidden", "plugins.heads.eagle", "plugins.heads.medusa", "server.app"),
    *("plugins.hybrids.model", "plugins.published.tensors"),
    "cli.main",
}


def test_a_pair_starts_without_what_it_does_not_run() -> None:
    met, left = set[str](), ["outrider.api.llm"]
    while left:
        name = left.pop()
        path = PACKAGE.parent.joinpath(*name.split("."))
        found = trees().get(path.with_suffix(".py")) or trees().get(path / "__init__.py")
        if name in met or found is None:
            continue
        met.add(name)
        for node in found.body:
            if isinstance(node, ast.ImportFrom) and node.module:
                left += [node.module, *(f"{node.module}.{one.name}" for one in node.names)]
    assert len(met) > 100
    assert not met & {f"outrider.{name}" for name in IDLE}


def test_scripts_are_valid_shell() -> None:
    names = "setup lib.sh demo test check lint bench docs study real_model wheel arm64_check"
    names += " release_check"
    for name in names.split():
        done = subprocess.run(["sh", "-n", str(ROOT / "scripts" / name)], check=False, timeout=240)
        assert done.returncode == 0


# An environment with a pip, and one without, into which that of .venv installs.
@pytest.mark.parametrize(("runs", "into"), [(".own", ".own"), (".venv", ".bare")])
def test_pip_is_heard_only_where_it_fails(tmp_path: Path, runs: str, into: str) -> None:
    python = tmp_path / runs / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text('#!/bin/sh\necho "WARNING: Retrying" >&2\nfor last; do :; done\nexit $last\n')
    for program in (python, python.with_name("pip")):
        program.touch()
        program.chmod(0o755)
    script = f'. "{ROOT}/scripts/lib.sh"; venv={into} pip_install "$1"'
    for status, heard in ((0, ""), (7, "WARNING: Retrying\n")):
        done = subprocess.run(
            ["sh", "-euc", script, "sh", str(status)],
            cwd=tmp_path,
            check=False,
            capture_output=True,
            text=True,
            timeout=240,
        )
        assert (done.returncode, done.stderr) == (status, heard)


def test_the_servers_front_end_imports_no_torch() -> None:
    """The engine's process does; a second copy costs seconds at each start, and 200 MB."""
    script = (
        "import sys, outrider.cli.serve, outrider.server.app, outrider.server.process_port\n"
        "import outrider.plugins.metrics, outrider.server.run\n"
        "raise SystemExit('torch' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], check=False, env={}, timeout=240)
    assert done.returncode == 0


# Programs of others, and files that a user has.
OTHER_FILES = {"convert_llama_ggml_to_gguf.py"}


def test_comments_and_docstrings_name_modules_that_exist() -> None:
    """A module that became part of another is a dead end for whoever follows its name."""
    folders = ("src", "tests", "studies", "scripts")
    known = {path.name for folder in folders for path in (ROOT / folder).rglob("*.py")}
    known |= OTHER_FILES
    named = re.compile(r"(?<![\w/.-])(?:[a-z_]+/)*([a-z_]+\.py)\b")
    dead = {
        f"{path.name}: {found[0]}"
        for path in SOURCES
        for found in named.finditer(path.read_text(encoding="utf-8"))
        if found[1] not in known
    }
    assert dead == set()
