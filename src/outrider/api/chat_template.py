"""Messages to prompt text, by the checkpoint's own chat template.

A template is untrusted code, so it runs in a helper process (`helper.py`) with one second of
processor time, 512 MB and an output of at most four times the messages plus 64 KB. The helper
starts on the first render, serves all later ones, and is killed and replaced when a template
misbehaves. If a template refuses a conversation, or leaves part of it out, other forms are rendered
(`forms`).
"""

from __future__ import annotations

import json
import re
import selectors
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, cached_property, partial
from importlib.resources import files
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple, Unpack, cast

from outrider.api.chat_messages import (
    REASONING,
    ChatOptions,
    forms,
    in_text,
    left_out,
    must_be_in_text,
)
from outrider.api.stream import TokenDecoder
from outrider.core.errors import CheckpointError, ConfigError, MachineError, given, nearest
from outrider.core.fields import shown
from outrider.core.files import FileKind, read_text
from outrider.models.json_object import token_text

# Seconds of processor time, so that a busy machine neither changes nor refuses a prompt.
RENDER_CPU_SECONDS = 1.0
# The helper is given up after these: it was stopped, or the machine has no memory left.
ANSWER_SECONDS = 20.0
_EXIT_SECONDS = 1.0
BASE_OUTPUT_CHARS = 64 * 1024
OUTPUT_RATIO = 4
# JSON writes a character as at most six ASCII bytes (\uXXXX), twice that beyond the BMP.
_JSON_BYTES_PER_CHAR = 12

# Marks the end of the text to continue; templates trim blanks, and leave this unchanged.
_HERE = "<|outrider goes on here|>"
_HINT = "--chat-template gives another template; text completions and `outrider generate` need none"
_PROBE = "These are instructions."


@dataclass(frozen=True, slots=True)
class Thinking:
    """Thoughts of a family, between `begin` and `end`, which open an answer or may come `anywhere`.
    `closing` is the text with which such a model continues to its answer."""

    begin: str
    end: str
    closing: str
    anywhere: bool = False


THINK = Thinking("<think>", "</think>", "\n</think>\n\n")
SEED = Thinking("<seed:think>", "</seed:think>", "</seed:think>")
MISTRAL = Thinking("[THINK]", "[/THINK]", "[/THINK]")
GEMMA = Thinking("<|channel>thought", "<channel|>", "<channel|>", anywhere=True)
_FINAL = "<|end|><|start|>assistant<|channel|>final<|message|>"
HARMONY = Thinking("<|channel|>analysis<|message|>", "<|end|>", _FINAL, anywhere=True)
# The parts of a chat template by which each is recognised.
THINKING_SIGNS = (
    (HARMONY, ("<|channel|>", "<|message|>")),
    (SEED, (SEED.end,)),
    (GEMMA, (GEMMA.end,)),
    (MISTRAL, (MISTRAL.end,)),
    (THINK, (THINK.end,)),
)

# Tokens of a prompt before its last turn: the tag of thoughts may be special tokens itself.
_TAG_TOKENS = 32
# Most tokens of a turn that may continue.
_TURN_TOKENS = 1 << 15
# Text between the token that begins a turn and the text of the turn.
_ROLE = re.compile(r"\s*\w{0,20}\s*")

# Variables of templates that switch thoughts, and a pattern for each in a source.
_SWITCHES = {
    "enable_thinking": re.compile(r"\benable_thinking\b"),
    "thinking": re.compile(
        r"\bif (?:not )?thinking\b(?![.\[(])|(?<![\w.'\"])thinking *\| *default"
    ),
}


class PromptEnd(NamedTuple):
    """The end of a prompt with its special tokens. `turn` is the index at which its last turn
    begins, after the last special token, or the end of the text if there is none."""

    text: str
    turn: int

    @classmethod
    def of(cls, decoder: TokenDecoder, prompt: Sequence[int]) -> PromptEnd:
        """The end of `prompt`, with its last turn if this is no longer than a turn may be."""
        special, least = decoder.special_ids, max(0, len(prompt) - _TURN_TOKENS)
        turn = next((i for i in range(len(prompt), least, -1) if prompt[i - 1] in special), 0)
        decode = partial(decoder.decode, skip_special=False)
        if not turn:
            text = decode(prompt[-_TAG_TOKENS:])
            return cls(text, len(text))
        start = max(0, turn - _TAG_TOKENS)
        return cls(decode(prompt[start:]), len(decode(prompt[start:turn])))

    def is_open(self, begin: str, ends: Iterable[str], *, anywhere: bool) -> bool:
        """True if the prompt ends between `begin` and one of `ends`: `begin` is its last word, or
        begins its last turn, or is `anywhere` there."""
        text, turn = self
        if text.rstrip().endswith(begin):
            return True
        at = text.rfind(begin) if anywhere else text.find(begin, max(0, turn - len(begin)))
        if at < 0 or at + len(begin) < turn or not (anywhere or _ROLE.fullmatch(text[turn:at])):
            return False
        while text.startswith(begin, at):
            found = [(text.find(end, at), len(end)) for end in ends]
            closed = [start + size for start, size in found if start >= 0]
            if not closed:
                return True
            # A template may close empty thoughts before the message's own ones.
            at = min(closed)
            at += len(text[at:]) - len(text[at:].lstrip())
        return False


