"""Runs a peer's side in a Python that does not have Outrider: `python -P start.py side_openvino`.

Only the package `outrider` becomes importable there, not what is installed beside it: an engine's
own environment must not find our torch and numpy before its own. So a side that is started this way
may import of ours what needs the standard library alone (`lines.py`).
"""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType


def lend_package() -> None:
    """Make `outrider` a package of this process, by its folder."""
    package = ModuleType("outrider")
    package.__path__ = [str(Path(__file__).parents[2])]
    sys.modules["outrider"] = package


if __name__ == "__main__":
    lend_package()
    import_module(f"outrider.bench.peers.{sys.argv[1]}").main()
