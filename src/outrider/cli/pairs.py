"""`outrider pairs`: targets and drafts that work together, and how to run them."""

from __future__ import annotations

from typing import Any

from outrider.cli.call import Call
from outrider.cli.options import JsonOption
from outrider.cli.output import json_line, size, table
from outrider.pairs.catalog import ESTIMATE_TOKENS, ModelPair, PairedModel, get_pair, list_pairs

LOGIN = "gated: accept its licence on the hub, then run `hf auth login`"


def pairs(call: Call[JsonOption]) -> int:
    """All pairs, or the details of the one that is named."""
    if call.argument is not None:
        return _show(get_pair(call.argument), as_json=call.options.json)
    found = list_pairs()
    if call.options.json:
        print(json_line([_record(pair) for pair in found]))
        return 0
    rows = [
        (
            pair.pair_name,
            pair.target_model_id,
            pair.draft_model_id,
            _memory(pair.weights_gb),
            pair.licence,
            _note(pair),
        )
        for pair in found
    ]
    print(table(rows, header=("pair", "target", "draft", "weights", "licence", "note")))
    print("\nDetails and the command of one: outrider pairs NAME")
    return 0


def _show(pair: ModelPair, *, as_json: bool) -> int:
    if as_json:
        print(json_line(_record(pair)))
        return 0
    sides = [("target", pair.target), ("draft", pair.draft)]
    rows = [
        (side, m.model_id, m.dtype, _memory(m.weights_gb), _memory(m.memory_gb(ESTIMATE_TOKENS)))
        for side, m in sides
    ]
    with_kv = f"with KV of {ESTIMATE_TOKENS} tokens"
    total = ("both", "", "", _memory(pair.weights_gb), _memory(pair.memory_gb()))
    print(table([*rows, total], header=(pair.pair_name, "model", "dtype", "weights", with_kv)))
    print(f"\n{pair.notes}\nlicence: {pair.licence}\nvocabulary: {_VOCABULARY[pair.vocabulary]}")
    for model_id in dict.fromkeys(model.model_id for _, model in sides if model.gated):
        print(f"{model_id} is {LOGIN}")
    print(f"not supported yet: {pair.refusal}" if pair.refusal else f"\n{pair.command()}")
    return 0


_VOCABULARY = {
    "same": "shared; any exact sampler",
    "bridge": "not shared; drafts are spelled anew for the target (--drafter bridge)",
}


def _record(pair: ModelPair) -> dict[str, Any]:
    return {
        "pair_name": pair.pair_name,
        "target": _model(pair.target),
        "draft": _model(pair.draft),
        "licence": pair.licence,
        "notes": pair.notes,
        "vocabulary": pair.vocabulary,
        "weights_gb": round(pair.weights_gb, 4),
        "memory_gb": round(pair.memory_gb(), 4),
        "gated": pair.gated,
        "supported": pair.supported,
        "refusal": pair.refusal,
        "command": pair.command() if pair.supported else None,
    }


def _model(model: PairedModel) -> dict[str, Any]:
    return {
        "model_id": model.model_id,
        "dtype": model.dtype,
        "weights_gb": model.weights_gb,
        "memory_gb": round(model.memory_gb(ESTIMATE_TOKENS), 4),
        "gated": model.gated,
    }


def _memory(gigabytes: float) -> str:
    return size(gigabytes * 1e9)


def _note(pair: ModelPair) -> str:
    bridge = f"; needs --drafter {pair.drafter}" if pair.drafter != "auto" else ""
    gated = "; gated, needs `hf auth login`" if pair.gated else ""
    refusal = f"; not supported yet: {pair.refusal}" if pair.refusal else ""
    return f"{pair.notes}{bridge}{gated}{refusal}"
