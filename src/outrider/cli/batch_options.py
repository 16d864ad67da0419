"""What `outrider batch` may be told."""

from __future__ import annotations

from outrider.cli.options import ALL, Argument, OutputOption, ReplicasOption, StructureOption, verb
from outrider.core.fields import setting


@verb(
    "batch",
    "batch:batch",
    Argument("INPUT", 'Lines of OpenAI\'s batches, or {"prompt": ...} with settings; or parquet.'),
    Argument("OUTPUT", "Answers are appended to this file, a line each."),
    group="Write text",
    settings=ALL,
    without=("profile",),
)
class BatchOptions(StructureOption, ReplicasOption, OutputOption):
    """Answer a file of prompts, a JSON line each; goes on where it was stopped.

    echo '{"prompt": "x = "}' > in.jsonl && outrider batch in.jsonl out.jsonl
    """

    output: str | None = setting(None, "Also write the JSON object of --json to this file.")
    unordered: bool = setting(False, "Write answers as they end, not in the order of the lines.")
    fresh: bool = setting(False, "Drop the answers that the output file has, and begin anew.")
    read_ahead: int = setting(
        256,
        "Read so many lines at once; more find more prompts that begin alike.",
        minimum=1,
        maximum=1_000_000,
    )
    ray: bool = setting(
        False, "Answer on a Ray cluster, that of RAY_ADDRESS or one of this machine alone."
    )
    workers: int = setting(
        2, "With --ray, so many actors keep the model.", minimum=1, maximum=65_536
    )
    quiet: bool = setting(False, "Show no progress.")
