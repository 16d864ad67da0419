"""The state of `outrider chat`: messages, models, settings, and the commands that change them.

An error of a command or of a model is reported and changes nothing; the conversation continues, and
`exit_code` keeps the error's exit code.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from outrider.cli.call import Call
from outrider.cli.main import report
from outrider.cli.output import fitted, json_line, prose, say, screen_table, write_whole
from outrider.cli.session import (
    interruptible,
    made_greedy,
    open_llm,
    sampling_line,
    show,
    show_notes,
    structure_of,
)
from outrider.cli.verdict import RoundsPage, acceptance, details, headline, is_cut, toy_note
from outrider.core import settings
from outrider.core.errors import ConfigError, OutriderError, did_you_mean
from outrider.core.fields import WHOLE
from outrider.core.files import FileKind, read_json
from outrider.core.params import SamplingParams
from outrider.core.settings import SETTINGS, Chosen, Given, Resolved

if TYPE_CHECKING:
    from outrider.api.llm import LLM
    from outrider.api.result import GenerationResult
    from outrider.api.structure import StructureOptions
    from outrider.cli.output import Painter
    from outrider.cli.verb_options import ChatOptions, GenerateOptions

Message: TypeAlias = dict[str, str]
LEAVE = ("/bye", "/exit", "/quit")
_ROLES = ("system", "user", "assistant")


@dataclass(frozen=True, slots=True)
class Command:
    """A command: its argument, its help text, and the function that runs it."""

    takes: str
    text: str
    run: Callable[[str], None]


class Conversation:
    """A conversation: it answers messages and runs commands.

    `messages` may begin with a system message; `results` are those of all replies, the newest last.
    Without a painter, replies are JSON lines. Unless it `goes_on` after a reply, hints name flags.
    """

    def __init__(
        self,
        resolved: Resolved,
        painter: Painter | None,
        structure: StructureOptions,
        *,
        system: str | None,
        stats: bool,
        goes_on: bool,
    ) -> None:
        self.llm: LLM = open_llm(resolved, chats=True, details=stats)
        self._resolved = resolved
        self._painter = painter
        self._structure = structure
        self._stats = stats
        self._more = "/set max_tokens N" if goes_on else "--max-tokens N"
        self._file: Path | None = None
        # Values of `/set`, which also apply to the next model.
        self._said: dict[str, Any] = {}
        self.advised: dict[str, Any] = {}
        self._params = self._as_advised()
        self.messages: list[Message] = _system_message(system)
        self.results: list[GenerationResult] = []
        self._page = RoundsPage(self.llm, resolved)
        self.commands = self._commands()
        self.exit_code = 0

    def _as_advised(self) -> SamplingParams:
        """Return the sampling parameters: the user's choices, then the checkpoint's recommendation.
        Unless the user sets a limit, a reply goes on until the model ends it."""
        # Imported here: it imports PyTorch.
        from outrider.models.checkpoint import read_sampling

        advised: dict[str, Any] = dict(read_sampling(self.llm.folder))
        chosen = self._resolved.decided() | self._said
        self.advised = {name: advised[name] for name in advised if name not in chosen}
        ours = self.advised if "max_tokens" in chosen else {"max_tokens": WHOLE} | self.advised
        return replace(self._resolved.sampling(), **ours | self._said)

    @property
    def sampling(self) -> str:
        """The sampling of replies, in one line."""
        used = ("temperature", *self.advised)
        return sampling_line({name: getattr(self._params, name) for name in used}, self.advised)

    def _commands(self) -> dict[str, Command]:
        return {
            "/help": Command("", "show this list; so does /?", lambda _: print(self._help())),
            "/retry": Command("", "answer the last message again", self._retry),
            "/reset": Command("", "forget all messages but the system message", self._reset),
            "/system": Command("TEXT", "change the system message; - removes it", self._system),
            "/save": Command("FILE", "write the messages to a new file", self._save),
            "/load": Command("FILE", "continue with the messages of a file", self._load),
            "/model": Command("NAME", "continue with another model", self._model),
            "/drafter": Command("NAME", "use another drafter, or none", self._drafter),
            "/k": Command("NUMBER", "draft this many tokens per round", self._k),
            "/set": Command("KEY VALUE", "change a sampling setting; alone, show all", self._set),
            "/html": Command(
                "FILE", "show the following replies as a page; alone, stop that", self._html
            ),
            "/stats": Command("", "the totals of all replies", lambda _: print(self._total())),
        }

    @property
    def banner(self) -> str:
        return f"{self._what_runs}. {self.sampling}. /? lists the commands, /bye leaves."

    @property
    def _what_runs(self) -> str:
        drafter = "none" if self.llm.drafter == "none" else f"drafter {self.llm.drafter}"
        toy = " (a toy)" if toy_note(self.llm.spec.name) else ""
        return f"{self.llm.spec.name}{toy}, {drafter}"

    def take(self, text: str) -> bool:
        """Answer a message or run a command; return False if the user wants to leave."""
        if text in LEAVE:
            return False
        return self._within(self._obey, text) if text.startswith("/") else self.say(text)

    def say(self, text: str) -> bool:
        """Answer a message, even one that begins like a command; return True."""
        return self._within(self._answer, text) if text else True

    def _within(self, act: Callable[[str], None], text: str) -> bool:
        try:
            act(text)
        except OutriderError as error:
            report(str(error), error.hint)
            self.exit_code = error.exit_code
        return True

    def _obey(self, line: str) -> None:
        name, _, rest = line.partition(" ")
        name = {"/?": "/help", "/clear": "/reset"}.get(name, name)
        command = self.commands.get(name)
        if command is None:
            known = {*self.commands, *LEAVE}
            raise ConfigError(f"unknown command {name!r}.", hint=did_you_mean(name, known))
        command.run(rest.strip())

    def _help(self) -> str:
        rows = [(f"{name} {one.takes}", one.text) for name, one in self.commands.items()]
        rows.insert(1, ("/bye", "leave; so do /exit and Ctrl-D"))
        rows.append(('"""', "begins and ends a message of several lines"))
        return screen_table(rows)

    def _answer(self, text: str) -> None:
        self._reply([*self.messages, {"role": "user", "content": text}])

    def _reply(self, messages: list[Message]) -> None:
        """Answer the last of `messages`; they become the conversation once there is an answer."""
        params = self._page.asking(self._params)
        with interruptible() as interrupted:
            events = self.llm.chat(messages, params, **self._structure)
            reply = show(self.llm, events, self._painter, stop=interrupted)
        result = reply.result
        self.messages = [*messages, {"role": "assistant", "content": result.text}]
        self.results.append(result)
        if self._painter is None:
            print(json_line(result.to_dict()))
        else:
            stopped = " (stopped)" if interrupted() else ""
            # A reply without a limit was ended by the context window.
            more = "/reset or a larger --context" if self._params.is_open else self._more
            text = prose(headline(result, more=more))
            text = f"{text}\n{fitted(details(result))}" if self._stats else text
            self._painter.line(f"{self._painter.mark(cut=is_cut(result))}{stopped}\n{text}\n")
        show_notes([result])
        self._page.add(messages[-1]["content"], [result])

    def _retry(self, _: str) -> None:
        if not self.messages or self.messages[-1]["role"] != "assistant":
            raise ConfigError("there is no reply to replace.", hint="ask something first")
        self._reply(self.messages[:-1])
        if self._painter is not None and self._params.temperature == 0:
            print("(temperature 0 writes the same reply again; /set temperature 0.8 varies it)")

    def _reset(self, _: str) -> None:
        self.messages = self._opening()
        print("(forgotten)")

    def _system(self, text: str) -> None:
        opening = self._opening()
        if not text:
            print(opening[0]["content"] if opening else "(no system message)")
            return
        rest = self.messages[len(opening) :]
        self.messages = [*_system_message(None if text == "-" else text), *rest]
        print("(no system message)" if text == "-" else "(the system message of this conversation)")

    def _opening(self) -> list[Message]:
        """Return the system message, if there is one, as a list."""
        return [one for one in self.messages[:1] if one["role"] == "system"]

    def _save(self, name: str) -> None:
        path = Path(_named(name, "/save talk.json")).expanduser()
        if path.exists() and path != self._file:
            raise ConfigError(f"{path} exists already.", hint="name a new file")
        record = {"model": self._resolved.program().target, "messages": self.messages}
        write_whole(path, json.dumps(record, ensure_ascii=False, indent=1) + "\n")
        self._file = path
        print(fitted(f"({len(self.messages)} messages in {path})"))

    def _load(self, name: str) -> None:
        path = Path(_named(name, "/load talk.json")).expanduser()
        self.messages = messages_of(path)
        self._file = path
        print(fitted(f"({len(self.messages)} messages from {path})"))

    def _model(self, name: str) -> None:
        if not name:
            print(self._resolved.program().target)
            return
        self._open({"target": name, "draft": "auto"})

    def _drafter(self, name: str) -> None:
        if not name:
            print(self.llm.drafter)
            return
        self._open({"drafter": name})

    def _k(self, number: str) -> None:
        if not number:
            print(self.llm.k)
            return
        self._open({"k": number})

    def _open(self, changes: Mapping[str, str]) -> None:
        """Continue with other models; the present ones stay if the others cannot be opened."""
        chosen = dict(self._resolved.chosen)
        for name, text in changes.items():
            item, origin = SETTINGS[name], f"/{'model' if name == 'target' else name}"
            chosen[name] = Chosen(item, settings.typed(item, Given(text, origin)), origin)
        resolved = Resolved(chosen)
        opened = open_llm(resolved, chats=True, details=self._stats)
        before, self.llm, self._resolved = self.llm, opened, resolved
        self._params = self._as_advised()
        self._page.llm, self._page.resolved = opened, resolved
        before.close()
        print(prose(f"({self._what_runs}, K {opened.k})" if opened.k else f"({self._what_runs})"))

    def _html(self, name: str) -> None:
        self._page.turn(name, flag="/html")
        say(f"(replies from now on are shown in {name})" if name else "(no page any more)")

    def _set(self, rest: str) -> None:
        name, _, value = rest.partition(" ")
        if name == "parameter":
            name, _, value = value.partition(" ")
        sampling = [item.name for item in SETTINGS.values() if item.group == "sampling"]
        if not name:
            values = {key: getattr(self._params, key) for key in sampling}
            if self._params.is_open:
                values["max_tokens"] = "none: until the model ends its turn"
            unset = (None, (), "")
            print("\n".join(f"{k} {'not set' if v in unset else v}" for k, v in values.items()))
            return
        if name not in sampling:
            raise _not_sampling(name, sampling)
        chosen = settings.typed(SETTINGS[name], Given(value.strip(), name))
        self._params = replace(self._params, **{name: chosen})
        self._said[name] = chosen

    def _total(self) -> str:
        """Return the totals of all replies."""
        num_tokens = sum(len(result.token_ids) for result in self.results)
        seconds = sum(result.stats.seconds["total"] for result in self.results)
        return prose(
            f"{len(self.results)} replies · {num_tokens} tokens · "
            f"{num_tokens / seconds if seconds else 0.0:.0f} tok/s · {acceptance(self.results)}"
        )


