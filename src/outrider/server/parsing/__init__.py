"""Parsers that separate a model's output into text, reasoning and tool calls; grammars of answers.

`parser_for` (families.py) makes the parser of one answer, in the format of the checkpoint's own
`response_template` or of its family; parser.py has the streaming parser itself.
"""

from outrider.server.parsing.families import format_of, parser_for
from outrider.server.parsing.grammar import answer_grammar, form_of, offered_tool

__all__ = ["answer_grammar", "form_of", "format_of", "offered_tool", "parser_for"]
