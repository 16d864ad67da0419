"""The process of `run.py start` in which `outrider` runs: `start_side.py WORD...`.

The last line of stderr is one JSON object: the seconds of PyTorch's import, those from its end to
the first token, and the peak of this process's memory. With `idle FILE` as words, the process only
imports the engine and reads the tokenizer of FILE.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from time import perf_counter
from types import ModuleType
from typing import Any

from outrider.cli.main import run
from outrider.core.process import own_bytes


class ImportClock:
    """A finder of modules that times PyTorch's import."""

    def __init__(self) -> None:
        self.began = self.ended = 0.0

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path, target) if name == "torch" else None
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def timed(module: ModuleType) -> None:
            self.began = perf_counter()
            execute(module)
            self.ended = perf_counter()

        vars(spec.loader)["exec_module"] = timed
        return spec


class FirstText:
    """Standard output that notes when its first text was written."""

    def __init__(self, stream: Any) -> None:
        self._stream, self.at = stream, 0.0

    def write(self, text: str) -> int:
        if text.strip() and not self.at:
            self.at = perf_counter()
        return self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def idle(file: Path) -> None:
    from outrider.api.llm import LLM
    from outrider.api.tokenizer import Tokenizer

    del LLM
    Tokenizer.load(file)


def main(words: Sequence[str]) -> int:
    clock, code = ImportClock(), 0
    sys.meta_path.insert(0, clock)
    sys.stdout = first = FirstText(sys.stdout)
    if words[0] == "idle":
        idle(Path(words[1]))
    else:
        code = run(words)
    found: dict[str, object] = {"peak_bytes": own_bytes(b"VmHWM")}
    if first.at:
        found["import_seconds"] = round(clock.ended - clock.began, 3)
        found["seconds"] = round(first.at - clock.ended, 3)
    sys.stdout.flush()
    print(json.dumps(found), file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
