"""Parsers that separate a model's output into text, reasoning and tool calls; grammars of answers.

`parser_for` (formats.py) makes the parser of one answer, in the format of the checkpoint's own
`response_template` or of its family; parser.py has the streaming parser itself, and
reading.py what the server asks for.
"""
