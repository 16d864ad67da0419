"""Writes core/options.pyi, the keywords of Python calls, from the settings registry, and has the
site's page of settings for scripts/reference_pages.py: `python scripts/settings_page.py`.

`--check` only compares, and exits with 1 if the file is out of date.
"""

from __future__ import annotations

import json
import sys
from dataclasses import fields
from itertools import groupby
from pathlib import Path
from textwrap import fill

from generated import kept

from outrider.core.config import EngineConfig
from outrider.core.env import other_variables
from outrider.core.errors import foreign_names
from outrider.core.fields import LIMITS, meta_of
from outrider.core.options import OWN_PARAMETERS
from outrider.core.params import SamplingParams
from outrider.core.settings import DEFAULT_FILE, GROUPS, SETTINGS

ROOT = Path(__file__).parent.parent
OPTIONS = ROOT / "src" / "outrider" / "core" / "options.pyi"

OPTIONS_HEAD = '''\
"""Keywords of `LLM`, `generate`, `stream`, `submit` and `chat`, for editors and type checkers.

Written by scripts/settings_page.py from the fields of EngineConfig and SamplingParams.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeAlias, TypedDict

DraftFunction: TypeAlias = Callable[[list[int], int], Iterable[int] | None]

OWN_PARAMETERS: tuple[str, ...]
'''

TITLES = {"program": "Models and output", "engine": "Engine", "sampling": "Sampling"}

_NAMED_ONLY = [name for name, item in SETTINGS.items() if item.meta.harmless is not None]
GUARDED = ", ".join(f"`{name}`" for name in _NAMED_ONLY)

INTRO = f"""\
# Settings

Every setting has a flag, a variable and a key in a file: `max_tokens` is `--max-tokens` and
`OUTRIDER_MAX_TOKENS`. The command line wins over the environment, the environment over the file,
the file over the default. The file is `{DEFAULT_FILE}` in the working directory, with a note on
stderr, or the TOML or YAML file given with `--config`; it has `key = value` lines.
`outrider config` prints every value and its origin.

- A file in the working directory cannot set {GUARDED}: these
  choose models, files, processes or lossy rules, and need `--config`.
- An unknown key or `OUTRIDER_` variable is an error that names the nearest valid one; an invalid
  value is an error that names where it was written.
- A list in a variable is a JSON list, or one text. A switch is 1 or 0 (also true/false, yes/no,
  on/off) in a variable, `--flag` or `--no-flag` on the command line.
- `--set key=value` sets any of them; `--model` and `-m` are `--target`.
- An integer may be written as `32K` (32,768) or `25.6k` (25,600).
- YAML: no anchors, aliases or tags; an unquoted scalar is its text (`no`, `1:30`, `010`)."""


def render() -> str:
    """The whole page."""
    parts = [INTRO]
    for group in GROUPS:
        rows = [
            (f"`{s.name}`", s.accepts, f"`{json.dumps(s.default)}`", s.meta.help)
            for s in SETTINGS.values()
            if s.group == group
        ]
        parts.append(f"## {TITLES[group]}\n\n" + _table(("key", "value", "default", "what"), rows))
    own = [
        (f"`{item.name}`", meta_of(item).help)
        for item in fields(SamplingParams)
        if meta_of(item).per_request
    ]
    parts.append(
        "## Of a single request\n\nKeywords of Python calls and keys of lines of `outrider batch`, "
        "without a flag; each applies to one request.\n\n" + _table(("key", "what"), own)
    )
    limits = [(f"`{name}`", f"{limit.most:,}", limit.what) for name, limit in LIMITS.items()]
    parts.append(
        "## Limits of a request\n\nA request above a limit is an error before it runs.\n\n"
        + _table(("of", "at most", "what"), limits)
    )
    others = [(f"`{v.name}`", v.reader, v.meaning) for v in other_variables()]
    parts.append("## Other variables\n\n" + _table(("variable", "read by", "what"), others))
    foreign = [
        (_code(", ".join(item.name for item in group)), f"`{here}`" if here else "", note)
        for (here, note), items in groupby(
            foreign_names().values(), key=lambda item: (item.spelled, item.note)
        )
        for group in [list(items)]
    ]
    parts.append(
        "## Names in other projects\n\nFlags with the same values as ours work, with a note "
        "([commands of other tools](guesses.md)); any other flag or key is an error that says the "
        "name here. An empty second column means that there is no such switch, for the reason "
        "given.\n\n" + _table(("there", "here", "note"), foreign)
    )
    return "\n\n".join(parts) + "\n"


def _table(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [header, tuple("---" for _ in header), *rows]
    return "\n".join(
        "| " + " | ".join(c.replace("|", "\\|") for c in line) + " |" for line in lines
    )


def _code(names: str) -> str:
    return ", ".join(f"`{name}`" for name in names.split(", "))


def options() -> str:
    """A TypedDict for each class whose fields may be given as keywords."""
    parts = [OPTIONS_HEAD]
    for name, kind in (("EngineOptions", EngineConfig), ("SamplingOptions", SamplingParams)):
        parts.append(
            f'\nclass {name}(TypedDict, total=False):\n    """Fields of {kind.__name__}."""\n'
        )
        for item in fields(kind):
            if item.name in OWN_PARAMETERS:
                continue
            meaning = fill(
                f'"""{meta_of(item).help}"""',
                width=100,
                initial_indent="    ",
                subsequent_indent="    ",
                break_on_hyphens=False,
            )
            # `LLM` takes a function for the drafter.
            also = " | DraftFunction" if (name, item.name) == ("EngineOptions", "drafter") else ""
            parts.append(f"\n    {item.name}: {item.type}{also}\n{meaning}\n")
    return "".join(parts)


def main() -> int:
    return kept({OPTIONS: options()}, sys.argv[1:], again="scripts/settings_page.py")


if __name__ == "__main__":
    sys.exit(main())
