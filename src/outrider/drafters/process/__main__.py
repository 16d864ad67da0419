"""The start of a drafter's process: python -m outrider.drafters.process OPTIONS LINE DISTRIBUTIONS.

OPTIONS is the JSON of a `ChildOptions`; LINE and DISTRIBUTIONS are descriptors that the engine
opened: its socket, and the shared memory for distributions. child.py is what the process does.
"""

from __future__ import annotations

import os
import socket
import sys

from outrider.drafters.process.options import ChildOptions


def main() -> None:
    options = ChildOptions.from_json(sys.argv[1])
    if options.cores and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, options.cores)
    # Imported here: PyTorch counts the hardware threads that it may use when it is loaded.
    from outrider.drafters.process.child import serve

    serve(socket.socket(fileno=int(sys.argv[2])), int(sys.argv[3]), options)
    # At once: there is nothing to save, and PyTorch takes a while to be taken down.
    os._exit(0)


if __name__ == "__main__":
    main()