def _system_message(text: str | None) -> list[Message]:
    return [{"role": "system", "content": text}] if text else []


def _named(name: str, example: str) -> str:
    if not name:
        raise ConfigError("no file is named.", hint=example)
    return name


def _not_sampling(name: str, sampling: Sequence[str]) -> ConfigError:
    if name in ("k", "drafter", "target", "model"):
        command = "/model" if name == "target" else f"/{name}"
        return ConfigError(f"{name} is fixed once a model is loaded.", hint=f"use {command}")
    fixed = f"{name} is fixed once a model is loaded." if name in SETTINGS else ""
    return ConfigError(fixed or f"unknown setting {name!r}.", hint=did_you_mean(name, sampling))


def messages_of(path: Path) -> list[Message]:
    """Return the messages of a file of /save, or of a JSON list. Raises ConfigError."""
    try:
        found: Any = read_json(path, FileKind.PROMPTS)
    except OSError as error:
        raise ConfigError(
            f"{path}: {error.strerror or error}.", hint="/save FILE writes such a file"
        ) from None
    except ValueError:
        raise ConfigError(f"{path} is no JSON.", hint="/save FILE writes such a file") from None
    listed = cast("dict[str, Any]", found).get("messages") if isinstance(found, dict) else found
    messages = cast("list[object]", listed) if isinstance(listed, list) else None
    if messages is None or not all(map(_is_message, messages)):
        raise ConfigError(
            f"{path} has no list of messages.",
            hint='each is {"role": "user", "content": "..."}, or of system or assistant',
        )
    return [{key: one[key] for key in ("role", "content")} for one in cast("Any", messages)]