def switched(source: str, variables: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Variables as the template `source` names them, and notes on unsupported ones: its own switch
    replaces `enable_thinking`, which `reasoning_effort` "none" sets to false."""
    found = dict(variables)
    own = next((name for name, use in _SWITCHES.items() if use.search(source)), None)
    if own == "thinking" and "enable_thinking" in found:
        found = {own: found.pop("enable_thinking"), **found}
    if found.get("reasoning_effort") != "none":
        return found, ()
    if own is not None:
        found.setdefault(own, False)
    if "reasoning_effort" in source and re.search("""['"]none['"]""", source):
        return found, ()
    del found["reasoning_effort"]
    why = "the chat template cannot switch thoughts off; a thinking budget of 0 ends them at once"
    return found, () if own is not None else (f"reasoning_effort 'none': {why}",)


class TemplateRefusalError(Exception):
    """The template raised an error for a conversation; the message says which."""


@dataclass(frozen=True, slots=True)
class Rendered:
    """A prompt. `notes` list the parts of the conversation that it changed or left out."""

    text: str
    notes: tuple[str, ...] = ()


class ChatTemplate:
    """One template and the variables that it may use. Thread-safe."""

    def __init__(self, source: str, variables: Mapping[str, str]) -> None:
        self.source = source
        self._variables = dict(variables)
        self._lock = threading.Lock()
        self._helper = _begun.pop() if _begun else Helper("templates")

    def render(
        self, messages: Sequence[Mapping[str, Any]], **options: Unpack[ChatOptions]
    ) -> Rendered:
        """The prompt of the nearest form of a conversation that the template accepts; with
        `continues` it ends within the last message. Raises CheckpointError if the template refuses
        every form, or fails, which takes at most two seconds of processor time."""
        used: list[float] = []
        options["variables"], notes = switched(self.source, options.get("variables", {}))
        developer = any(one["role"] == "developer" for one in messages) and self._developer
        each = forms(messages, options.get("tools", ()), developer or "system")
        best: tuple[int, Rendered] | None = None
        refusals: list[TemplateRefusalError] = []
        for form in takewhile(lambda _: sum(used) < RENDER_CPU_SECONDS, each):
            try:
                text = self._text(form.messages, form.tools, options, used)
            except TemplateRefusalError as problem:
                refusals.append(problem)
                continue
            except HelperLostError as problem:
                if best is not None:
                    break
                raise CheckpointError(f"chat template: {problem}.", hint=_HINT) from None
            missing = left_out(text, messages)
            if best is None or len(missing) < best[0]:
                best = len(missing), Rendered(text, (*notes, *form.notes, *missing))
            if not missing:
                break
        if best is None:
            raise CheckpointError(f"chat template: {refusals[0]}.", hint=_HINT)
        return best[1]

    @cached_property
    def _developer(self) -> str:
        """The role for a developer's messages: `developer`, if the template writes it in another
        form than an unknown role."""
        found: list[str] = []
        for role in ("developer", "unknown-role"):
            probe = [{"role": role, "content": _PROBE}, {"role": "user", "content": "hello"}]
            try:
                found.append(self._text(probe, None, {}, []))
            except (TemplateRefusalError, HelperLostError):
                found.append("")
        own, unknown = found
        is_known = _PROBE in own and own != unknown.replace("unknown-role", "developer")
        return "developer" if is_known else "system"

    def _text(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        options: ChatOptions,
        used: list[float],
    ) -> str:
        """The prompt of the messages as they are; its processor time is added to `used`. `tools` is
        None without tools, as in transformers. Raises TemplateRefusalError, also if the last
        message is to be continued and the template leaves it out, and HelperLostError."""
        continues = options.get("continues", False)
        if must_be_in_text(self.source, messages, tools or ()):
            messages, tools = in_text(messages, tools or ()), None
        plain = [self._with_thoughts(message) for message in messages]
        if continues:
            plain[-1]["content"] += _HERE
        given = {
            **self._variables,
            **options.get("variables", {}),
            "messages": plain,
            "tools": tools,
            "documents": None,
            "add_generation_prompt": not continues,
        }
        limit = OUTPUT_RATIO * len(json.dumps(given)) + BASE_OUTPUT_CHARS
        request = {"template": self.source, "limit": limit, "variables": given}
        text = self._rendered(request | {"seconds": RENDER_CPU_SECONDS}, limit, used)
        if not continues:
            return text
        before, here, _ = text.rpartition(_HERE)
        if not here:
            raise TemplateRefusalError("it leaves out the message to continue")
        return before

    def _with_thoughts(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """The message with its thoughts in the fields that this template reads."""
        found = dict(message)
        thought = found.get("reasoning_content")
        if thought and "thinking" in self.source and not found.get("content"):
            found["thinking"] = thought
        if thought and "reasoning" in self.source:
            found["reasoning"] = thought
        return found

    def _rendered(self, request: Mapping[str, object], limit: int, used: list[float]) -> str:
        with self._lock:
            reply = self._helper.ask(request, max_bytes=_JSON_BYTES_PER_CHAR * limit)
            used.append(float(reply.get("seconds", 0.0)))
            # A helper that reports an unexpected exception ends itself afterwards.
            if "ends" in reply:
                self.close()
        if "text" in reply:
            return reply["text"]
        problem = reply.get("error", "no text").rstrip(".")
        raise HelperLostError(problem) if "ends" in reply else TemplateRefusalError(problem)

    def begin(self) -> None:
        """Start the helper while a model is loaded. Raises MachineError."""
        with self._lock:
            self._helper.begin()

    def close(self) -> None:
        """Stop the helper; the next render starts another one."""
        self._helper.close()


@dataclass(frozen=True, slots=True)
class ChatTemplates:
    """Templates of a checkpoint, by name; a single one is the default. `response` describes how the
    model's output is parsed (plugins/tools), if the checkpoint does."""

    by_name: Mapping[str, ChatTemplate]
    response: Mapping[str, Any] | None = None

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> ChatTemplates:
        """The templates in `config`, the content of tokenizer_config.json."""
        names = ("bos_token", "eos_token", "unk_token", "pad_token")
        tokens = {name: token_text(config.get(name)) for name in names}
        present = {name: token for name, token in tokens.items() if token is not None}
        given: object = config.get("chat_template")
        entries = cast("list[object]", given) if isinstance(given, list) else []
        named = [cast("dict[str, Any]", entry) for entry in entries if isinstance(entry, dict)]
        sources = {str(entry.get("name")): str(entry.get("template")) for entry in named}
        if isinstance(given, str):
            sources = {"default": given}
        response: object = config.get("response_template")
        return cls(
            {name: ChatTemplate(source, present) for name, source in sources.items()},
            cast("dict[str, Any]", response) if isinstance(response, dict) else None,
        )

    @property
    def source(self) -> str | None:
        """The source of the default template, if there is one."""
        default = self.by_name.get("default")
        return None if default is None else default.source

    @property
    def tool_source(self) -> str:
        """The source of the template for conversations with tools, if it is a separate one."""
        return self.by_name["tool_use"].source if "tool_use" in self.by_name else ""

    @property
    def thinking(self) -> Thinking | None:
        """Delimiters of the model's thoughts; None for a model without thoughts."""
        fields: Any = (self.response or {}).get("fields")
        for name in REASONING if isinstance(fields, Mapping) else ():
            spec = cast("Mapping[str, Any]", fields).get(name, {})
            begin, end = spec.get("open"), spec.get("close")
            if begin and end and isinstance(begin, str) and isinstance(end, str):
                return Thinking(begin, end, end, anywhere=True)
        known = f"{self.source or ''}{self.tool_source}"
        found = (one for one, signs in THINKING_SIGNS if all(sign in known for sign in signs))
        return next(found, None)

    def pick(self, tools: Sequence[object] | None = None) -> ChatTemplate:
        """The template for a conversation with `tools`. Raises CheckpointError if there is none."""
        default = self.by_name.get("default")
        if default is None:
            raise CheckpointError(
                "this checkpoint has no chat template, so it cannot chat.",
                hint="--chat-template FILE gives it one, --chat-template chatml a common one; text "
                "completions and `outrider generate` need none",
            )
        return self.by_name.get("tool_use", default) if tools else default


class HelperLostError(Exception):
    """The helper gave no answer; the message says why."""


class _EndedError(HelperLostError):
    """The helper ended without a cause in its requests: it was killed from outside."""


class Helper:
    """A `job` of helper.py: a process of its own that answers one JSON object per line. It starts
    with the first request, and again after it ended. It has a session of its own, so that Ctrl-C in
    a terminal does not reach it. Requests have the `seconds` of processor time that they may take.
    """

    def __init__(self, job: str) -> None:
        self._job = job
        self._process: subprocess.Popen[bytes] | None = None
        self._is_ready = False
        self._end: Callable[[], object] = lambda: None

    def ask(self, request: Mapping[str, object], *, max_bytes: int) -> dict[str, str]:
        """The reply to `request`. Raises HelperLostError if it is late or too long, and
        MachineError if the process does not start. A killed process is started once more."""
        line = json.dumps(request).encode() + b"\n"
        try:
            return self._ask(line, max_bytes)
        except _EndedError:
            return self._ask(line, max_bytes)

    def begin(self) -> None:
        """Start the process, so that the first request waits less. Raises MachineError."""
        if self._process is None:
            self._process = self._start()

    def close(self) -> None:
        """End the process; another request starts a new one."""
        self._process, self._is_ready = None, False
        self._end()

    def _ask(self, line: bytes, max_bytes: int) -> dict[str, str]:
        process = self._process = self._process or self._start()
        if not self._is_ready:
            with self._starting():
                _read(process, BASE_OUTPUT_CHARS)
            self._is_ready = True
        try:
            _write(process, line)
            return _read(process, max_bytes + BASE_OUTPUT_CHARS)
        except BaseException:
            # A late answer would be taken for the answer to the next request.
            self.close()
            raise

    def _start(self) -> subprocess.Popen[bytes]:
        with self._starting():
            process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                bufsize=0,
                env={},
                start_new_session=True,
            )
            self._end = weakref.finalize(self, _end, process)
        return process

    @property
    def _command(self) -> list[str]:
        return [sys.executable, "-I", str(Path(__file__).with_name("helper.py")), self._job]

    @contextmanager
    def _starting(self) -> Generator[None]:
        try:
            yield
        except BaseException as problem:
            self.close()
            if not isinstance(problem, HelperLostError | OSError):
                raise
            raise MachineError(
                f"helper.py does not start: {problem}.",
                hint=f"run {' '.join(self._command)} to see why",
            ) from None


# Started before their templates are known.
_begun: list[Helper] = []


def begin_helper() -> None:
    """Start the helper of the next `ChatTemplate`, while a model is loaded. Raises MachineError."""
    helper = Helper("templates")
    helper.begin()
    _begun.append(helper)


def _write(process: subprocess.Popen[bytes], line: bytes) -> None:
    pipe, left = given(process.stdin, "pipe"), memoryview(line)
    try:
        # A signal may interrupt a write before its end.
        while left:
            left = left[pipe.write(left) :]
    except BrokenPipeError:
        raise _lost(process) from None


def _read(process: subprocess.Popen[bytes], max_bytes: int) -> dict[str, str]:
    pipe, deadline = given(process.stdout, "pipe"), time.monotonic() + ANSWER_SECONDS
    line = bytearray()
    with selectors.DefaultSelector() as selector:
        selector.register(pipe, selectors.EVENT_READ)
        while not line.endswith(b"\n"):
            left = deadline - time.monotonic()
            if left <= 0 or not selector.select(left):
                raise HelperLostError(f"no answer within {ANSWER_SECONDS:g} s")
            chunk = pipe.read(2**16)
            if not chunk:
                raise _lost(process)
            line += chunk
            if len(line) > max_bytes:
                raise HelperLostError("the text it writes is too long")
    reply: Any = json.loads(line)
    return cast("dict[str, str]", reply)


def _lost(process: subprocess.Popen[bytes]) -> HelperLostError:
    """The error of a process that ended: by its own limits, or by a signal from outside."""
    try:
        status = process.wait(_EXIT_SECONDS)
    except subprocess.TimeoutExpired:
        return HelperLostError("the helper process closed its output")
    if status in (-signal.SIGXCPU, -signal.SIGPROF):
        return HelperLostError("it takes too much processor time")
    how = f"by signal {-status}" if status < 0 else f"with status {status}"
    return _EndedError(f"the helper process ended {how}")


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()


# Chat templates that an operator may name for a checkpoint that has none, or a wrong one.
#
# Each writes turns of text as the models of its family were trained on them; tools are described in
# text.
@cache
def named_templates() -> Mapping[str, str]:
    """Templates of families by name."""
    folder, ending = files("outrider.api").joinpath("assets"), ".chat.jinja"
    names = sorted(one.name for one in folder.iterdir() if one.name.endswith(ending))
    return {name.removesuffix(ending): folder.joinpath(name).read_text("utf-8") for name in names}


def template_source(given: str) -> str:
    """Source of the template that `given` names: one of `named_templates`, or a Jinja file. Raises
    ConfigError for neither."""
    known = named_templates()
    if given in known:
        return known[given]
    try:
        return read_text(Path(given), FileKind.TEMPLATE)
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is no text in UTF-8"
        raise ConfigError(
            f"chat_template: {shown(given)} is no name of a template, and cannot be read: {why}.",
            hint=nearest(
                given, known, f"--chat-template takes a Jinja file, or {', '.join(known)}"
            ),
        ) from None
