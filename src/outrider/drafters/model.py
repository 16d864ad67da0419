"""Draft model: a smaller model drafts a chain, or a tree, one pass a token or level for the batch.

Tokens that were fed since the last commit (the pending token and the draft) stay staged in the
draft model's KV cache until the next proposal. Then the tokens that became text are committed and
the rest is dead space: no kept token is fed twice, and a round that asks for no draft needs no
message. Nodes of a tree's last level are never fed, since nothing is drafted after them.

Shapes:  V = vocabulary, M = rows that draft at this depth or logits rows of a pass, N = nodes of a
         chain.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from outrider.core.draft import Draft, common_prefix
from outrider.core.protocols import CausalLM, DraftNeeds, DraftRow, StepRow
from outrider.core.rng import DrawNode, pick_node
from outrider.core.sampling import PLAIN, Sampling
from outrider.core.tree import ROOT, Chances
from outrider.drafters.growth import (
    ChainBuilder,
    ChangeLaws,
    DrawInTree,
    GreedyTree,
    GrowingTree,
    Growth,
    SettledTree,
    chosen_draft,
    pick_in_tree,
    settled_shape,
)
from outrider.drafters.native import ModelTrees

# The pending token, and the last of a draft that was kept whole: it was never fed.
LEAST_SHARE = 2


class ModelDrafter:
    """Drafts with `model`; feeds at most `chunk` tokens of a prompt in one pass.

    `draw` takes each token from its law at temperature > 0, which `sampling` makes and `change`, if
    given, changes.
    """

    name = "model"
    needs = DraftNeeds()

    def __init__(
        self,
        model: CausalLM,
        argmax: Callable[[Tensor], list[int]],
        *,
        chunk: int,
        draw: DrawNode = pick_node,
        sampling: Sampling = PLAIN,
        change: ChangeLaws | None = None,
    ) -> None:
        self._model = model
        self._growth = Growth(argmax, "the draft model", draw, sampling, change)
        self._chunk = chunk
        self._staged: dict[int, list[int]] = {}

    def open(self, seq_id: int, prompt: Sequence[int]) -> None:
        self._model.state.open(seq_id, prompt[:-1])
        self._staged[seq_id] = []

    def propose(self, rows: Sequence[DraftRow]) -> list[Draft]:
        chains = [ChainBuilder(row, row.budget.depth) for row in rows]
        live = [chain for chain in chains if not chain.complete]
        if not live:
            return [chain.draft() for chain in chains]
        logits_MV = self._read([chain.row for chain in live])
        while True:
            self._growth.extend(live, logits_MV)
            live = [chain for chain in live if not chain.complete]
            if not live:
                break
            logits_MV = self._extend(live)
        # The last token of a chain is never fed: nothing is drafted after it.
        return [chain.draft() for chain in chains]

    def close(self, seq_id: int) -> None:
        self._model.state.close(seq_id)
        del self._staged[seq_id]

    def share(self, num_rows: int) -> int:
        """Unread tokens of each of so many rows that one pass takes."""
        return max(self._chunk // num_rows, LEAST_SHARE)

    def begin(
        self, seq_id: int, tokens: Sequence[int], *, most: int = LEAST_SHARE
    ) -> Sequence[int]:
        """Commit what was rightly drafted of the text `tokens`. If more than `most` of it are left
        to read, read all but the last; what is left to read then is returned. For a round that runs
        the model by itself."""
        state = self._model.state
        length = state.length(seq_id)
        kept = common_prefix(self._staged[seq_id], tokens[length:-1])
        state.commit({seq_id: range(kept)})
        self._staged[seq_id] = []
        start, end = length + kept, len(tokens) - 1
        if end - start >= most:
            for at in range(start, end, self._chunk):
                self._feed(seq_id, tokens[at : min(at + self._chunk, end)])
            start = end
        return tokens[start:]

    def note(self, seq_id: int, fed: Sequence[int]) -> None:
        """Say that the model has `fed`, a chain, staged: the end of the text and a draft."""
        self._staged[seq_id] = list(fed)

    def _read(self, rows: Sequence[DraftRow]) -> Tensor:
        """Read up to each row's last token, which stays staged; the logits that follow it."""
        most = self.share(len(rows))
        texts = [self.begin(row.seq_id, row.tokens, most=most) for row in rows]
        feeds = [StepRow.chain(row.seq_id, text) for row, text in zip(rows, texts, strict=True)]
        feeds = [replace(feed, logits_from=len(feed.tokens) - 1) for feed in feeds]
        logits_MV = self._model.step(feeds, self.needs).logits_MV
        for feed in feeds:
            self.note(feed.seq_id, feed.tokens)
        return logits_MV

    def _feed(self, seq_id: int, tokens: Sequence[int]) -> None:
        self._model.step([StepRow.chain(seq_id, tokens, logits_from=len(tokens))], self.needs)
        self._model.state.commit({seq_id: range(len(tokens))})

    def _extend(self, chains: Sequence[ChainBuilder]) -> Tensor:
        """Stage each chain's newest token below the one before; the logits that follow it."""
        state = self._model.state
        feeds = [
            StepRow.chain(
                chain.row.seq_id,
                chain.tokens[-1:],
                parent=state.num_staged(chain.row.seq_id) - 1,
            )
            for chain in chains
        ]
        logits_MV = self._model.step(feeds, self.needs).logits_MV
        for feed in feeds:
            self._staged[feed.seq_id] += feed.tokens
        return logits_MV


