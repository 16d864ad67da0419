"""`outrider completion`: a script that completes verbs and options in a shell."""

from __future__ import annotations

from typing import Literal, cast

from outrider.cli.call import Call, completion_app, needed
from outrider.cli.options import NoOptions


def completion(call: Call[NoOptions]) -> int:
    shell = cast("Literal['bash', 'zsh', 'fish']", needed(call, "SHELL"))
    # The name of a shell; none is started.
    script = completion_app().generate_completion(prog_name="outrider", shell=shell)  # nosec B604
    print(script)
    return 0
