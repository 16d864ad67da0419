"""Rewrites the assertions of all tests once, into the files where pytest looks for them.

pytest would do so on one core, while it collects them. Without this step all is the same, half a
minute later.
"""

# What pytest does itself has no public name.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import compileall
import os
from collections.abc import Sequence
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from _pytest.assertion import rewrite
from _pytest.config import _prepareconfig

ROOT = Path(__file__).parents[1]


def keep(config: Any, files: Sequence[Path]) -> None:
    """Rewrite those that are not kept as they are now."""
    state: Any = SimpleNamespace(trace=print)
    for file in files:
        folder = rewrite.get_cache_dir(file)
        kept = folder / (file.name.removesuffix(".py") + rewrite.PYC_TAIL)
        folder.mkdir(parents=True, exist_ok=True)
        if rewrite._read_pyc(file, kept) is None:
            source_hash, code = rewrite._rewrite_test(file, config)
            rewrite._write_pyc(state, code, source_hash, kept)


def main() -> None:
    config = _prepareconfig(["--noconftest", str(ROOT / "tests")])
    files = sorted((ROOT / "tests").rglob("*.py"), key=lambda file: file.stat().st_size)
    fork, count = get_context("fork"), os.cpu_count() or 1
    shares = [fork.Process(target=keep, args=(config, files[i::count])) for i in range(count)]
    for share in shares:
        share.start()
    for share in shares:
        share.join()
    compileall.compile_dir(ROOT / "src", quiet=1, workers=0)


if __name__ == "__main__":
    main()
