"""Renders chat templates, in a process of its own that may be killed at any moment.

A template is a program that came with a checkpoint. Jinja's sandbox keeps it from Python, but not
from looping or from filling memory, and neither can be interrupted inside a thread. This script
is started by `chat_template`, imports nothing of the package, limits its own memory, processor
time and files, and then answers one JSON line with one JSON line.

The environment mirrors the one that transformers gives to templates.
"""

from __future__ import annotations

import json
import resource
import sys
from datetime import datetime
from types import TracebackType
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.runtime
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

MEMORY_BYTES = 512 * 2**20
RENDER_CPU_SECONDS = 2


class GenerationTag(jinja2.ext.Extension):
    """Passes the body of `{% generation %}`, which marks assistant text for training, through."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's own declaration

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = self.call_method("_body")
        return jinja2.nodes.CallBlock(call, [], [], body).set_lineno(line)

    def _body(self, caller: jinja2.runtime.Macro) -> str:
        return caller()


class PublicNamespace(Namespace):
    """A namespace whose names may not reach into Python's own."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        # Unnamed, as in Jinja, so that a template may call namespace(self=...).
        self, *rest = args
        attributes = dict(*rest, **kwargs)
        for name in attributes:
            _refuse_private(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_private(name)
        super().__setitem__(name, value)


def _refuse_private(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a template may not set {name!r}")


def _raise_exception(message: str) -> None:
    raise jinja2.exceptions.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _new_dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    return dict(*args, **kwargs)


def make_environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    names: dict[str, Any] = environment.globals
    names["raise_exception"] = _raise_exception
    names["strftime_now"] = _strftime_now
    names["dict"] = _new_dict
    names["namespace"] = PublicNamespace
    return environment


def render(environment: ImmutableSandboxedEnvironment, request: dict[str, Any]) -> str:
    """The rendered text; raises TemplateError if it grows beyond the request's limit."""
    template = environment.from_string(request["template"])
    pieces: list[str] = []
    room: int = request["limit"]
    for piece in template.generate(request["variables"]):
        room -= len(piece)
        if room < 0:
            raise jinja2.exceptions.TemplateError("the text it writes is too long")
        pieces.append(piece)
    return "".join(pieces)


def _limit_memory_and_files() -> None:
    for kind, limit in (
        (resource.RLIMIT_AS, MEMORY_BYTES),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_NOFILE, 16),
        (resource.RLIMIT_NPROC, 0),
    ):
        try:
            resource.setrlimit(kind, (limit, limit))
        except (OSError, ValueError):  # macOS refuses some of them
            continue


def _allow_cpu_for_one_render() -> None:
    used = resource.getrusage(resource.RUSAGE_SELF)
    seconds = int(used.ru_utime + used.ru_stime) + RENDER_CPU_SECONDS
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, hard))


def _answer(reply: dict[str, str]) -> None:
    sys.stdout.write(json.dumps(reply) + "\n")
    sys.stdout.flush()


def _answer_and_die(
    kind: type[BaseException], error: BaseException, _trace: TracebackType | None
) -> None:
    _answer({"error": f"{kind.__name__}: {error}".rstrip(": ")[:500]})


def main() -> None:
    sys.excepthook = _answer_and_die
    environment = make_environment()
    _limit_memory_and_files()
    _answer({})
    for line in sys.stdin:
        _allow_cpu_for_one_render()
        try:
            reply = {"text": render(environment, json.loads(line))}
        except jinja2.exceptions.TemplateError as error:
            reply = {"error": str(error)[:500]}
        _answer(reply)


if __name__ == "__main__":
    main()
