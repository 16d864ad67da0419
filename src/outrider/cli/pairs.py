"""`outrider pairs`: targets and drafts that share one vocabulary."""

from __future__ import annotations

from dataclasses import asdict

from outrider.cli.call import Call
from outrider.cli.options import JsonOption
from outrider.cli.output import json_line, size, table
from outrider.pairs.catalog import PAIRS, Pair


def pairs(call: Call[JsonOption]) -> int:
    if call.options.json:
        print(json_line([asdict(pair) for pair in PAIRS]))
        return 0
    rows = [
        (pair.name, pair.target, pair.draft, size(pair.approx_bytes), pair.licence, _note(pair))
        for pair in PAIRS
    ]
    print(table(rows, header=("pair", "target", "draft", "size", "licence", "note")))
    print("\nUse one: outrider generate --target TARGET --draft DRAFT PROMPT")
    return 0


def _note(pair: Pair) -> str:
    gated = "; gated, needs `hf auth login`" if pair.gated else ""
    unsupported = "" if pair.supported else "; NOT SUPPORTED YET"
    return f"{pair.note}{gated}{unsupported}"
