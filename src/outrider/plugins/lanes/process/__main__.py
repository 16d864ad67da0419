"""The start of a drafter's process: python -m outrider.plugins.lanes.process OPTIONS DESCRIPTOR...

OPTIONS is the JSON of a `ChildOptions`, each DESCRIPTOR one that the engine opened (`Inherited` in
child.py, the program of the process).
"""

from __future__ import annotations

import os
import sys

from outrider.plugins.lanes.process.options import ChildOptions


def main() -> None:
    options = ChildOptions.from_json(sys.argv[1])
    if options.cores and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, options.cores)
    # Imported here: PyTorch counts the hardware threads that it may use when it is loaded.
    from outrider.plugins.lanes.process.child import Inherited, serve

    serve(Inherited.named(sys.argv[2:]), options)
    # At once: there is nothing to save, and PyTorch takes a while to be taken down.
    os._exit(0)


if __name__ == "__main__":
    main()
