"""Outrider beside other engines: `outrider bench peers`, with its record in one file.

    scripts/peers                                   # builds llama.cpp and OpenVINO GenAI, once
    python benchmarks/vs_peers.py --quick           # does it all work? some minutes
    python benchmarks/vs_peers.py --tier b --formats bf16 --minutes 12 --output FILE

Takes the words of `outrider bench peers`. docs/peers.md has the rules. The last line is one JSON
object.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from outrider.cli.main import run


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=None, help="also write the record here")
    options, words = parser.parse_known_args()
    with TemporaryDirectory(prefix="outrider-peers-") as folder:
        if "--output-dir" not in words:
            words = [*words, "--output-dir", folder]
        code = run(["bench", "peers", "--json", *words])
        record = Path(words[words.index("--output-dir") + 1]) / "results.json"
        if options.output and record.exists():
            options.output.write_bytes(record.read_bytes())
    return code


if __name__ == "__main__":
    sys.exit(main())
