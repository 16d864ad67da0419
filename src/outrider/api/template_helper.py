"""Helper process that renders chat templates and tries patterns; it may be killed at any time.

Templates and tokenizer patterns are programs that came with a checkpoint. Jinja's sandbox keeps a
template from Python, but not from looping or from filling memory. `chat_template` therefore starts
this script, which imports nothing of the package, limits its own memory, processor time and files,
and answers one JSON line with one JSON line. The Jinja environment mirrors that of transformers.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
import time
from datetime import datetime
from functools import lru_cache
from importlib import import_module
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
TRIAL_CPU_SECONDS = 10
# A search of this text with a step for each pair of characters takes less than 0.1 seconds.
TRIAL_CHARS, TRIAL_SECONDS = 4096, 1.0
_SAMPLES = "aA1 \n.'_é中▁"
_META = set("\\^$.|?*+()[]{}")
_MAX_LETTERS = 24


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
    """A namespace whose names cannot reach into Python's own."""

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


@lru_cache(maxsize=4)
def compiled(environment: ImmutableSandboxedEnvironment, source: str) -> jinja2.Template:
    return environment.from_string(source)


def render(environment: ImmutableSandboxedEnvironment, request: dict[str, Any]) -> str:
    """The rendered text; raises TemplateError if it grows beyond the request's limit."""
    template = compiled(environment, request["template"])
    pieces: list[str] = []
    num_left: int = request["limit"]
    for piece in template.generate(request["variables"]):
        num_left -= len(piece)
        if num_left < 0:
            raise jinja2.exceptions.TemplateError("the text it writes is too long")
        pieces.append(piece)
    return "".join(pieces)


def slow_text(pattern: str) -> str | None:
    """A text in which a search for `pattern` takes too long; None if none of the tried ones does.

    Runs of the letters of a pattern, and of others, one by one and in pairs, as repetitions compete
    there. Raises the library's error for an invalid pattern.
    """
    from tokenizers import Regex
    from tokenizers.pre_tokenizers import Split

    split = Split(Regex(pattern), "isolated")
    letters = list(dict.fromkeys([*_SAMPLES, *(char for char in pattern if char not in _META)]))
    letters = letters[: len(_SAMPLES) + _MAX_LETTERS]
    # The end of a pattern has to be in the text, or a search is over before it began.
    end = "\0" + "".join(letters)
    runs = [*letters, *(a + b for a in letters[:12] for b in letters[:12] if a != b)]
    for run in runs:
        begun = time.process_time()
        try:
            split.pre_tokenize_str(run * (TRIAL_CHARS // len(run)) + end)
        except BaseException as error:
            if type(error).__name__ != "PanicException":
                raise
            return run
        if time.process_time() - begun > TRIAL_SECONDS:
            return run
    return None


def try_patterns(request: dict[str, Any]) -> dict[str, str]:
    for pattern in request["patterns"]:
        run = slow_text(pattern)
        if run is not None:
            return {"error": f"the pattern {pattern!r:.60} takes too long with a run of {run!r}"}
    return {"text": ""}


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


def _allow_cpu(more: int) -> None:
    used = resource.getrusage(resource.RUSAGE_SELF)
    seconds = int(used.ru_utime + used.ru_stime) + more
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, hard))


def _answer(reply: dict[str, str]) -> None:
    sys.stdout.write(json.dumps(reply) + "\n")
    sys.stdout.flush()


def _answer_and_die(
    kind: type[BaseException], error: BaseException, _trace: TracebackType | None
) -> None:
    _answer({"error": _words(kind, error), "ends": "yes"})


def _words(kind: type[BaseException], error: BaseException) -> str:
    return f"{kind.__name__}: {error}".rstrip(": ")[:500]


def main() -> None:
    # It ends with its input; Ctrl-C is for the calling process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.excepthook = _answer_and_die
    environment = make_environment()
    if "patterns" in sys.argv:
        # Imported before the limits, which prevent opening a library.
        import_module("tokenizers.pre_tokenizers")
    _limit_memory_and_files()
    _answer({})
    for line in sys.stdin:
        request = json.loads(line)
        tries = "patterns" in request
        _allow_cpu(TRIAL_CPU_SECONDS if tries else RENDER_CPU_SECONDS)
        try:
            reply = try_patterns(request) if tries else {"text": render(environment, request)}
        except jinja2.exceptions.TemplateError as error:
            reply = {"error": str(error)[:500]}
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            reply = {"error": _words(type(error), error)}
        _answer(reply)


if __name__ == "__main__":
    main()
