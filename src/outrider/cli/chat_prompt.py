"""The prompt of `outrider generate`: the text as it is, or as a user message in the chat template.

An instruct model was trained on its chat template; without it, its text is seldom useful. A model
counts as an instruct model if one of its stop tokens is the end of a turn, or by its name.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from outrider.cli.output import say
from outrider.core.errors import ConfigError

if TYPE_CHECKING:
    from outrider.api.llm import LLM
    from outrider.cli.run_options import GenerateOptions

_NAMED = re.compile(r"instruct|chat|assistant|(?<![a-z])it(?![a-z])", re.IGNORECASE)


def given_prompt(
    llm: LLM, text: str, options: GenerateOptions, target: str
) -> tuple[str | Sequence[int], bool]:
    """Return the prompt, and whether it is a message; if that was decided here, a note says so.
    Raises ConfigError for --chat with --raw, CheckpointError if --chat finds no template."""
    if options.chat and options.raw:
        raise ConfigError("--chat and --raw exclude each other.", hint="drop one")
    if options.raw or not (options.chat or is_instruct(llm, target)):
        return text, False
    prompt = llm.encode_chat(text)
    if not options.chat:
        say(
            "note: an instruct model: the prompt is a message, by its chat template; --raw gives "
            "the text alone, and --chat leaves out this note"
        )
    return prompt, True


def is_instruct(llm: LLM, target: str) -> bool:
    from outrider.models.gguf.ends import TURN_ENDS

    if not llm.tokenizer.has_chat_template:
        return False
    ends = {llm.tokenizer.decode([token_id], skip_special=False) for token_id in llm.stop_ids}
    if ends.intersection(TURN_ENDS):
        return True
    folder = llm.folder
    if folder.parent.name == "snapshots":
        # In the hub's cache a folder is named by a commit, two below the model's own.
        folder = folder.parent.parent
    return any(_NAMED.search(name) for name in (Path(target).name, folder.name))
