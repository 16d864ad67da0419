"""`outrider config`: every setting, its value, and the layer that decided it.

`outrider completion`: a script that completes verbs and options in a shell.
"""

from __future__ import annotations

from typing import Literal, cast

from outrider.cli.call import Call, completion_app, needed
from outrider.cli.options import JsonOption, Options
from outrider.cli.output import json_line, table
from outrider.core.env import OTHER_VARIABLES
from outrider.core.limits import LIMITS


def config(call: Call[JsonOption]) -> int:
    chosen = call.resolved.chosen.values()
    if call.options.json:
        print(json_line({c.setting.name: {"value": c.value, "origin": c.origin} for c in chosen}))
        return 0
    rows = [
        (c.setting.name, _shown(c.value), c.origin, c.setting.flag, c.setting.variable)
        for c in chosen
    ]
    print(table(rows, header=("setting", "value", "origin", "flag", "variable")))
    print("\nOther variables:")
    print(table([(v.name, v.reader, v.meaning) for v in OTHER_VARIABLES]))
    print("\nLimits of a request:")
    print(table([(name, f"{limit.most:,}", limit.what) for name, limit in LIMITS.items()]))
    return 0


def _shown(value: object) -> str:
    return json_line(value)


def completion(call: Call[Options]) -> int:
    shell = cast("Literal['bash', 'zsh', 'fish']", needed(call, "SHELL"))
    # The name of a shell; none is started.
    script = completion_app().generate_completion(prog_name="outrider", shell=shell)  # nosec B604
    print(script)
    return 0
