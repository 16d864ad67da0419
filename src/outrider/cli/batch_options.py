"""Options of `outrider batch`."""

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
    """Answer a file of prompts, one JSON line each; a stopped run can be continued.

    echo '{"prompt": "x = "}' > in.jsonl && outrider batch in.jsonl out.jsonl
    """

    output: str | None = setting(None, "Also write the JSON object of --json to this file.")
    unordered: bool = setting(False, "Write answers as they finish, not in the order of the lines.")
    fresh: bool = setting(False, "Drop the answers in the output file, and start again.")
    read_ahead: int = setting(
        256,
        "Read this many lines ahead; more lines share more beginnings of prompts.",
        minimum=1,
        maximum=1_000_000,
    )
    ray: bool = setting(
        False, "Answer on the Ray cluster of RAY_ADDRESS; if unset, on a local one."
    )
    workers: int = setting(
        2, "With --ray, the number of actors that load the model.", minimum=1, maximum=65_536
    )
    quiet: bool = setting(False, "Show no progress.")
