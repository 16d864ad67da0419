"""Rollback: any interleaving of staging and committing equals feeding only what was kept."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Protocol, runtime_checkable

from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from torch import Tensor

from checks.effort import examples
from doubles.kinds import Kind, close_to, llama, scripted
from doubles.tiny_attention import TinyAttentionLM
from doubles.toy_hybrid import ToyHybrid
from outrider.core.errors import CapacityError
from outrider.core.protocols import CausalLM, DraftNeeds, StepRow
from outrider.core.tree import ROOT

VOCAB = 5
NEEDS = DraftNeeds()
PROBE = 3


@runtime_checkable
class Checkable(Protocol):
    def check(self) -> None: ...


@cache
def _fresh(kind: Kind, vocab_size: int) -> CausalLM:
    return kind(vocab_size=vocab_size, num_slots=4096)


def fresh_logits(kind: Kind, text: Sequence[int], vocab_size: int = VOCAB) -> Tensor:
    """What a model that was fed `text` in one step, and nothing else, predicts after it."""
    model = _fresh(kind, vocab_size)
    if isinstance(model, TinyAttentionLM):
        return model.dense(text)[-1]
    model.state.open(0, ())
    row = StepRow.chain(0, text, logits_from=len(text) - 1)
    logits_V = model.step([row], NEEDS).logits_MV[0].clone()
    model.state.close(0)
    return logits_V


def path_to(parents: Sequence[int], node: int) -> list[int]:
    path: list[int] = []
    while node != ROOT:
        path.append(node)
        node = parents[node]
    return path[::-1]


class Rollback(RuleBasedStateMachine):
    """Several sequences that grow trees over several steps, commit, fork, close and open again.

    The model of the memory is three plain dictionaries. Every step's logits are compared with those
    of a fresh model fed only the tokens on the path, and so is a probe after every commit.
    """

    kind: Kind

    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[int, list[int]] = {}
        self.tokens: dict[int, list[int]] = {}
        self.parents: dict[int, list[int]] = {}
        self.next_id = 0

    def make(self, data: st.DataObject) -> CausalLM:
        return self.kind(vocab_size=VOCAB, num_slots=data.draw(st.integers(16, 64)))

    @initialize(data=st.data())
    def start(self, data: st.DataObject) -> None:
        self.model = self.make(data)
        self.begin(data)

    @precondition(lambda self: len(self.kept) < 3)
    @rule(data=st.data())
    def begin(self, data: st.DataObject) -> None:
        """Open a sequence on one of few prompts, so that beginnings are shared often."""
        length = data.draw(st.integers(0, 9))
        prompt = ([1, 2, 3, 1, 2, 4, 0, 1, 2] if data.draw(st.booleans()) else [1, 2, 0] * 3)[
            :length
        ]
        seq_id = self._new()
        reused = self.model.state.open(seq_id, self.announced(prompt))
        assert 0 <= reused <= len(prompt)
        self.kept[seq_id] = prompt[:reused]
        if prompt[reused:] and self._stage(data, {seq_id: prompt[reused:]}, chain=True):
            self._commit({seq_id: range(len(prompt) - reused)})

    def announced(self, prompt: list[int]) -> list[int]:
        """What `open` is told the sequence will read."""
        return prompt

    @rule(data=st.data(), chain=st.booleans())
    def grow(self, data: st.DataObject, chain: bool) -> None:
        """Stage nodes of one or more sequences in one pass, below any node staged before."""
        seqs = data.draw(st.lists(st.sampled_from(sorted(self.kept)), min_size=1, unique=True))
        tokens = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=4)
        self._stage(data, {seq_id: data.draw(tokens) for seq_id in seqs}, chain=chain)

    @rule(data=st.data())
    def keep(self, data: st.DataObject) -> None:
        """Commit a random path of one or more sequences; an empty one rolls back."""
        paths: dict[int, Sequence[int]] = {}
        for seq_id in data.draw(st.lists(st.sampled_from(sorted(self.kept)), unique=True)):
            leaf = data.draw(st.integers(ROOT, len(self.parents[seq_id]) - 1))
            paths[seq_id] = path_to(self.parents[seq_id], leaf)
        self._commit(paths)

    @precondition(lambda self: len(self.kept) < 3)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        """Of all that a sequence holds, or of a beginning of it."""
        source = data.draw(st.sampled_from(sorted(self.kept)))
        lengths = st.integers(0, len(self.kept[source]))
        length = data.draw(st.none() | lengths)
        free = self.model.state.num_free_tokens
        try:
            self.model.state.fork(source, self.next_id, length)
        except CapacityError:
            assert self.model.state.num_free_tokens == free
            return
        self.kept[self._new()] = self.kept[source][:length]

    @precondition(lambda self: len(self.kept) > 1)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        seq_id = data.draw(st.sampled_from(sorted(self.kept)))
        self.model.state.close(seq_id)
        for held in (self.kept, self.tokens, self.parents):
            del held[seq_id]

    @invariant()
    def memory_adds_up(self) -> None:
        state = self.model.state
        for seq_id, kept in self.kept.items():
            assert state.length(seq_id) == len(kept)
            assert state.num_staged(seq_id) == len(self.tokens[seq_id])
        check(state)

    @invariant()
    def same_as_never_having_speculated(self) -> None:
        for seq_id in self.kept:
            if not self.tokens[seq_id]:
                self._probe(seq_id)

    def poison(self, seq_ids: Sequence[int]) -> None:
        """Overwrite what nothing may read any more, after a commit of `seq_ids`."""

    def _new(self) -> int:
        seq_id, self.next_id = self.next_id, self.next_id + 1
        self.tokens[seq_id], self.parents[seq_id] = [], []
        return seq_id

    def _probe(self, seq_id: int) -> None:
        try:
            out = self.model.step([StepRow.chain(seq_id, [PROBE])], NEEDS)
        except CapacityError:
            return
        got = out.logits_MV[0].clone()
        self.model.state.commit({seq_id: ()})
        self.poison([seq_id])
        close_to(got, fresh_logits(self.kind, [*self.kept[seq_id], PROBE]))

    def _stage(self, data: st.DataObject, added: dict[int, list[int]], *, chain: bool) -> bool:
        """Feed tokens in one pass; False if the arena was full, and then nothing has changed."""
        rows: list[StepRow] = []
        for seq_id, tokens in added.items():
            first = len(self.tokens[seq_id])
            ends = range(first, first + len(tokens))
            parents = [n - 1 if chain else data.draw(st.integers(ROOT, n - 1)) for n in ends]
            logits_from = data.draw(st.integers(0, len(tokens)))
            rows.append(StepRow(seq_id, tuple(tokens), tuple(parents), logits_from))
        free = self.model.state.num_free_tokens
        try:
            logits_MV = self.model.step(rows, NEEDS).logits_MV
        except CapacityError:
            assert self.model.state.num_free_tokens == free
            return False
        assert logits_MV.shape[0] == sum(row.num_logits for row in rows)
        for row in rows:
            self.tokens[row.seq_id] += row.tokens
            self.parents[row.seq_id] += row.parents
        self._compare(rows, logits_MV)
        return True

    def _compare(self, rows: Sequence[StepRow], logits_MV: Tensor) -> None:
        for row in rows:
            first = len(self.tokens[row.seq_id]) - row.num_logits
            for node, got in enumerate(logits_MV[: row.num_logits], start=first):
                path = path_to(self.parents[row.seq_id], node)
                text = [self.tokens[row.seq_id][n] for n in path]
                close_to(got, fresh_logits(self.kind, [*self.kept[row.seq_id], *text]))
            logits_MV = logits_MV[row.num_logits :]

    def _commit(self, paths: dict[int, Sequence[int]]) -> None:
        num_copied = self.model.state.commit(paths)
        assert num_copied <= sum(map(len, paths.values()))
        if all(list(path) == list(range(len(path))) for path in paths.values()):
            assert num_copied == 0
        for seq_id, path in paths.items():
            self.kept[seq_id] += [self.tokens[seq_id][node] for node in path]
            self.tokens[seq_id], self.parents[seq_id] = [], []
        self.poison(list(paths))


class HybridRollback(Rollback):
    kind = ToyHybrid


class ScriptedRollback(Rollback):
    kind = staticmethod(scripted)


class LlamaRollback(Rollback):
    kind = staticmethod(llama)


class PagedRollback(Rollback):
    """Shared beginnings; rows that were staged and not kept are poisoned at once."""

    kind = TinyAttentionLM

    def make(self, data: st.DataObject) -> CausalLM:
        self.paged = TinyAttentionLM(
            vocab_size=VOCAB,
            page_size=data.draw(st.integers(1, 4)),
            num_slots=data.draw(st.integers(12, 48)),
        )
        return self.paged

    def poison(self, seq_ids: Sequence[int]) -> None:
        for seq_id in seq_ids:
            self.paged.poison_rejected(seq_id)


class PoisonedRollback(PagedRollback):
    """Nothing is shared by content, so the whole of the dead space is poisoned at every chance."""

    def announced(self, prompt: list[int]) -> list[int]:
        del prompt
        return []

    def poison(self, seq_ids: Sequence[int]) -> None:
        del seq_ids
        if not any(map(self.paged.state.num_staged, self.kept)):
            self.paged.poison_dead_space()


def check(store: object) -> None:
    """Ask a store that can for a check of its accounts."""
    if isinstance(store, Checkable):
        store.check()


def check_speculation_is_not_found() -> None:
    """What is staged never passes for a known beginning; what is committed does, at once."""
    model = TinyAttentionLM(page_size=2)
    model.state.open(0, ())
    model.step([StepRow.chain(0, [1, 2, 3, 4])], NEEDS)
    assert model.state.open(1, [1, 2, 3, 4]) == 0
    model.state.commit({0: range(2)})
    assert model.state.open(2, [1, 2, 3, 4]) == 2


def check_rollback(machine: type[Rollback], *, percent: int = 20) -> None:
    run_state_machine_as_test(
        machine,
        settings=settings(
            examples(percent),
            stateful_step_count=20,
            phases=[Phase.generate],
            report_multiple_bugs=False,
        ),
    )
