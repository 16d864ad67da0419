"""The package's source, parsed once in a process: all rules of design look at the same trees."""

from __future__ import annotations

import ast
import gc
from functools import cache
from pathlib import Path

import outrider

PACKAGE = Path(outrider.__file__).parent


@cache
def trees() -> dict[Path, ast.Module]:
    was = gc.isenabled()
    # A million nodes that stay, and that each collection would look at.
    gc.disable()
    try:
        return {
            path: ast.parse(path.read_text(encoding="utf-8"))
            for path in sorted(PACKAGE.rglob("*.py"))
        }
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
