"""`outrider chat`: a conversation, with history and a few commands.

Ctrl-C stops the reply and keeps what was said; Ctrl-D or /exit leaves. With stdin from a pipe,
every line is a message.

The state behind `outrider chat`: messages, sampling, and what the replies cost.

A model's error is reported and the conversation goes on; `exit_code` remembers it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace

from outrider.api.llm import LLM
from outrider.api.result import GenerationResult
from outrider.cli.call import Call
from outrider.cli.main import report
from outrider.cli.output import json_line, say
from outrider.cli.paint import Painter
from outrider.cli.rounds_page import RoundsPage
from outrider.cli.run_options import ChatOptions
from outrider.cli.session import interruptible, show, tell_notes
from outrider.core import settings
from outrider.core.errors import ConfigError, OutriderError, did_you_mean
from outrider.core.params import SamplingParams
from outrider.core.settings import GROUPS, SETTINGS, Given

HELP = """\
/help            this list
/exit            leave (so does Ctrl-D)
/reset           forget the conversation
/stats           what speculation did so far
/set             the sampling settings
/set KEY VALUE   change one, for example /set temperature 0.7
/html FILE       show the replies from now on as a page; /html ends that"""


def chat(call: Call[ChatOptions]) -> int:
    from outrider.cli.paint import Painter
    from outrider.cli.session import open_llm

    resolved, options = call.resolved, call.options
    llm = open_llm(resolved)
    painter = None if options.json else Painter(resolved.program().color, sys.stdout)
    page = RoundsPage(llm, resolved)
    conversation = Conversation(llm, resolved.sampling(), painter, options.system, page)
    if sys.stdin.isatty() and painter is not None and not call.arguments[1:]:
        painter.line(f"{llm.spec.name}, drafter {llm.drafter}. /help lists the commands.")
    for line in call.arguments[1:] or _lines():
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


def _summary(results: Sequence[GenerationResult]) -> str:
    """What all replies cost together."""
    num_tokens = sum(len(result.token_ids) for result in results)
    seconds = sum(result.stats.seconds["total"] for result in results)
    drafted = sum(result.stats.num_drafted for result in results)
    accepted = sum(result.stats.num_accepted for result in results)
    return (
        f"{len(results)} replies · {num_tokens} tokens · "
        f"{num_tokens / seconds if seconds else 0.0:.0f} tok/s · "
        f"{accepted} of {drafted} drafts accepted"
    )


class Conversation:
    """Takes lines; answers messages and obeys commands."""

    def __init__(
        self,
        llm: LLM,
        params: SamplingParams,
        painter: Painter | None,
        system: str | None,
        page: RoundsPage,
    ) -> None:
        self._llm = llm
        self._params = params
        self._painter = painter
        self._page = page
        self._opening = [{"role": "system", "content": system}] if system else []
        self._messages = list(self._opening)
        self._results: list[GenerationResult] = []
        self._commands: dict[str, Callable[[str], None]] = {
            "/help": lambda _: print(HELP),
            "/reset": lambda _: self._reset(),
            "/stats": lambda _: print(_summary(self._results)),
            "/set": self._set,
            "/html": self._show_page,
        }
        self.exit_code = 0

    def take(self, line: str) -> bool:
        """Act on one line; False if the user wants to leave."""
        if line == "/exit":
            return False
        try:
            if line.startswith("/"):
                self._obey(line)
            elif line:
                self._answer(line)
        except OutriderError as error:
            report(str(error), error.hint)
            self.exit_code = error.exit_code
        return True

    def _obey(self, line: str) -> None:
        name, _, rest = line.partition(" ")
        if name not in self._commands:
            known = [*self._commands, "/exit"]
            raise ConfigError(f"unknown command {name!r}.", hint=did_you_mean(name, known))
        self._commands[name](rest.strip())

    def _answer(self, text: str) -> None:
        messages = [*self._messages, {"role": "user", "content": text}]
        events = self._llm.chat(messages, self._page.asking(self._params))
        with interruptible() as interrupted:
            reply = show(self._llm, events, self._painter, stop=interrupted)
        result = reply.result
        self._messages = [*messages, {"role": "assistant", "content": result.text}]
        self._results.append(result)
        self._page.add(text, [result])
        if self._painter is None:
            print(json_line(result.to_dict()))
            tell_notes([result])
            return
        stopped = " (stopped)" if interrupted() else ""
        self._painter.line(f"{stopped}\n{result.summary()}\n")
        tell_notes([result])

    def _reset(self) -> None:
        self._messages = list(self._opening)
        print("(forgotten)")

    def _show_page(self, name: str) -> None:
        self._page.turn(name, flag="/html")
        say(f"(replies from now on are shown in {name})" if name else "(no page any more)")

    def _set(self, rest: str) -> None:
        name, _, value = rest.partition(" ")
        sampling = [item.name for item in SETTINGS.values() if GROUPS[item.group] is SamplingParams]
        if not name:
            print("\n".join(f"{key} {getattr(self._params, key)}" for key in sampling))
            return
        if name not in sampling:
            fixed = f"{name} is fixed once a model is loaded." if name in SETTINGS else ""
            raise ConfigError(
                fixed or f"unknown setting {name!r}.", hint=did_you_mean(name, sampling)
            )
        chosen = settings.typed(SETTINGS[name], Given(value.strip(), name))
        self._params = replace(self._params, **{name: chosen})
