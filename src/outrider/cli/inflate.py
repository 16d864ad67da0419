"""`outrider models inflate`: the embedded target at the cost of a bigger model."""

from __future__ import annotations

import sys
from pathlib import Path

from outrider.cli.call import Call, needed
from outrider.cli.options import InflateOptions
from outrider.cli.output import json_line, size


def inflate(call: Call[InflateOptions]) -> int:
    """Write the checkpoint, with a bar on a terminal, and say what it holds."""
    name, folder = needed(call, "SHAPE"), Path(needed(call, "FOLDER", position=1))

    from rich.console import Console
    from rich.progress import Progress

    from outrider.models.inflate import shape_called
    from outrider.models.inflate_files import Written, write_inflated
    from outrider.models.loading import DTYPES, resolve

    shape, dtype = shape_called(name), DTYPES[call.options.dtype]
    done: Written | None = None
    with Progress(console=Console(file=sys.stderr), transient=True) as progress:
        task = progress.add_task(f"inflating to {name}", total=None)
        for done in write_inflated(resolve(call.options.source), shape, folder, dtype):
            progress.update(task, total=done.num_files_in_all, completed=done.num_files)
    assert done is not None
    share = done.num_zeros / done.num_parameters
    if call.options.json:
        facts = {"folder": str(folder), "shape": name, "num_parameters": done.num_parameters}
        print(json_line(facts | {"num_bytes": done.num_bytes, "zero_share": round(share, 4)}))
        return 0
    print(
        f"{folder}: {done.num_parameters / 1e9:.3f} billion weights, {size(done.num_bytes)}, "
        f"{100 * share:.0f} % of them zeros that are read like any others.\n"
        f"It writes what {call.options.source} writes:\n"
        f'  outrider generate "def add(a, b):" --target {folder} --draft outrider/embedded-draft'
    )
    return 0
