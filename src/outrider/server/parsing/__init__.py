"""What a model writes, told apart: text, reasoning and calls of tools; and grammars of calls.

`parser_for` makes the parser of one answer. It follows the checkpoint's `response_template`
(template.py) or the table of families (families.py); parser.py reads, whatever the pieces.
"""

from outrider.server.parsing.formats import calls_grammar, format_of, parser_for, shows_special

__all__ = ["calls_grammar", "format_of", "parser_for", "shows_special"]
