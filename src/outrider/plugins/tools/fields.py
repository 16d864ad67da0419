"""Fields of a model's output, and the delimiters between which they stand: literals or simple
patterns.

Patterns come from checkpoints, so a backtracking engine must not run them as they are. A pattern is
read into literals and runs of characters, and matched from left to right without going back: a
decision about a text stays valid when more text comes. Runs are possessive; a lazy run ends at the
first occurrence of the literal after it. Alternatives, references and look-around are refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Literal, TypeAlias, TypeGuard

from outrider.api.chat_template import PromptEnd
from outrider.plugins.tools.calls import ReadCalls, ReadHead

# A longer text is not a delimiter, so the parser never holds back more than this.
MAX_CHARS = 256


# Each piece of a pattern writes two expressions: for itself followed by `then`, and for a text that
# ends within itself, or in what `then` allows behind it.
@dataclass(frozen=True, slots=True)
class Text:
    """A literal text."""

    text: str
    optional: bool = False

    def whole(self, then: str) -> str:
        found = re.escape(self.text)
        return (f"(?>{found}|)" if self.optional else found) + then

    def begun(self, then: str) -> str:
        begins = [re.escape(self.text[:size]) + r"\Z" for size in range(len(self.text))]
        return f"(?:{'|'.join([*begins, self.whole(then)])})"


@dataclass(frozen=True, slots=True)
class Run:
    """A run of `least` or more characters of the set `of`, an expression; with `single`, at most
    one. A lazy run ends before the expression `stop`."""

    of: str
    least: int
    single: bool = False
    stop: str = ""

    def takes(self, char: str) -> bool:
        return re.fullmatch(self.of, char, re.DOTALL) is not None

    def whole(self, then: str) -> str:
        if self.single:
            return (self.of if self.least else f"{self.of}?+") + then
        return f"{self.of}{{{self.least}}}{self._more}{then}"

    def begun(self, then: str) -> str:
        return rf"(?:{'' if self.single else self._more}\Z|{self.whole(then)})"

    @property
    def _more(self) -> str:
        return f"(?:(?!{self.stop}){self.of})*+" if self.stop else f"{self.of}*+"


@dataclass(frozen=True, slots=True)
class Mark:
    """The begin or the end of a named group, as an expression."""

    text: str

    def whole(self, then: str) -> str:
        return self.text + then

    def begun(self, then: str) -> str:
        return then


Piece: TypeAlias = Text | Run | Mark


@dataclass(frozen=True, slots=True)
class Match:
    """A match that ends at `end`, with the text of each named group."""

    end: int
    groups: Mapping[str, str] = field(default_factory=dict[str, str])


class Pending:
    """The result of a match that more text must decide."""


PENDING: Final = Pending()
_NEVER = "(?!)"


@dataclass(frozen=True, slots=True, eq=False)
class Delimiter:
    """A delimiter, which begins with the literal `first`. With `at_start` it is recognised only at
    the start of an answer, with `behind_call` only after a call; blanks may come before it. With
    `ahead`, one of these texts must follow after blanks; it is not part of the delimiter."""

    pieces: tuple[Piece, ...]
    at_start: bool = False
    behind_call: bool = False
    ahead: tuple[str, ...] = ()
    first: str = field(init=False)
    _whole: re.Pattern[str] = field(init=False, repr=False)
    _begun: re.Pattern[str] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """Raises ValueError for unbalanced groups."""
        whole, begun = "", _NEVER
        if self.ahead:
            follows = [Text(one) for one in self.ahead]
            whole = rf"(?=\s*+(?:{'|'.join(one.whole('') for one in follows)}))"
            begun = rf"\s*+(?:{'|'.join(one.begun(_NEVER) for one in follows)})"
        for piece in reversed(self.pieces):
            whole, begun = piece.whole(whole), piece.begun(begun)
        try:
            object.__setattr__(self, "_whole", re.compile(whole, re.DOTALL))
            object.__setattr__(self, "_begun", re.compile(begun, re.DOTALL))
        except re.error as error:
            raise ValueError(f"the pattern {whole!r} cannot be read: {error}") from None
        piece = self.pieces[0]
        object.__setattr__(self, "first", piece.text if isinstance(piece, Text) else "")

    def match(
        self, text: str, at: int, *, final: bool, most: int = MAX_CHARS
    ) -> Match | Pending | None:
        """Match at index `at`. `final` means that no more text comes."""
        end = min(at + most, len(text))
        if not final and len(text) < at + most and self._begun.match(text, at, end):
            return PENDING
        found = self._whole.match(text, at, end)
        return None if found is None else Match(found.end(), found.groupdict())


def literal(
    text: str, *, at_start: bool = False, behind_call: bool = False, ahead: tuple[str, ...] = ()
) -> Delimiter:
    """Return the delimiter of a literal text. Raises ValueError for an empty one."""
    if not text:
        raise ValueError("a delimiter is empty")
    return Delimiter((Text(text),), at_start, behind_call, ahead)


# The begin or end of a group, an optional text, or one character or set with its count.
_TOKEN = re.compile(
    r"(?P<mark>\(\?P<\w+>|\))|\(\?:(?P<optional>(?:\\\W|[^\\\[\]().*+?|])+)\)\?"
    r"|(?P<one>\\(?:[wdsWDSntr]|[^A-Za-z0-9])|\[\^?\]?(?:\\.|[^\]\\])*\]|[^|^$*+?{}()\[\\])"
    r"(?P<count>[*+]\??|\?)?",
    re.DOTALL,
)
_CONTROLS = {r"\n": "\n", r"\t": "\t", r"\r": "\r"}
_SET = re.compile(r"\.|\[.+|\\[wdsWDS]", re.DOTALL)


def pattern(source: str) -> Delimiter:
    """Compile a pattern. Raises ValueError if it cannot be matched from left to right. Blanks at
    its beginning are left out, as blanks around delimiters are ignored anyway."""
    pieces, at = list[Piece](), 0
    while at < len(source):
        token = _TOKEN.match(source, at)
        if token is None:
            raise ValueError(f"the pattern {source!r} has {source[at:][:9]!r}, which is not read")
        piece, at = _piece(token), token.end()
        last = pieces[-1] if pieces else None
        if _is_solid(piece) and _is_solid(last):
            pieces[-1] = Text(last.text + piece.text)
        elif last is not None or not _is_blanks(piece):
            pieces.append(piece)
    if not pieces or not _is_solid(pieces[0]):
        raise ValueError(f"the pattern {source!r} does not begin with a literal")
    return Delimiter(
        tuple(_checked(piece, pieces[i:], source) for i, piece in enumerate(pieces, 1))
    )


def _piece(token: re.Match[str]) -> Piece:
    one, count = token["one"], token["count"] or ""
    if token["mark"] is not None:
        return Mark(token["mark"])
    if one is None:
        return Text(re.sub(r"\\(\W)", r"\1", token["optional"]), optional=True)
    if count in ("", "?") and not _SET.fullmatch(one):
        return Text(_CONTROLS.get(one, one[-1:]), optional=bool(count))
    least = int(count[:1] not in ("*", "?"))
    return Run(one, least, single=count in ("", "?"), stop=_LAZY if count[1:] else "")


# The end of a lazy run, before the pieces behind it are known.
_LAZY = "?"


def _checked(piece: Piece, rest: Sequence[Piece], source: str) -> Piece:
    """Return a piece, a lazy run with its end. Raises ValueError for a run without an end."""
    behind = [one for one in rest if not isinstance(one, Mark)]
    after = behind[0] if behind else None
    if not isinstance(piece, Run):
        return piece
    if piece.stop:
        ends = behind[:2] if isinstance(after, Text) and after.optional else behind[:1]
        if not ends or not _is_solid(ends[-1]):
            raise ValueError(f"the pattern {source!r} has a lazy run without an end")
        return replace(piece, stop="".join(one.whole("") for one in ends))
    if not piece.single and isinstance(after, Text) and piece.takes(after.text[0]):
        raise ValueError(f"the pattern {source!r} would have to go back")
    return piece


def _is_solid(piece: Piece | None) -> TypeGuard[Text]:
    return isinstance(piece, Text) and not piece.optional


def _is_blanks(piece: Piece) -> bool:
    """Return whether the piece matches any number of blanks, and only blanks."""
    if not isinstance(piece, Run) or piece.least:
        return False
    return piece.takes(" ") and not piece.takes("x") and not piece.takes("<")


Kind: TypeAlias = Literal["text", "reasoning", "calls", "hidden", "other"]


@dataclass(frozen=True, slots=True)
class Field:
    """A field of the output.

    If one delimiter opens several fields, `when` decides by its groups. A field ends at one of
    `closes`, at the end of the text, or with `gives_way` where another field opens. With `keeps`,
    the opening delimiter is part of the field's text, and only an offered tool can be called. A
    field of the kind "other" is shown as it was written; a hidden one is not shown.

    For calls, `read` parses the text, and `mend` corrects a text that ended but is not a valid
    call. `goes_on` returns for a text whether a delimiter after it is part of a value. A `balanced`
    field ends with the JSON value in it. With `head`, the arguments of calls are reported while
    they are written.
    """

    kind: Kind
    opens: tuple[Delimiter, ...]
    closes: tuple[Delimiter, ...] = ()
    when: Callable[[Mapping[str, str]], bool] | None = None
    gives_way: bool = False
    keeps: bool = False
    strip: bool = True
    read: ReadCalls | None = None
    head: ReadHead | None = None
    mend: Callable[[str], str] | None = None
    goes_on: Callable[[str], bool] | None = None
    balanced: bool = False

    @property
    def interrupts(self) -> bool:
        """True if the field may open inside thoughts; not for calls without delimiters."""
        return self.kind == "calls" and not self.keeps


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """The fields of a model's output. `drops` are delimiters that are left out everywhere. With
    `shows_special`, delimiters are special tokens, so the parser needs text that contains these.
    `anchors` are texts with which an assistant's turn begins in a prompt. `name` identifies the
    format in notes and grammars."""

    name: str
    fields: tuple[Field, ...]
    drops: tuple[Delimiter, ...] = ()
    shows_special: bool = False
    anchors: tuple[str, ...] = ()

    @property
    def has_calls(self) -> bool:
        return any(one.kind == "calls" for one in self.fields)

    def needs_special(self, tools: Sequence[object]) -> bool:
        """Return whether the parser needs special tokens in the text of a request with `tools`."""
        return self.shows_special and (
            bool(tools) or any(one.kind != "calls" for one in self.fields)
        )

    def without_calls(self) -> OutputFormat:
        """Return the format without calls, for requests that offer no tools."""
        return replace(self, fields=tuple(one for one in self.fields if one.kind != "calls"))

    def at_start(self) -> OutputFormat:
        """Return the format that recognises thoughts and calls only before any text."""
        fields = [
            replace(one, opens=tuple(replace(begin, at_start=True) for begin in one.opens))
            for one in self.fields
        ]
        return replace(self, fields=tuple(fields), drops=())

    def begun(self, prompt: PromptEnd | str) -> Field | None:
        """Return the field that the end of `prompt` has opened, by its template or by a message
        that is continued. A string is a prompt without turns."""
        text, turn = (prompt, len(prompt)) if isinstance(prompt, str) else prompt
        at = max((text.rfind(anchor) + len(anchor) for anchor in self._found(text)), default=0)
        end = PromptEnd(text[at:], max(0, turn - at))
        for found in self.fields:
            ends = [one.first for one in found.closes if one.first]
            if found.kind != "calls" and any(
                len(one.pieces) == 1 and end.is_open(one.first, ends, anywhere=not one.at_start)
                for one in found.opens
            ):
                return found
        return None

    def _found(self, prompt: str) -> Sequence[str]:
        return [anchor for anchor in self.anchors if anchor in prompt]
