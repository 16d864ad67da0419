"""Entry point of an engine's process on its cores or GPU: `python -m outrider.server.placed FD
PLACEMENT`.

FD is the file descriptor of the engine's end of a socket pair, PLACEMENT the JSON of a `Placement`.
"""

from __future__ import annotations

import os
import sys

import msgspec

from outrider.core.env import show_gpu
from outrider.server.placement import Placement


def main() -> None:
    placement = msgspec.json.decode(sys.argv[2], type=Placement)
    if placement.cores and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, placement.cores)
    if placement.gpu is not None:
        show_gpu(placement.gpu)
    # Imported here: PyTorch counts the available cores and GPUs when it is loaded.
    from outrider.server.engine_process import main as run

    run()


if __name__ == "__main__":
    main()
