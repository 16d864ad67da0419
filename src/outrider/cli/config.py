"""`outrider config`: every setting, its value, and the source of the value.

`outrider completion`: a script that completes verbs and options in a shell.
"""

from __future__ import annotations

from typing import Literal, cast

from outrider.cli.call import Call, completion_app, needed
from outrider.cli.options import JsonOption, Options
from outrider.cli.output import answer, json_line, screen_table
from outrider.core.env import OTHER_VARIABLES
from outrider.core.fields import LIMITS


def config(call: Call[JsonOption]) -> int:
    chosen = call.resolved.chosen.values()
    record = {c.setting.name: {"value": c.value, "origin": c.origin} for c in chosen}
    rows = [
        (c.setting.name, json_line(c.value), c.origin, c.setting.flag, c.setting.variable)
        for c in chosen
    ]
    lines = [
        screen_table(rows, header=("setting", "value", "origin", "flag", "variable")),
        "\nOther variables:",
        screen_table([(v.name, v.reader, v.meaning) for v in OTHER_VARIABLES]),
        "\nLimits of a request:",
        screen_table([(name, f"{limit.most:,}", limit.what) for name, limit in LIMITS.items()]),
    ]
    answer(call.options, record, "\n".join(lines))
    return 0


def completion(call: Call[Options]) -> int:
    shell = cast("Literal['bash', 'zsh', 'fish']", needed(call, "SHELL"))
    # `shell` is only the name of a shell; none is started.
    script = completion_app().generate_completion(prog_name="outrider", shell=shell)
    print(script)
    return 0
