"""The source of both packages, parsed once in a process for all rules of design."""

from __future__ import annotations

import ast
import gc
from collections.abc import Generator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import outrider
import outrider_lab

PACKAGE, LAB = Path(outrider.__file__).parent, Path(outrider_lab.__file__).parent


def files() -> list[Path]:
    return sorted(path for home in (PACKAGE, LAB) for path in home.rglob("*.py"))


def name_of(path: Path) -> str:
    """The path within `outrider`; that of a file of the lab begins with its package."""
    return path.relative_to(PACKAGE if path.is_relative_to(PACKAGE) else LAB.parent).as_posix()


@cache
def trees() -> dict[Path, ast.Module]:
    with staying():
        return {path: ast.parse(path.read_text(encoding="utf-8")) for path in files()}


@cache
def nodes() -> dict[Path, tuple[ast.AST, ...]]:
    """Imports, handlers, assertions, attributes and calls, which are what rules are about."""
    kinds = (ast.Import, ast.ImportFrom, ast.ExceptHandler, ast.Assert, ast.Attribute, ast.Call)
    parsed = trees()
    with staying():
        return {
            path: tuple(node for node in ast.walk(tree) if isinstance(node, kinds))
            for path, tree in parsed.items()
        }


@contextmanager
def staying() -> Generator[None]:
    """What is made here stays: no collection looks at it, now or later. Each that looked at a
    million nodes took a second, in every test that follows in the process."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        (gc.enable if was else gc.disable)()
