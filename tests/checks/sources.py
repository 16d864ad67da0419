"""The source of both packages, parsed once in a process for all rules of design."""

from __future__ import annotations

import ast
import gc
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
    was = gc.isenabled()
    # A million nodes that stay, and that each collection would look at.
    gc.disable()
    try:
        return {path: ast.parse(path.read_text(encoding="utf-8")) for path in files()}
    finally:
        (gc.enable if was else gc.disable)()


@cache
def nodes() -> dict[Path, tuple[ast.AST, ...]]:
    """Imports, handlers, assertions, attributes and calls, which are what rules are about."""
    kinds = (ast.Import, ast.ImportFrom, ast.ExceptHandler, ast.Assert, ast.Attribute, ast.Call)
    return {
        path: tuple(node for node in ast.walk(tree) if isinstance(node, kinds))
        for path, tree in trees().items()
    }
