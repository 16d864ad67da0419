"""Lines of a batch: OpenAI's requests and plain prompts, read and answered.

An OpenAI line is {"custom_id", "method", "url", "body"} for chat completions or completions; its
answer has the same custom_id and, below response, the body that a server would send. A plain line
is {"prompt": ...} or {"messages": ...} with further sampling settings by name; its answer is flat.
A setting that a line lacks has the run's value, and an unknown key is an error of its line.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from array import array
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, Self, cast

from outrider.api.callers import Message, Prompt
from outrider.api.chat_messages import content_text
from outrider.api.result import GenerationResult, chat_logprobs, completion_logprobs
from outrider.api.structure import KEYS, StructureOptions, structure_of
from outrider.api.tokenizer import Tokenizer
from outrider.core.errors import ConfigError, MachineError, OutriderError, nearest, reason_of
from outrider.core.fields import shown
from outrider.core.files import Lock, open_regular, parse_json
from outrider.core.params import SamplingParams

Chat = Sequence[Message]
Kind = Literal["chat", "completion", "plain"]
_URLS: Mapping[str, Kind] = {"/v1/chat/completions": "chat", "/v1/completions": "completion"}
_SAMPLING = tuple(item.name for item in fields(SamplingParams))
# Names of settings in OpenAI's bodies; and keys that are no settings.
_RENAMED = {
    "max_completion_tokens": "max_tokens",
    "thinking_budget_tokens": "thinking_budget",
    "thinking_token_budget": "thinking_budget",
}
_UNREAD = frozenset((
    "prompt", "messages", "id", "custom_id", "model", "user", "metadata", "store", "service_tier",
    "stream_options", "safety_identifier", "prompt_cache_key",
))  # fmt: skip
_STRUCTURES = ("schema", "json", "regex", "choices", "grammar")
# Keys that are refused unless they have one of these values, which request nothing.
_NOTHING: Mapping[str, tuple[object, ...]] = {
    "stream": (False, None),
    "echo": (False, None),
    "suffix": ("", None),
    "best_of": (1, None),
    "tools": ([], None),
    "tool_choice": ("none", "auto", None),
    "functions": ([], None),
    "prediction": (None,),
}
_FINISH = {"stop": "stop", "length": "length", "timeout": "length"}


@dataclass(frozen=True, slots=True)
class BatchLine:
    """Line `number`, from 1: `params.n` completions of each of `prompts`, or of the chat `chat`."""

    number: int
    kind: Kind
    prompts: Sequence[Prompt]
    chat: Chat | None
    params: SamplingParams
    structure: StructureOptions = field(default_factory=StructureOptions)
    custom_id: str | None = None


@dataclass(frozen=True, slots=True)
class BadLine:
    """A line that is no valid request, and its known parts."""

    number: int
    error: OutriderError
    kind: Kind = "plain"
    custom_id: str | None = None


def read_line(number: int, text: str, defaults: SamplingParams) -> BatchLine | BadLine:
    """The request of a line. A line without a seed gets one by its number, so that its text depends
    on no other line and on no restart."""
    kind: Kind = "plain"
    custom_id: str | None = None
    try:
        try:
            record = parse_json(text)
        except ValueError as error:
            raise ConfigError(f"the line is no JSON: {error}.") from None
        if not isinstance(record, dict):
            raise ConfigError("the line is no JSON object.")
        record = cast("dict[str, Any]", record)
        body = record
        if "body" in record or "url" in record:
            # Read first, so that an error names it.
            custom_id, kind = _text(record.get("custom_id")), "chat"
            kind, body = _openai(record)
        seeded = defaults.numbered(number - 1)
        params = _params(body, seeded, kind)
        is_chat = kind == "chat" or (kind == "plain" and "messages" in body)
        chat = _messages(body.get("messages")) if is_chat else None
        prompts: Sequence[Prompt] = [] if is_chat else _prompts(body, kind)
        custom_id = custom_id if kind != "plain" else _text(body.get("id", body.get("custom_id")))
        structure = _structure(body, kind)
        return BatchLine(number, kind, prompts, chat, params, structure, custom_id)
    except OutriderError as error:
        return BadLine(number, error, kind, custom_id)


def _text(value: object) -> str | None:
    return None if value is None else str(value)


def _openai(record: Mapping[str, Any]) -> tuple[Kind, dict[str, Any]]:
    url, body = record.get("url"), record.get("body")
    kind = _URLS.get(str(url))
    if kind is None:
        raise ConfigError(
            f"url {shown(url)} is not served in a batch.", hint=f"one of: {', '.join(_URLS)}"
        )
    if record.get("method", "POST") != "POST":
        raise ConfigError(f"method {shown(record['method'])}: only POST has a meaning.")
    if not isinstance(body, dict):
        raise ConfigError("body is no JSON object.")
    if not isinstance(record.get("custom_id"), str):
        raise ConfigError("custom_id is missing, or is no text.")
    return kind, cast("dict[str, Any]", body)


def _params(body: Mapping[str, Any], defaults: SamplingParams, kind: Kind) -> SamplingParams:
    given: dict[str, Any] = {}
    for key, value in body.items():
        name = _RENAMED.get(key, key) if kind != "plain" else key
        if name in _UNREAD or key in KEYS or (kind == "plain" and key in _STRUCTURES):
            continue
        if key in _NOTHING and (kind != "plain" or key != "prediction"):
            if value not in _NOTHING[key]:
                raise ConfigError(f"{key} has no meaning in a batch here.", hint="leave it out")
        elif name not in _SAMPLING:
            where = "`outrider batch --help` lists the sampling settings"
            raise ConfigError(f"unknown key {shown(key)}.", hint=nearest(key, _SAMPLING, where))
        elif value is not None:
            given[name] = _value(name, value)
    if kind == "completion" and type(given.get("logprobs")) is int:
        # Completions give a number; chat gives a switch, and the number separately.
        given |= {"logprobs": True, "top_logprobs": given["logprobs"]}
    if type(given.get("max_tokens")) is int:
        # The line's own limit takes precedence over the run's least.
        given = {"min_tokens": min(defaults.min_tokens, given["max_tokens"])} | given
    return replace(defaults, **given)


def _structure(body: Mapping[str, Any], kind: Kind) -> StructureOptions:
    """The structure of the text: from OpenAI's keys, or in a plain line from our own."""
    own = {key: body[key] for key in _STRUCTURES if kind == "plain" and body.get(key) is not None}
    theirs = structure_of({key: value for key, value in body.items() if key not in own})
    return cast("StructureOptions", {**theirs, **own})


