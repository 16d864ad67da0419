"""`outrider models export`: a model as a file that llama.cpp and its kin read."""

from __future__ import annotations

from pathlib import Path

from outrider.cli.call import Call, needed
from outrider.cli.options import ExportOptions
from outrider.cli.output import json_line, size
from outrider.core.errors import ContractError


def export(call: Call[ExportOptions]) -> int:
    """Write the file, with a bar on a terminal, and say what it holds."""
    model, path = needed(call, "MODEL"), Path(needed(call, "FILE", position=1))

    from rich.progress import BarColumn, TimeElapsedColumn

    from outrider.cli.paint import Bar, words
    from outrider.lab.gguf_export import Exported, Wish
    from outrider.lab.gguf_export import export as written
    from outrider.models.loading import resolve

    options = call.options
    wish = Wish(
        form=options.gguf, pre_tokenizer=options.pre_tokenizer, name=model, force=options.force
    )
    done: Exported | None = None
    with Bar(words(), BarColumn(), TimeElapsedColumn(), transient=True) as progress:
        task = progress.add_task(f"exporting {model}", total=None)
        for done in written(resolve(model), path, wish):
            progress.update(task, total=done.num_tensors_in_all, completed=done.num_tensors)
    if done is None:
        raise ContractError("nothing was written")
    if call.options.json:
        facts = {"file": str(path), "format": options.gguf, "num_tensors": done.num_tensors}
        print(json_line(facts | {"num_bytes": done.num_bytes, "notes": list(done.notes)}))
        return 0
    print(f"{path}: {done.num_tensors} tensors in {options.gguf}, {size(done.num_bytes)}.")
    for note in done.notes:
        print(f"note: {note}")
    return 0
