"""`outrider models inflate`: the embedded target at the cost of a bigger model, with its heads."""

from __future__ import annotations

from pathlib import Path

from outrider.cli.call import Call, needed
from outrider.cli.options import InflateOptions
from outrider.cli.output import json_line, size
from outrider.core.errors import ContractError
from outrider.core.files import new_folder


def inflate(call: Call[InflateOptions]) -> int:
    """Write the checkpoint, with a bar on a terminal, and the heads that lie beside the small one;
    say what it holds."""
    name, folder = needed(call, "SHAPE"), Path(needed(call, "FOLDER", position=1))

    from rich.progress import BarColumn, TimeElapsedColumn

    from outrider.bench.studies.draft_heads import heads_beside
    from outrider.cli.paint import Bar, words
    from outrider.lab.inflate import shape_called
    from outrider.lab.inflate_files import INFLATABLE, Written, write_inflated, write_inflated_heads
    from outrider.models.loading import DTYPES, resolve

    shape, dtype = shape_called(name), DTYPES[call.options.dtype]
    source = resolve(call.options.source)
    done: Written | None = None
    heads: list[str] = []
    with new_folder(folder) as files:
        with Bar(words(), BarColumn(), TimeElapsedColumn(), transient=True) as progress:
            task = progress.add_task(f"inflating to {name}", total=None)
            for done in write_inflated(source, shape, folder, dtype):
                progress.update(task, total=done.num_files_in_all, completed=done.num_files)
        if done is None:
            raise ContractError("nothing was written")
        # A model whose heads fail goes as well.
        files.extend(folder.iterdir())
        for kind, place in heads_beside(source).items():
            if kind in INFLATABLE:
                write_inflated_heads(place, source, shape, folder / kind, dtype)
                files.extend([*(folder / kind).iterdir(), folder / kind])
                heads.append(kind)
    share = done.num_zeros / done.num_parameters
    if call.options.json:
        facts = {"folder": str(folder), "shape": name, "num_parameters": done.num_parameters}
        more = {"num_bytes": done.num_bytes, "zero_share": round(share, 4), "heads": heads}
        print(json_line({**facts, **more}))
        return 0
    print(
        f"{folder}: {done.num_parameters / 1e9:.3f} billion weights, {size(done.num_bytes)}, "
        f"{100 * share:.0f} % of them zeros that are read like any others.\n"
        f"It writes what {call.options.source} writes:\n"
        f'  outrider generate "def add(a, b):" --target {folder} --draft outrider/embedded-draft'
    )
    for kind in heads:
        print(f"Its {kind} heads, which draft alike: --draft {folder / kind}")
    return 0