def _value(name: str, value: Any) -> Any:
    if name in ("stop", "bad_words"):
        value = [value] if isinstance(value, str) else value
        return tuple(cast("list[Any]", value)) if isinstance(value, list) else value
    if name == "logit_bias" and isinstance(value, dict):
        entries = cast("dict[str, Any]", value).items()
        # JSON has no keys but texts.
        return {int(key) if key.isdecimal() else key: bias for key, bias in entries}
    return value


def _prompts(body: Mapping[str, Any], kind: Kind) -> Sequence[Prompt]:
    prompt: Any = body.get("prompt")
    if isinstance(prompt, str):
        return [prompt]
    if not isinstance(prompt, list) or not prompt:
        raise ConfigError("prompt is missing, or is neither a text nor a list.")
    entries = cast("list[Any]", prompt)
    if isinstance(entries[0], int):
        return [entries]
    if kind == "plain":
        raise ConfigError("prompt is a list of prompts.", hint="a line for each of them")
    return entries


def _messages(given: object) -> Chat:
    if not isinstance(given, list) or not given:
        raise ConfigError("messages is missing, or is no list of messages.")
    return [_message(one) for one in cast("list[object]", given)]


def _message(given: object) -> Message:
    if not isinstance(given, dict):
        raise ConfigError(f"messages: {shown(given)} is no object with role and content.")
    message = cast("dict[str, Any]", given)
    if not isinstance(message.get("role"), str) or message.get("content") is None:
        raise ConfigError("messages: each has a role and a content, both texts.")
    return {"role": message["role"], "content": content_text(message["content"], "messages")}


