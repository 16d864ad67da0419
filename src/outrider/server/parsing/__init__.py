"""Parsers that separate a model's output into text, reasoning and tool calls; grammars of answers.

`parser_for` makes the parser of one answer. It follows the checkpoint's `response_template`
(grammar.py) or the table of families (families.py). parser.py has the streaming parser itself.
"""

from outrider.server.parsing.formats import format_of, grammar_for, parser_for, shows_special
from outrider.server.parsing.grammar import form_of, offered_tool

__all__ = ["form_of", "format_of", "grammar_for", "offered_tool", "parser_for", "shows_special"]
