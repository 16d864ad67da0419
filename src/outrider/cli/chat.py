"""`outrider chat` and `outrider run`: a conversation, or one reply.

Ctrl-C stops the reply and keeps its text so far; Ctrl-D or /bye leaves. Each line from a terminal
or a pipe is a message; three quotation marks begin and end a message of several lines.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from outrider.cli.call import Call
from outrider.cli.output import prose, say
from outrider.cli.session import made_greedy
from outrider.cli.structure import structure_of
from outrider.core.errors import ConfigError

if TYPE_CHECKING:
    from outrider.cli.conversation import Conversation
    from outrider.cli.run_options import ChatOptions

_QUOTES = '"""'


def chat(call: Call[ChatOptions]) -> int:
    from outrider.cli.conversation import Conversation
    from outrider.cli.paint import Painter
    from outrider.cli.verdict import say_toy

    options = call.options
    resolved = made_greedy(call.resolved) if options.greedy else call.resolved
    _check_model(call)
    prompt = _prompt_of(call)
    painter = None if options.json else Painter(resolved.program().color, sys.stdout, wraps=True)
    conversation = Conversation(
        resolved,
        painter,
        structure_of(options),
        system=options.system,
        stats=options.stats,
        goes_on=prompt is None,
    )
    if painter is not None:
        say_toy(resolved.program().target)
    if sys.stdin.isatty() and painter is not None and prompt is None:
        painter.line(prose(conversation.banner))
    elif conversation.advised and painter is not None:
        say(conversation.sampling)
    if prompt is None:
        _talk(conversation)
    else:
        conversation.take(prompt.strip())
    return conversation.exit_code


def _talk(conversation: Conversation) -> None:
    """Take messages until the user leaves. Ctrl-C at a terminal discards the line being typed, or
    stops the running message or command; it never ends the program."""
    typed = sys.stdin.isatty()
    read = _typed if typed else _piped
    goes_on = True
    while goes_on:
        try:
            message = _message(read)
            if message is None:
                return
            text, is_message = message
            goes_on = conversation.say(text) if is_message else conversation.take(text.strip())
        except KeyboardInterrupt:
            if not typed:
                raise
            print("\n(stopped; Ctrl-D or /bye leaves)")


def _prompt_of(call: Call[ChatOptions]) -> str | None:
    word, flag = call.named.get("PROMPT"), call.options.prompt
    if len(call.arguments) > len(call.named):
        raise ConfigError("two prompts: a word and --prompt.", hint="drop one")
    return flag if word is None else word


def _check_model(call: Call[ChatOptions]) -> None:
    """Check the MODEL argument. Raises ConfigError if it is a message rather than a model."""
    word = call.named.get("MODEL", "")
    if " " in word.strip() and not Path(word).exists():
        raise ConfigError(
            f"no model is called {word[:60]!r}.",
            hint="a message comes after the model, `outrider run MODEL PROMPT`, or alone: "
            "`outrider run --prompt PROMPT`",
        )


def _message(read: Callable[[str], str | None]) -> tuple[str, bool] | None:
    """Return the next input, None at its end, and whether it is quoted, so no command."""
    line = read("you> ")
    if line is None or not (start := line.strip()).startswith(_QUOTES):
        return None if line is None else (line, False)
    text = [start.removeprefix(_QUOTES)]
    while not text[-1].rstrip().endswith(_QUOTES):
        following = read("...> ")
        if following is None:
            raise ConfigError(f"a message began with {_QUOTES} and did not end.", hint=_QUOTES)
        text.append(following.rstrip("\n"))
    return "\n".join(text).rstrip().removesuffix(_QUOTES).strip("\n"), True


def _piped(_: str) -> str | None:
    try:
        return sys.stdin.readline() or None
    except UnicodeDecodeError:
        raise ConfigError("the input on stdin is not UTF-8 text.") from None


def _typed(prompt: str) -> str | None:
    with suppress(ImportError):
        import readline

        readline.parse_and_bind("tab: self-insert")  # loading it gives input() its editing keys
    try:
        return input(prompt)
    except EOFError:
        print()
        return None