@dataclass(frozen=True, slots=True)
class Answers:
    """Writes answers as JSON. `model` is the model's name in them; the `id` of an answer contains
    `digest`, which identifies the line and its content."""

    model: str
    tokenizer: Tokenizer

    def good(
        self,
        line: BatchLine,
        digest: str,
        num_prompt: Sequence[int],
        results: Sequence[GenerationResult],
    ) -> str:
        """`results` are `params.n` for each prompt, `num_prompt` the prompts' token counts."""
        if line.kind == "plain":
            return self._plain(line, digest, num_prompt[0], results)
        choices = [self._choice(line, i, result) for i, result in enumerate(results)]
        number = sum(result.num_tokens for result in results)
        chat = line.kind == "chat"
        body = {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{line.number}-{digest}",
            "object": "chat.completion" if chat else "text_completion",
            "created": int(time.time()),
            "model": self.model,
            "choices": choices,
            "usage": {
                "prompt_tokens": sum(num_prompt),
                "completion_tokens": number,
                "total_tokens": sum(num_prompt) + number,
            },
            "seed": line.params.seed,
        }
        return openai_answer(line.number, digest, line.custom_id, 200, body, None)

    def bad(self, line: BatchLine | BadLine, digest: str, error: Exception) -> str:
        code = 400 if getattr(error, "exit_code", 1) == ConfigError.exit_code else 500
        hint = getattr(error, "hint", None)
        message = f"{error} Try: {hint}." if hint else str(error)
        name = "invalid_request_error" if code == 400 else "server_error"
        if line.kind == "plain":
            record: dict[str, Any] = {} if line.custom_id is None else {"id": line.custom_id}
            record |= {"error": {"message": message, "type": name}}
            return _json(record | {"line": line.number, "digest": digest})
        body = {"error": {"message": message, "type": name, "param": None, "code": None}}
        shortly = {"code": name, "message": message}
        return openai_answer(line.number, digest, line.custom_id, code, body, shortly)

    def _plain(
        self, line: BatchLine, digest: str, num_prompt: int, results: Sequence[GenerationResult]
    ) -> str:
        record: dict[str, Any] = {} if line.custom_id is None else {"id": line.custom_id}
        first = results[0]
        record |= {"text": first.text, "finish_reason": first.finish_reason}
        if len(results) > 1:
            record["texts"] = [result.text for result in results]
            record["finish_reasons"] = [result.finish_reason for result in results]
        if line.params.logprobs:
            record["logprobs"] = [
                chat_logprobs(self.tokenizer, result.logprobs) for result in results
            ]
        notes = tuple(dict.fromkeys(note for result in results for note in result.notes))
        record |= {"notes": notes} if notes else {}
        number = sum(result.num_tokens for result in results)
        record |= {"prompt_tokens": num_prompt, "completion_tokens": number}
        record |= {"seed": line.params.seed, "error": None}
        return _json(record | {"line": line.number, "digest": digest})

    def _choice(self, line: BatchLine, index: int, result: GenerationResult) -> dict[str, Any]:
        finish = _FINISH.get(result.finish_reason or "", "stop")
        items, logprobs = result.logprobs, None
        if line.kind == "chat":
            if line.params.logprobs:
                logprobs = {"content": chat_logprobs(self.tokenizer, items)}
            text = {"message": {"role": "assistant", "content": result.text}}
        else:
            if line.params.logprobs:
                ids = [item.token_id for item in items]
                logprobs = completion_logprobs(self.tokenizer, items, ids, 0)
            text = {"text": result.text}
        return {"index": index, **text, "logprobs": logprobs, "finish_reason": finish}


def openai_answer(
    number: int,
    digest: str,
    custom_id: str | None,
    status: int,
    body: Mapping[str, Any] | None,
    error: Mapping[str, Any] | None,
) -> str:
    """An answer in OpenAI's form; without a `body` the line was never answered."""
    name = f"{number}-{digest}"
    response = {"status_code": status, "request_id": f"req-{name}", "body": body}
    response = None if body is None else response
    return _json(
        {"id": f"batch_req_{name}", "custom_id": custom_id, "response": response, "error": error}
    )


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def answered(text: str) -> tuple[int, str, bool]:
    """Line number and digest of an answer, and True for an error. Raises ValueError otherwise."""
    record = parse_json(text)
    if not isinstance(record, dict):
        raise ValueError("no object")
    record = cast("dict[str, Any]", record)
    name = str(record.get("id", ""))
    if "digest" in record and isinstance(record.get("line"), int):
        return record["line"], str(record["digest"]), record.get("error") is not None
    kind, _, rest = name.rpartition("_")
    number, dash, digest = rest.partition("-")
    if kind != "batch_req" or not dash or not number.isdecimal():
        raise ValueError("no answer of a batch")
    return int(number), digest, record.get("error") is not None


# Files of a batch: lines are read only as they are needed, and answers are appended.
#
# The file of answers is its own journal. An answer is one line, written at once, that names the
# number and the digest of the line it answers; after a crash an incomplete last line is cut off,
# and answered lines are not run again. Memory is four bytes for each answered line, so that files
# may be of any size.
MAX_LINE_BYTES = 16 << 20
_FRESH = "name a new file for answers, or begin anew with --fresh"


