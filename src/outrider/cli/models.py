"""`outrider models`: what is on this machine, and what a model is made of."""

from __future__ import annotations

from outrider.cli.call import Call, needed
from outrider.cli.options import JsonOption
from outrider.cli.output import json_line, size, table


def list_models(call: Call[JsonOption]) -> int:
    from outrider.cli.hub import local_models

    found = local_models()
    if call.options.json:
        fields = ("name", "family", "num_bytes", "refusal")
        rows = [{name: getattr(model, name) for name in fields} for model in found]
        folders = [{"folder": str(model.folder)} for model in found]
        print(json_line([row | folder for row, folder in zip(rows, folders, strict=True)]))
        return 0
    rows = [(m.name, m.family, size(m.num_bytes), m.refusal or "ready") for m in found]
    print(table(rows, header=("model", "family", "weights", "state")))
    return 0


def inspect_model(call: Call[JsonOption]) -> int:
    name = needed(call, "MODEL")

    from outrider.cli.fit import describe, read_spec

    facts = describe(read_spec(name))
    if call.options.json:
        print(json_line(facts))
        return 0
    shown = {key: size(value) if key.endswith("_bytes") else value for key, value in facts.items()}
    print(table([(key.replace("_", " "), value) for key, value in shown.items()]))
    return 0
