"""What a model's output is made of: fields between delimiters, and text around them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from outrider.server.parsing.calls import ReadCalls
from outrider.server.parsing.delimiter import Delimiter

Kind: TypeAlias = Literal["text", "reasoning", "calls", "other"]


@dataclass(frozen=True, slots=True)
class Field:
    """One kind of part. Where one delimiter opens several fields, `when` tells by its groups which.
    A field goes on to one of `closes`, to the end of the text, or with `gives_way` to where another
    field opens. `keeps` says that what opens it is part of its text. `read` makes calls of the text
    of a field of calls. A field of the kind "other" is shown as it was written."""

    kind: Kind
    opens: tuple[Delimiter, ...]
    closes: tuple[Delimiter, ...] = ()
    when: Callable[[Mapping[str, str]], bool] | None = None
    gives_way: bool = False
    keeps: bool = False
    strip: bool = True
    read: ReadCalls | None = None


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """The fields of a model's output, and delimiters that are left out wherever they stand.
    `shows_special`: its delimiters are special tokens, so the text must have these. `anchors` are
    what an assistant's turn begins with in a prompt. `name` is what notes and grammars call it."""

    name: str
    fields: tuple[Field, ...]
    drops: tuple[Delimiter, ...] = ()
    shows_special: bool = False
    anchors: tuple[str, ...] = ()

    @property
    def has_calls(self) -> bool:
        return any(field.kind == "calls" for field in self.fields)

    def without_calls(self) -> OutputFormat:
        """Where no tool was offered nothing is a call."""
        return replace(self, fields=tuple(one for one in self.fields if one.kind != "calls"))

    def at_start(self) -> OutputFormat:
        """Where nothing but thoughts and calls comes before a thought or a call."""
        fields = [
            replace(one, opens=tuple(replace(begin, at_start=True) for begin in one.opens))
            for one in self.fields
        ]
        return replace(self, fields=tuple(fields), drops=())

    def begun(self, prompt: str) -> Field | None:
        """The field that the end of `prompt`, a template's, has opened for the answer."""
        at = max((prompt.rfind(anchor) + len(anchor) for anchor in self._found(prompt)), default=0)
        end = prompt[at:].rstrip()
        for field in self.fields:
            if field.kind != "calls" and any(_ends_with(end, one) for one in field.opens):
                return field
        return None

    def _found(self, prompt: str) -> Sequence[str]:
        return [anchor for anchor in self.anchors if anchor in prompt]


def _ends_with(text: str, delimiter: Delimiter) -> bool:
    return len(delimiter.pieces) == 1 and text.endswith(delimiter.first)