@dataclass(frozen=True, slots=True)
class RawLine:
    """A line that is not blank; `data` is None for a line that is too long to store."""

    number: int
    digest: int
    data: bytes | None

    @property
    def name(self) -> str:
        """The digest as written in answers."""
        return f"{self.digest:08x}"


def raw_lines(path: Path) -> Generator[RawLine]:
    """The lines of a file, one in memory at a time. Raises MachineError."""
    try:
        with open_regular(path) as stream:
            number = 0
            while piece := stream.readline(MAX_LINE_BYTES):
                number += 1
                hashed, whole = hashlib.blake2b(piece.strip(), digest_size=4), piece
                if len(piece) == MAX_LINE_BYTES and not piece.endswith(b"\n"):
                    while not piece.endswith(b"\n") and (piece := stream.readline(MAX_LINE_BYTES)):
                        hashed.update(piece)
                    whole = None
                elif not piece.strip():
                    continue
                yield RawLine(number, _number_of(hashed.digest()), whole)
    except OSError as error:
        raise MachineError(
            f"{path} cannot be read: {reason_of(error)}.", hint="name a file of JSON lines"
        ) from None


def raw_line(number: int, data: bytes) -> RawLine:
    """A line with the content `data`, for a file without lines."""
    return RawLine(number, _number_of(hashlib.blake2b(data, digest_size=4).digest()), data)


def _number_of(digest: bytes) -> int:
    """The digest as a number above 0, as 0 marks a line without an answer."""
    return int.from_bytes(digest, "big") or 1


class AnswerFile:
    """Answers at `path`, of this run and of earlier ones; one process at a time may write them.

    Raises ConfigError if the file holds something else, MachineError if it cannot be written.
    """

    def __init__(self, path: Path, *, fresh: bool = False) -> None:
        self._path = path.resolve()
        self._digests = array("I")
        self.num_answers = self.num_errors = 0
        try:
            self._lock = Lock(self._path)
            end = 0 if fresh else self._read()
            self._stream = self._path.open("ab")
            self._stream.truncate(end)
            if end and not self._ends_line(end):
                self._stream.write(b"\n")
        except TimeoutError:
            raise MachineError(
                f"another process writes {path}.", hint="wait for it, or name another file"
            ) from None
        except OSError as error:
            raise MachineError(
                f"{path} cannot be written: {reason_of(error)}.",
                hint="name a file in a folder that exists and that you may write",
            ) from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def has(self, line: RawLine) -> bool:
        """True if a line has its answer. Raises ConfigError if another line has it."""
        digest = self._digests[line.number] if line.number < len(self._digests) else 0
        if digest not in (0, line.digest):
            raise ConfigError(
                f"{self._path} answers another line {line.number} than the input has.", hint=_FRESH
            )
        return digest != 0

    def write(self, line: RawLine, answer: str, *, is_error: bool) -> None:
        """Append one line; it survives any end of this process."""
        self._stream.write(answer.encode("utf-8", "backslashreplace") + b"\n")
        self._stream.flush()
        self._note(line.number, line.digest, is_error=is_error)

    def close(self) -> None:
        if not self._stream.closed:
            os.fsync(self._stream.fileno())
            self._stream.close()
        self._lock.close()

    def _note(self, number: int, digest: int, *, is_error: bool) -> None:
        missing = number + 1 - len(self._digests)
        if missing > 0:
            self._digests.extend([0] * missing)
        self._digests[number] = digest
        self.num_answers += 1
        self.num_errors += is_error

    def _read(self) -> int:
        """Note the existing answers. Returns their size in bytes."""
        end = 0
        with open_regular(self._path) as stream:
            for index, line in enumerate(stream, start=1):
                try:
                    number, digest, is_error = answered(line.decode())
                    self._note(number, int(digest, 16), is_error=is_error)
                except (ValueError, OverflowError):
                    # Only an incomplete answer may be cut off: any other text has another author.
                    if line.endswith(b"\n") or _is_json(line):
                        raise ConfigError(
                            f"{self._path}, line {index}, is no answer of a batch.", hint=_FRESH
                        ) from None
                    return end
                end += len(line)
        return end

    def _ends_line(self, end: int) -> bool:
        with open_regular(self._path) as stream:
            stream.seek(end - 1)
            return stream.read(1) == b"\n"


def _is_json(line: bytes) -> bool:
    try:
        parse_json(line.decode())
    except ValueError:
        return False
    return True
