"""The verbs `models inflate` and `models export`."""

from __future__ import annotations

from pathlib import Path

from outrider.cli.call import Call, needed
from outrider.cli.output import Meter, answer
from outrider.core.errors import ContractError
from outrider.core.fields import size
from outrider.core.files import new_folder
from outrider.kernels.kinds import DTYPES
from outrider.models.loading import resolve
from outrider_lab.cli.verb_options import ExportOptions, InflateOptions

LOADER_PROMPT = "The quick brown fox"


def inflate(call: Call[InflateOptions]) -> int:
    """Write the checkpoint, with a bar on a terminal, and the heads that lie beside the small one;
    say what it holds."""
    name, folder = needed(call, "SHAPE"), Path(needed(call, "FOLDER", position=1))

    from outrider.models.heads import find_heads
    from outrider_lab.models.inflate import shape_called
    from outrider_lab.models.inflate_files import (
        INFLATABLE,
        InflatedFiles,
        write_inflated,
        write_inflated_heads,
    )

    shape, dtype = shape_called(name), DTYPES[call.options.dtype]
    source = resolve(call.options.source)
    done: InflatedFiles | None = None
    heads: list[str] = []
    with new_folder(folder) as files:
        with Meter(f"inflating to {name}") as meter:
            for done in write_inflated(source, shape, folder, dtype):
                meter.reach(done.num_files, total=done.num_files_in_all)
        if done is None:
            raise ContractError("nothing was written")
        # A model whose heads fail goes as well.
        files.extend(folder.iterdir())
        for kind, place in find_heads(source).items():
            if kind in INFLATABLE:
                write_inflated_heads(place, source, shape, folder / kind, dtype)
                files.extend([*(folder / kind).iterdir(), folder / kind])
                heads.append(kind)
    share = done.num_zeros / done.num_parameters
    facts = {"folder": str(folder), "shape": name, "num_parameters": done.num_parameters}
    more = {"num_bytes": done.num_bytes, "zero_share": round(share, 4), "heads": heads}
    lines = [
        f"{folder}: {done.num_parameters / 1e9:.3f} billion weights, {size(done.num_bytes)}, "
        f"{100 * share:.0f} % of them zeros that are read like any others.",
        f"It writes what {call.options.source} writes:",
        f'  outrider generate "def add(a, b):" --target {folder} --draft outrider/embedded-draft',
        *(f"Its {kind} heads, which draft alike: --draft {folder / kind}" for kind in heads),
    ]
    answer(call.options, {**facts, **more}, "\n".join(lines))
    return 0


def export(call: Call[ExportOptions]) -> int:
    """Write the file, with a bar on a terminal, and say what it holds."""
    model, path = needed(call, "MODEL"), Path(needed(call, "FILE", position=1))

    from outrider_lab.models.gguf_export import Exported, GgufOptions
    from outrider_lab.models.gguf_export import export as written

    options = call.options
    # A path says nothing to whoever gets the file; its folder's name does.
    name = "" if Path(model).expanduser().exists() else model
    wish = GgufOptions(
        form=options.gguf, pre_tokenizer=options.pre_tokenizer, name=name, force=options.force
    )
    done: Exported | None = None
    with Meter(f"exporting {model}") as meter:
        for done in written(resolve(model), path, wish):
            meter.reach(done.num_tensors, total=done.num_tensors_in_all)
    if done is None:
        raise ContractError("nothing was written")
    facts = {"file": str(path), "format": options.gguf, "num_tensors": done.num_tensors}
    said = f"{path}: {done.num_tensors} tensors in {options.gguf}, {size(done.num_bytes)}."
    lines = [said, *(f"note: {note}" for note in done.notes)]
    record = facts | {"num_bytes": done.num_bytes, "notes": list(done.notes)}
    answer(options, record, "\n".join(lines))
    return 0