def _is_message(found: object) -> bool:
    if not isinstance(found, dict):
        return False
    one = cast("dict[str, object]", found)
    return one.get("role") in _ROLES and isinstance(one.get("content"), str)


# `outrider chat` and `outrider run`: a conversation, or one reply.
#
# Ctrl-C stops the reply and keeps its text so far; Ctrl-D or /bye leaves. Each line from a terminal
# or a pipe is a message; three quotation marks begin and end a message of several lines.
_QUOTES = '"""'


def chat(call: Call[ChatOptions]) -> int:
    from outrider.cli.conversation import Conversation
    from outrider.cli.output import Painter
    from outrider.cli.verdict import say_toy

    options = call.options
    resolved = made_greedy(call.resolved) if options.greedy else call.resolved
    _check_model(call)
    prompt = _prompt_of(call)
    painter = None if options.json else Painter(resolved.program().color, sys.stdout, chats=True)
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


# The prompt of `outrider generate`: the text as it is, or as a user message in the chat template.
#
# An instruct model was trained on its chat template; without it, its text is seldom useful. A model
# counts as an instruct model if one of its stop tokens is the end of a turn, or by its name.
INSTRUCT_NOTE = (
    "note: an instruct model: the prompt is a message, by its chat template; --raw gives the text "
    "alone"
)
_NAMED = re.compile(r"instruct|chat|assistant|(?<![a-z])it(?![a-z])", re.IGNORECASE)


def given_prompt(
    llm: LLM, text: str, options: GenerateOptions, target: str
) -> tuple[str | Sequence[int], bool]:
    """Return the prompt, and whether it is a message; if that was decided here, a note says so.
    Raises ConfigError for --chat with --raw, CheckpointError if --chat finds no template."""
    if options.chat and options.raw:
        raise ConfigError("--chat and --raw exclude each other.", hint="drop one")
    if options.raw or not (options.chat or is_instruct(llm, target)):
        return text, False
    prompt = llm.encode_chat(text)
    if not options.chat:
        say(f"{INSTRUCT_NOTE}, and --chat leaves out this note")
    return prompt, True


def is_instruct(llm: LLM, target: str) -> bool:
    from outrider.models.gguf.vocabulary import TURN_ENDS

    if not llm.tokenizer.has_chat_template:
        return False
    ends = {llm.tokenizer.decode([token_id], skip_special=False) for token_id in llm.stop_ids}
    if ends.intersection(TURN_ENDS):
        return True
    folder = llm.folder
    if folder.parent.name == "snapshots":
        # In the hub's cache a folder is named by a commit, two below the model's own.
        folder = folder.parent.parent
    return any(_NAMED.search(name) for name in (Path(target).name, folder.name))
