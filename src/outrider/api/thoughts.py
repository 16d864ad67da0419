"""Thinking budget of a request, in the tokens of its model."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from outrider.api.chat_messages import PromptEnd, Thinking
from outrider.api.tokenizer import Tokenizer
from outrider.core.errors import CheckpointError
from outrider.core.logits import TokenConstraint
from outrider.core.thoughts import ThoughtBudget, ThoughtTags


class Thoughts:
    """Thoughts of one model's texts; its tokens are those below `vocab_size`."""

    def __init__(self, thinking: Thinking, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._thinking, self._tokenizer, self._vocab_size = thinking, tokenizer, vocab_size
        begin, end = thinking.begin.encode(), thinking.end.encode()
        self._tags = ThoughtTags(begin, (end,), thinking.anywhere)
        self._pieces = dict[int, bytes]()

    def of(
        self, prompt: Sequence[int], limit: int | None, inner: TokenConstraint | None
    ) -> ThoughtBudget:
        """The budget of an answer to `prompt`. Raises CheckpointError for a `limit` if the
        tokenizer cannot write the end of thoughts."""
        known = self._thinking
        end = PromptEnd.of(self._tokenizer, prompt)
        return ThoughtBudget(
            self._tags,
            self._piece,
            begun=end.is_open(known.begin, (known.end,), anywhere=known.anywhere),
            limit=limit,
            closing=() if limit is None else self._closing(),
            inner=inner,
        )

    def _closing(self) -> Sequence[int]:
        """The tokens that end thoughts, as they are after other text."""
        encode = partial(self._tokenizer.encode, add_special=False)
        before, ids = encode("a"), encode(f"a{self._thinking.closing}")
        same = ids[: len(before)] == before
        ids = ids[len(before) :] if same else encode(self._thinking.closing)
        written = b"".join(map(self._piece, ids))
        if max(ids, default=0) >= self._vocab_size or self._tags.ends[0] not in written:
            raise CheckpointError(
                f"thinking_budget: the tokenizer cannot write {self._thinking.end!r}, which ends "
                "this model's thoughts.",
                hint="leave thinking_budget out",
            )
        return ids

    def _piece(self, token: int) -> bytes:
        if token not in self._pieces:
            found = self._tokenizer.token_bytes(token)
            if found is None:
                found = self._tokenizer.decode([token], skip_special=False).encode()
            self._pieces[token] = found
        return self._pieces[token]
