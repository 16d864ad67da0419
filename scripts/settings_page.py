"""Writes docs/settings.md from the settings registry: `python scripts/settings_page.py`.

`--check` only compares, and exits with 1 if the page is out of date.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from outrider.core.env import OTHER_VARIABLES
from outrider.core.limits import LIMITS
from outrider.core.settings import DEFAULT_FILE, GROUPS, SETTINGS

PAGE = Path(__file__).parent.parent / "docs" / "settings.md"

TITLES = {"program": "Models and output", "engine": "Engine", "sampling": "Sampling"}

INTRO = f"""\
# Settings

<!-- Written by scripts/settings_page.py; do not edit. -->

Every setting has a flag, a variable and a key in a file. The strongest layer that names it wins:
command line, then environment, then file, then default. The file is `{DEFAULT_FILE}` in the
working directory, or the TOML or YAML file given with `--config`; it holds `key = value` lines.
`outrider config` prints every value and where it comes from. An unknown key or `OUTRIDER_` variable
is an error that names the nearest valid one, and a value that cannot be names where it was written.
A list in a variable is a JSON list, or one text. A switch is 1 or 0 (also true/false, yes/no,
on/off) in a variable, `--flag` or `--no-flag` on the command line."""

OLD_NAMES = (
    ("SPECDEC_DTYPE", "OUTRIDER_DTYPE", "the same values, and auto"),
    ("SPECDEC_AMP", "OUTRIDER_DTYPE", "one precision for the whole model, no autocast"),
    ("SPECDEC_DETERMINISTIC", "OUTRIDER_DETERMINISTIC", "seeds belong to requests: OUTRIDER_SEED"),
    ("SPECDEC_BATCH_SIZE", "OUTRIDER_BATCH_SIZE", ""),
    ("SPECDEC_PROFILE", "OUTRIDER_PROFILE", ""),
    ("SPECDEC_DETAILED_METRICS", "OUTRIDER_PROFILE", "summaries are always in the result"),
    ("SPECDEC_FORCE_PYTORCH_BACKEND", "OUTRIDER_FORCE_REFERENCE", ""),
    ("SPECDEC_FORCE_PY", "OUTRIDER_FORCE_REFERENCE", ""),
    ("SPECDEC_DEBUG", "OUTRIDER_DEBUG", ""),
    ("SPECDEC_DEBUG_PRINTS", "OUTRIDER_LOG_LEVEL", "debug"),
    ("SPECDEC_DRY_RUN", "", "`outrider config` and `outrider doctor` show what would run"),
    ("SPECDEC_ENABLE_KV_APPEND", "", "always so: keys and values are appended in place"),
    ("SPECDEC_ENABLE_SEQUENCE_POOL", "", "not needed: batches are ragged"),
    ("SPECDEC_MIN_GROUP_SIZE, SPECDEC_MAX_GROUP_SIZE", "", "not needed: batches are ragged"),
    ("SPECDEC_PERIODIC_CACHE_CLEAR", "", "not needed: memory is allocated once"),
    ("SPECDEC_SYNC_KERNELS, SPECDEC_PERIODIC_SYNC", "", "not needed: one host read a round"),
    ("SPECDEC_DEBUG_KV_VERIFY, SPECDEC_DEBUG_BATCH_INPUT", "", "tests, not switches"),
    ("SPECDEC_CUDA_GRAPH", "OUTRIDER_FUSED_ROUND", "whole rounds are captured on CUDA"),
    ("SPECDEC_PARALLEL_STREAMS", "OUTRIDER_LANE_STREAMS", "0 becomes 1: lanes share a stream"),
    ("SPECDEC_SYNC_MODE", "OUTRIDER_LANE_SYNC", "the same values"),
    ("SHARPI_SPEC_BATCH_VERIFY", "OUTRIDER_BATCHED_VERIFY", "0 feeds drafts token by token"),
    ("SHARPI_DISABLE_BATCH_VERIFY", "OUTRIDER_BATCHED_VERIFY", "the opposite sense: 1 becomes 0"),
    ("SHARPI_DISABLE_MTP", "OUTRIDER_DRAFTER", "1 becomes none, or another drafter"),
    ("SHARPI_MTP_DRAFT_N", "OUTRIDER_K", "with OUTRIDER_DRAFTER=mtp"),
    ("SHARPI_TRACE_MTP", "OUTRIDER_PROFILE", "a trace of every round"),
    ("SHARPI_MTP_BATCH_MAX", "OUTRIDER_STATE_HISTORY", "one less: drafts a hybrid can return to"),
    ("SHARPI_BATCH_DECODE_MMQ", "OUTRIDER_QUANTISE", "int8 or int4, in every pass"),
    ("SHARPI_CPU_GDN", "", "not yet: no Gated-DeltaNet"),
    ("--spec-type", "--drafter", "mtp, none or auto"),
    ("--spec-draft-n-max", "--k", ""),
    ("--spec-draft-n-min, --spec-draft-p-min", "", "not yet"),
    ("--draft-model", "--draft", ""),
    ("--draft-lookup", "--drafter", "ngram"),
    ("-c", "--context", ""),
    ("base_model", "target", "key of a YAML run file"),
    ("draft_model", "draft", "key of a YAML run file"),
    ("draft_mode", "drafter", "key of a YAML run file; no EAGLE or Medusa yet"),
    ("max_draft", "k", "key of a YAML run file"),
    ("max_new_tokens", "max_tokens", "key of a YAML run file"),
    ("do_sample", "temperature", "0 is greedy, anything else samples"),
    ("max_memory_mb", "arena_tokens", "counted in tokens"),
    ("implementation", "", "the fake model lives in the tests"),
    ("repetition_penalty", "repetition_penalty", ""),
)


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
    parts.append(
        "The flag of `max_tokens` is `--max-tokens`, its variable `OUTRIDER_MAX_TOKENS`; "
        "all others follow."
    )
    limits = [(f"`{name}`", f"{limit.most:,}", limit.what) for name, limit in LIMITS.items()]
    parts.append(
        "## Limits of a request\n\nWhat asks for more is refused with an error before it runs.\n\n"
        + _table(("of", "at most", "what"), limits)
    )
    others = [(f"`{v.name}`", v.reader, v.meaning) for v in OTHER_VARIABLES]
    parts.append("## Other variables\n\n" + _table(("variable", "read by", "what"), others))
    old = [(_code(name), f"`{new}`" if new else "", note) for name, new, note in OLD_NAMES]
    parts.append(
        "## Names in other projects\n\nFor users who come from other speculative-decoding code. An "
        "empty second column means that there is no such switch here, for the reason given.\n\n"
        + _table(("there", "here", "note"), old)
    )
    return "\n\n".join(parts) + "\n"


def _table(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [header, tuple("---" for _ in header), *rows]
    return "\n".join(
        "| " + " | ".join(c.replace("|", "\\|") for c in line) + " |" for line in lines
    )


def _code(names: str) -> str:
    return ", ".join(f"`{name}`" for name in names.split(", "))


def main() -> int:
    if sys.argv[1:] == ["--check"]:
        return 0 if PAGE.is_file() and PAGE.read_text(encoding="utf-8") == render() else 1
    PAGE.write_text(render(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
