"""Rounds of a request as plain values for a page, with the text of every token.

docs/rounds.md describes their shape. The modules in `assets/` show them, in a page of their own and
in the server's playground.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from importlib.resources import files
from typing import Any, cast

from outrider.api.result import GenerationResult, event_record
from outrider.api.stream import Detokenizer, TokenDecoder
from outrider.core.draft import RoundEvent
from outrider.core.drafter_kinds import KINDS

# Significant digits of probabilities and seconds on a page.
_DIGITS = 6
_FORCED = "forced"


# The modules of a self-contained page: each imports only those before it.
_MODULES = ("kinds.js", "tree.js", "rounds.js", "page.js")
_IMPORT = re.compile(r"^import [^;]*;\n", re.MULTILINE)
_EXPORT = re.compile(r"^export ", re.MULTILINE)


def page_script() -> str:
    """The modules as one script, since a page of one file can import nothing."""
    joined = "\n".join(asset(name) for name in _MODULES)
    return _EXPORT.sub("", _IMPORT.sub("", joined))


def asset(name: str) -> str:
    """The text of an asset that shows rounds."""
    return files("outrider.api").joinpath("assets", name).read_text("utf-8")


def run_of(
    title: str,
    prompt: str,
    result: GenerationResult,
    decoder: TokenDecoder,
    *,
    facts: Mapping[str, str] | None = None,
    speed_ratio: str = "",
) -> dict[str, Any]:
    """A run for a page: a result whose request wanted round events. `facts` describe the run;
    `speed_ratio` is a sentence, given only if the ratio was measured."""
    pieces = iter(_pieces(result, decoder))
    shown: dict[str, Any] = {
        "finish_reason": result.finish_reason,
        "tokens_per_second": _short(result.tokens_per_second),
        "notes": list(result.notes),
    }
    if speed_ratio:
        shown["speed_ratio"] = speed_ratio
    return {
        "title": title,
        "prompt": prompt,
        "facts": [[name, value] for name, value in (facts or {}).items()],
        "rounds": [round_of(event, pieces, decoder) for event in result.round_events],
        "result": shown,
    }


def round_of(event: RoundEvent, pieces: Iterator[str], decoder: TokenDecoder) -> dict[str, Any]:
    """One round. `pieces` are the texts of its emitted tokens, as in a TextEvent."""
    record = event_record(event)
    record["source"] = _source(event.trace.drafter)
    nodes = [_node(node, decoder) for node in record["nodes"]]
    for node in nodes:
        if node["verdict"] not in ("refused", "unused"):
            node["text"] = next(pieces, "")
    return {name: _short(value) for name, value in record.items()} | {"nodes": nodes}


def _node(node: Mapping[str, Any], decoder: TokenDecoder) -> dict[str, Any]:
    shown = {
        name: _short(value) for name, value in node.items() if value is not None or name == "q"
    }
    return shown | {"token": spelled(decoder, node["token_id"])}


def _source(drafter: str) -> str:
    """The colour class of accepted tokens: a draft, a look-up in texts, or a grammar."""
    if drafter == _FORCED:
        return _FORCED
    kind = KINDS.get(drafter)
    return "lookup" if kind is not None and kind.looks_up else "draft"


def spelled(decoder: TokenDecoder, token_id: int) -> str:
    """A token by itself; bytes of an incomplete character as \\x.."""
    data = decoder.token_bytes(token_id)
    if data:
        return data.decode("utf-8", "backslashreplace")
    return decoder.decode([token_id], skip_special=False)


def _pieces(result: GenerationResult, decoder: TokenDecoder) -> list[str]:
    """The text of each token, as far as it belongs to the result: a stop string does not."""
    detokenizer = Detokenizer(decoder)
    pieces = [detokenizer.push(token_id) for token_id in result.token_ids]
    if pieces:
        pieces[-1] += detokenizer.flush()
    left = len(result.text)
    for index, piece in enumerate(pieces):
        pieces[index] = piece[:left]
        left -= len(pieces[index])
    return pieces


def _short(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _short(inner) for name, inner in cast("dict[str, Any]", value).items()}
    return float(f"{value:.{_DIGITS}g}") if isinstance(value, float) else value


def text_of(run: Mapping[str, Any]) -> str:
    """The text of the run."""
    nodes: Sequence[Mapping[str, Any]] = [n for one in run["rounds"] for n in one["nodes"]]
    return "".join(node.get("text", "") for node in nodes)