_NO_NEEDS = DraftNeeds()


@dataclass(slots=True)
class _Staged:
    """What was fed of one sequence since the last commit."""

    tokens: list[int] = field(default_factory=list[int])
    parents: list[int] = field(default_factory=list[int])

    def along(self, text: Sequence[int]) -> list[int]:
        """The staged nodes that `text` runs through."""
        path: list[int] = []
        last = ROOT
        for token in text:
            found = self._child(last, token)
            if found is None:
                break
            path.append(found)
            last = found
        return path

    def _child(self, parent: int, token: int) -> int | None:
        for node in range(parent + 1, len(self.tokens)):
            if self.parents[node] == parent and self.tokens[node] == token:
                return node
        return None


class ModelTreeDrafter:
    """Drafts with `model`; feeds at most `chunk` tokens of a prompt in one pass. `draw` takes nodes
    from laws at temperature > 0, which `sampling` makes; `chances` shape those trees. With `whole`,
    trees are drafted at once where that can be."""

    name = "model"
    needs = _NO_NEEDS

    def __init__(
        self,
        model: CausalLM,
        *,
        chunk: int,
        draw: DrawInTree = pick_in_tree,
        sampling: Sampling = PLAIN,
        chances: Chances = (),
        whole: ModelTrees | None = None,
    ) -> None:
        self._model, self._chunk = model, chunk
        self._draw, self._sampling, self._chances = draw, sampling, chances
        self._whole = whole
        self._staged: dict[int, _Staged] = {}

    def open(self, seq_id: int, prompt: Sequence[int]) -> None:
        self._model.state.open(seq_id, prompt[:-1])
        self._staged[seq_id] = _Staged()

    def close(self, seq_id: int) -> None:
        self._model.state.close(seq_id)
        del self._staged[seq_id]

    def propose(self, rows: Sequence[DraftRow]) -> list[Draft]:
        asked = {index: row for index, row in enumerate(rows) if row.budget.depth}
        if not asked:
            return [Draft.empty()] * len(rows)
        made = dict(zip(asked, self._drafts(list(asked.values())), strict=True))
        return [made.get(index, Draft.empty()) for index in range(len(rows))]

    def _drafts(self, rows: Sequence[DraftRow]) -> list[Draft]:
        feeds = [self._unread(row) for row in rows]
        grown = None
        if self._whole is not None:
            grown = self._whole.grow(rows, [feed.tokens for feed in feeds])
        if grown is None:
            trees = [self._tree(row) for row in rows]
            self._grow(trees, feeds)
            return [tree.draft() for tree in trees]
        for row, one in zip(rows, grown, strict=True):
            self._staged[row.seq_id] = _Staged(list(one.tokens), list(one.parents))
        return [chosen_draft(one.kept) for one in grown]

    def _tree(self, row: DraftRow) -> GrowingTree:
        if row.params.greedy:
            return GreedyTree(row, "the draft model", self._sampling)
        shape = settled_shape(row, self._chances)
        return SettledTree(row, shape, draw=self._draw, sampling=self._sampling)

    def _grow(self, trees: Sequence[GrowingTree], feeds: Sequence[StepRow]) -> None:
        live = list(trees)
        while live:
            # Where the rows that are told about will be staged: of the first, the pending token.
            starts = [len(self._staged[feed.seq_id].tokens) + feed.logits_from for feed in feeds]
            self._step(live, feeds)
            grown = [
                (tree, start) for tree, start in zip(live, starts, strict=True) if tree.level.tokens
            ]
            live = [tree for tree, _ in grown]
            feeds = [_below(tree, start) for tree, start in grown]

    def _step(self, trees: Sequence[GrowingTree], feeds: Sequence[StepRow]) -> None:
        logits_MV = self._model.step(feeds, self.needs).logits_MV
        start = 0
        for tree, feed in zip(trees, feeds, strict=True):
            staged = self._staged[feed.seq_id]
            staged.tokens += feed.tokens
            staged.parents += feed.parents
            end = start + feed.num_logits
            tree.grow(logits_MV[start:end])
            start = end

    def _unread(self, row: DraftRow) -> StepRow:
        """Commit what was rightly drafted, read all but a token or two of the rest; what is left
        to read, up to the pending token, after which logits are wanted."""
        state = self._model.state
        length = state.length(row.seq_id)
        path = self._staged[row.seq_id].along(row.tokens[length:-1])
        state.commit({row.seq_id: path})
        self._staged[row.seq_id] = _Staged()
        start, last = length + len(path), len(row.tokens) - 1
        if last - start > 1:
            for at in range(start, last, self._chunk):
                self._read(row.seq_id, row.tokens[at : min(at + self._chunk, last)])
            start = last
        unread = row.tokens[start:]
        return StepRow.chain(row.seq_id, unread, logits_from=len(unread) - 1)

    def _read(self, seq_id: int, tokens: Sequence[int]) -> None:
        self._model.step([StepRow.chain(seq_id, tokens, logits_from=len(tokens))], self.needs)
        self._model.state.commit({seq_id: range(len(tokens))})


def _below(tree: GrowingTree, start: int) -> StepRow:
    """The tree's next level, below the one that is staged from `start` on."""
    level = tree.level
    return StepRow(
        tree.row.seq_id, tuple(level.tokens), tuple(start + place for place in level.above)
    )
