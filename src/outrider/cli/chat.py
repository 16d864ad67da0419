"""`outrider chat`: a conversation, with history and a few commands.

Ctrl-C stops the reply and keeps what was said; Ctrl-D or /exit leaves. With stdin from a pipe,
every line is a message.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import suppress

from outrider.cli.call import Call
from outrider.cli.options import ChatOptions
from outrider.core.errors import ConfigError

HELP = """\
/help            this list
/exit            leave (so does Ctrl-D)
/reset           forget the conversation
/stats           what speculation did so far
/set             the sampling settings
/set KEY VALUE   change one, for example /set temperature 0.7"""


def chat(call: Call[ChatOptions]) -> int:
    from outrider.cli.conversation import Conversation
    from outrider.cli.paint import Painter
    from outrider.cli.session import open_llm

    resolved, options = call.resolved, call.options
    llm = open_llm(resolved)
    painter = None if options.json else Painter(resolved.program().color, sys.stdout)
    conversation = Conversation(llm, resolved.sampling(), painter, options.system)
    if sys.stdin.isatty() and painter is not None:
        painter.line(f"{llm.spec.name}, drafter {llm.drafter}. /help lists the commands.")
    for line in _lines():
        if not conversation.take(line.strip()):
            break
    return conversation.exit_code


def _lines() -> Iterator[str]:
    """What the user says, until the end of input."""
    if not sys.stdin.isatty():
        try:
            yield from sys.stdin
        except UnicodeDecodeError:
            raise ConfigError("what came on stdin is not UTF-8 text.") from None
        return
    with suppress(ImportError):
        import readline

        readline.parse_and_bind("tab: self-insert")  # loading it gives input() its editing keys
    while True:
        try:
            yield input("you> ")
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print("\n(Ctrl-D or /exit leaves)")
