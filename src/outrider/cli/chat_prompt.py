"""What `outrider generate` gives the model: the prompt as it is, or as a message of the user's.

An instruct model was trained on its chat template, and what it makes of a bare text is seldom what
was wanted. It is known by a token that ends a turn among those that end its texts, or by its name.
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
    """The prompt, and whether it is a message; a note says so where nobody asked. Raises
    ConfigError for two wishes, CheckpointError where there is no template to use."""
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
