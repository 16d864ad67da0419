"""Tokens that end a text or a turn, recognised by their text as in llama.cpp, whatever their kind.

Metadata often name only one of several ends: Qwen's files name `<|im_end|>` but not
`<|endoftext|>`, and fine-tunes have ends that their maker did not mark as control tokens.
"""

from __future__ import annotations

from collections.abc import Collection

TURN_ENDS = (
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<end_of_turn>",
    "<|eom_id|>",
    "<|return|>",
    "<turn|>",
    "<end_of_utterance>",
)
_OTHER_ENDS = (
    "<|call|>",
    "<|calls|>",
    "<|flush|>",
    "<|tool_response>",
    "<|endoftext|>",
    "<|end_of_text|>",
    # DeepSeek's, with full-width bars.
    "<\uff5cend▁of▁sentence\uff5c>",
    "<EOT>",
    "_<EOT>",
    "[EOT]",
    "[EOS]",
    "<eos>",
    "[e~[",
)
# Tokens between files of code, by the metadata key that may name one; of its texts, the first that
# the vocabulary has is used.
BETWEEN_FILES = {
    "fim_pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep": ("<|file_sep|>",),
}
_MESSAGES = ({"<|return|>", "<|call|>"}, {"<|call|>", "<|flush|>"}, {"<|calls|>", "<|flush|>"})


def ends_among(vocabulary: Collection[str]) -> list[str]:
    """The ends that a vocabulary has, except `</s>`, which may be HTML."""
    between = (
        next((text for text in texts if text in vocabulary), "") for texts in BETWEEN_FILES.values()
    )
    return [text for text in (*TURN_ENDS, *_OTHER_ENDS, *between) if text in vocabulary]


def has_messages(vocabulary: Collection[str]) -> bool:
    """True if `<|end|>` only closes a message within a turn, before the answer (harmony)."""
    if "<|end|>" not in vocabulary:
        return False
    return any(all(text in vocabulary for text in texts) for texts in _MESSAGES)
