"""Helper process that runs programs of a checkpoint or a request; it may be killed at any time.

Templates, tokenizer patterns and grammars take as long as they like: Jinja's sandbox keeps a
template from Python, but not from looping or from filling memory, and llguidance counts no steps of
some kinds of reading (thirty thousand optional letters take half a minute). `chat_template.Helper`
therefore starts this script, which imports nothing of the package, limits its own memory, processor
time and files, and answers one JSON line with one JSON line. The Jinja environment mirrors that of
transformers.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from functools import lru_cache, partial
from types import TracebackType
from typing import Any, TypeAlias

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.runtime
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

# A search of this text with a step for each pair of characters takes less than 0.1 seconds.
TRIAL_CHARS, TRIAL_SECONDS = 4096, 1.0
_SAMPLES = "aA1 \n.'_é中▁"
_META = set("\\^$.|?*+()[]{}")
_MAX_LETTERS = 24

Request: TypeAlias = dict[str, Any]
Reply: TypeAlias = dict[str, str]


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


def render(environment: ImmutableSandboxedEnvironment, request: Request) -> Reply:
    """The rendered text; raises TemplateError if it grows beyond the request's limit."""
    template = compiled(environment, request["template"])
    pieces: list[str] = []
    num_left: int = request["limit"]
    for piece in template.generate(request["variables"]):
        num_left -= len(piece)
        if num_left < 0:
            raise jinja2.exceptions.TemplateError("the text it writes is too long")
        pieces.append(piece)
    return {"text": "".join(pieces)}


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


def _renderer() -> Callable[[Request], Reply]:
    return partial(render, make_environment())


def _pattern_trial() -> Callable[[Request], Reply]:
    # Imported before the limits, which prevent opening a library.
    from tokenizers import pre_tokenizers

    del pre_tokenizers

    def trial(request: Request) -> Reply:
        for pattern in request["patterns"]:
            if (run := slow_text(pattern)) is not None:
                why = f"takes too long with a run of {run!r}"
                return {"error": f"the pattern {pattern!r:.60} {why}"}
        return {"text": ""}

    return trial


def _grammar_trial() -> Callable[[Request], Reply]:
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

    # The cost of reading hardly depends on the vocabulary: this one has a token per byte.
    vocabulary = LLTokenizer("byte")

    def trial(request: Request) -> Reply:
        limits = LLParserLimits(**request["limits"])
        matcher = LLMatcher(vocabulary, request["grammar"], log_level=0, limits=limits)
        if not matcher.is_error():
            matcher.compute_bitmask()
        return {}

    return trial


# By the name of a job: a function that prepares answers, and the limit of memory.
JOBS: dict[str, tuple[Callable[[], Callable[[Request], Reply]], int]] = {
    "templates": (_renderer, 512 << 20),
    "patterns": (_pattern_trial, 512 << 20),
    "grammars": (_grammar_trial, 1 << 30),
}


def _limit(num_bytes: int, *, files: bool) -> None:
    limits = {resource.RLIMIT_AS: num_bytes}
    if files:
        none = (resource.RLIMIT_CORE, resource.RLIMIT_FSIZE, resource.RLIMIT_NPROC)
        limits |= {resource.RLIMIT_NOFILE: 16, **dict.fromkeys(none, 0)}
    for kind, limit in limits.items():
        # macOS refuses some of them.
        with suppress(OSError, ValueError):
            resource.setrlimit(kind, (limit, limit))


def _answer(reply: Reply) -> None:
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
    prepare, num_bytes = JOBS[sys.argv[1]]
    answer = prepare()
    # A library may start threads to read a grammar, which is no program.
    _limit(num_bytes, files=sys.argv[1] != "grammars")
    _answer({})
    for line in sys.stdin:
        request = json.loads(line)
        # Processor time: the signal ends the process immediately, even in the midst of native code.
        begun = time.process_time()
        signal.setitimer(signal.ITIMER_PROF, request["seconds"])
        try:
            reply = answer(request)
        except jinja2.exceptions.TemplateError as error:
            reply = {"error": str(error)[:500]}
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            reply = {"error": _words(type(error), error)}
        signal.setitimer(signal.ITIMER_PROF, 0)
        _answer(reply | {"seconds": str(time.process_time() - begun)})


if __name__ == "__main__":
    main()
