"""A model among ranks: the same logits and memory as in one process, with one sum a block."""

from __future__ import annotations

import re
import signal
import threading
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from checks.state import Rollback, check_rollback
from doubles.kinds import close_to, stored
from doubles.thread_ranks import ThreadRanks, sharded, share_out
from outrider.core.errors import CapacityError, ConfigError
from outrider.core.protocols import DraftNeeds, StepOutput, StepRow
from outrider.core.tree import ROOT
from outrider.models.decoder import Room
from outrider.models.families import LlamaConfig
from outrider.models.loading import LoadOptions, load_model, refuse_split
from outrider.models.parallel.comm import Alone, RankError
from outrider.models.parallel.shard import Share, check_split
from outrider.models.parallel.sharded import MirroredKV

OPTIONS = LoadOptions(room=Room(num_slots=256, page_size=4), device="cpu")
TEXT = (1, 4, 2, 2, 0, 3, 1, 77, 95, 30)
NEEDS = DraftNeeds()
# Every way in which a layer is cut: multi-head, grouped, biases on both sides, norms of heads,
# fused tensors that turn in part, a head of its own and a tied one.
CUTS = [
    ("llama2", 2),
    ("llama2", 4),
    ("wide_heads", 2),
    ("attention_bias", 2),
    ("mlp_bias", 2),
    ("tied", 4),
    ("sharded", 2),
    ("qwen2", 2),
    ("qwen3_tied", 2),
    ("phi3_partial", 2),
]


@pytest.mark.parametrize(("name", "size"), CUTS)
def test_logits_and_hidden_states_equal_those_of_one_process(name: str, size: int) -> None:
    whole = load_model(stored(name, 0), OPTIONS)
    split, _, meeting = share_out(name, size, OPTIONS)
    needs = DraftNeeds(hidden_layers=(0, 1, 2))
    outputs: list[StepOutput] = []
    for model in (whole, split):
        model.state.open(3, ())
        outputs.append(model.step([StepRow.chain(3, TEXT, logits_from=2)], needs))
    wanted, got = outputs
    close_to(got.logits_MV, wanted.logits_MV)
    assert got.hidden_NKD is not None
    assert wanted.hidden_NKD is not None
    close_to(got.hidden_NKD, wanted.hidden_NKD)
    assert meeting.num_sums == 2 * whole.spec.num_layers
    assert split.spec == whole.spec


@pytest.mark.parametrize("force_reference", [False, True])
def test_with_two_ranks_a_rows_bits_do_not_depend_on_its_batch(force_reference: bool) -> None:
    options = LoadOptions(room=OPTIONS.room, device="cpu", force_reference=force_reference)
    split, _, _ = share_out("qwen2", 2, options)
    assert split.kernels.exact
    for seq_id in range(3):
        split.state.open(seq_id, ())
    tree = StepRow(1, (5, 6, 7), (ROOT, ROOT, 0))
    rows = [StepRow.chain(0, TEXT), tree, StepRow.chain(2, TEXT[:3])]
    together_MV = split.step(rows, NEEDS).logits_MV.clone()
    split.state.commit({0: (), 1: (), 2: ()})
    alone = [split.step([row], NEEDS).logits_MV.clone() for row in rows]
    assert torch.equal(together_MV, torch.cat(alone))


def test_more_ranks_do_not_promise_exactness() -> None:
    split, _, _ = share_out("llama2", 4, OPTIONS)
    assert not split.kernels.exact


def test_a_lane_of_its_own_has_logits_of_its_own() -> None:
    """Passes take turns; what one returned stays while another runs."""
    split, ranks, _ = share_out("llama2", 2, OPTIONS)
    other = split.twin()
    assert other is not None
    split.state.open(0, ())
    other.state.open(1, ())
    assert split.state.length(1) == 0
    first_MV = split.step([StepRow.chain(0, TEXT)], NEEDS).logits_MV
    before_MV = first_MV.clone()
    second_MV = other.step([StepRow.chain(1, TEXT[::-1])], NEEDS).logits_MV
    assert torch.equal(first_MV, before_MV)
    assert not torch.equal(first_MV, second_MV)
    assert other.kernels is not split.kernels
    assert other.kernels.argmax(first_MV) == split.kernels.argmax(first_MV)
    ranks.lose("rank 1 ended")
    with pytest.raises(RankError):
        other.state.open(2, ())


class SplitRollback(Rollback):
    kind = staticmethod(sharded("qwen2", 2))


@pytest.mark.slow
def test_memory_of_all_ranks_takes_part_in_rollback() -> None:
    check_rollback(SplitRollback, percent=5)


def test_every_rank_keeps_the_same_pages() -> None:
    split, ranks, _ = share_out("llama2", 2, OPTIONS)
    split.state.open(0, ())
    split.step([StepRow.chain(0, TEXT)], NEEDS)
    split.state.commit({0: range(8)})
    assert split.state.open(1, TEXT[:8]) == 8
    split.state.fork(0, 2)
    split.state.fork(0, 4, 5)
    split.state.reserve({1: 9, 2: 1})
    split.step([StepRow(2, (9, 8, 7), (ROOT, ROOT, 1)), StepRow.chain(1, (3,))], NEEDS)
    assert split.state.commit({2: (1, 2), 1: ()}) == 2
    split.state.close(0)
    (follower,) = ranks.models
    # A pass is a meeting: what was told before it has been done.
    split.step([StepRow.chain(4, (1,))], NEEDS)
    for seq_id in (1, 2, 4):
        assert follower.state.length(seq_id) == split.state.length(seq_id)
        assert follower.state.num_staged(seq_id) == split.state.num_staged(seq_id)
    assert follower.state.num_free_tokens == split.state.num_free_tokens


def test_what_does_not_fit_is_refused_before_anybody_is_told() -> None:
    split, ranks, _ = share_out("llama2", 2, OPTIONS)
    split.state.open(0, ())
    num_told = len(ranks.told)
    with pytest.raises(CapacityError):
        split.step([StepRow.chain(0, (1,) * 300)], NEEDS)
    with pytest.raises(CapacityError):
        split.state.reserve({0: 300})
    assert len(ranks.told) == num_told
    split.step([StepRow.chain(0, TEXT)], NEEDS)


def test_after_a_loss_nothing_opens_but_memory_can_be_given_back() -> None:
    split, ranks, _ = share_out("llama2", 2, OPTIONS)
    split.state.open(0, ())
    num_free = split.state.num_free_tokens
    split.step([StepRow.chain(0, TEXT)], NEEDS)
    ranks.lose("rank 1 ended")
    with pytest.raises(RankError, match="rank 1 ended"):
        split.step([StepRow.chain(0, TEXT)], NEEDS)
    with pytest.raises(RankError, match="rank 1 ended"):
        split.state.open(1, ())
    split.state.commit({0: ()})
    split.state.close(0)
    assert split.state.num_free_tokens == num_free


@given(total=st.integers(0, 300), size=st.integers(1, 9))
def test_shares_are_a_partition(total: int, size: int) -> None:
    everything = range(total)
    parts = [everything[Share(rank, size).cut(total)] for rank in range(size)]
    assert [number for part in parts for number in part] == list(everything)
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@pytest.mark.parametrize(
    ("name", "size", "reason", "hint"),
    [
        ("qwen2", 4, "2 key/value heads, which 4 ranks", "takes 2$"),
        ("llama2", 3, "4 key/value heads", "takes 2, 4$"),
        ("one_kv_head", 2, "1 key/value heads", "leave it at 1"),
        ("gpt2", 2, "type gpt2 run in one process only", "llama, mistral, qwen2, qwen3, phi3"),
    ],
)
def test_what_cannot_be_shared_out_is_refused(name: str, size: int, reason: str, hint: str) -> None:
    with pytest.raises(ConfigError, match=f"tensor_parallel={size}: .*{reason}") as caught:
        refuse_split(stored(name, 0), OPTIONS, size)
    assert caught.value.hint is not None
    assert re.search(hint, caught.value.hint)


def test_ranks_need_equal_parts_of_the_ffn() -> None:
    config = LlamaConfig(
        family="llama",
        vocab_size=96,
        hidden_size=64,
        ffn_size=97,
        num_layers=2,
        num_heads=4,
        num_kv_heads=4,
        head_dim=16,
        max_tokens=256,
    )
    with pytest.raises(ConfigError, match="97 features of the FFN"):
        check_split(config, 2)


def test_quantised_weights_are_refused() -> None:
    options = LoadOptions(room=OPTIONS.room, device="cpu", quantise="int8")
    with pytest.raises(ConfigError, match="quantised weights are not shared out"):
        refuse_split(stored("llama2", 0), options, 2)


def test_a_model_alone_adds_nothing() -> None:
    alone, ones_3 = Alone(), torch.ones(3)
    alone.all_reduce_(ones_3)
    alone.barrier()
    assert torch.equal(ones_3, torch.ones(3))
    with pytest.raises(AssertionError):
        alone.send(ones_3, 1)
    with pytest.raises(AssertionError):
        alone.recv_(ones_3, 1)


def test_an_interrupted_caller_leaves_a_call_that_ends() -> None:
    """Cut in half, a call would leave the ranks waiting for each other."""
    store = MirroredKV(load_model(stored("llama2", 0), OPTIONS).state, ThreadRanks([]))
    done: list[int] = []

    def act() -> None:
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        time.sleep(0.05)
        done.append(1)

    with pytest.raises(KeyboardInterrupt):
        store.in_turn(act)
    assert store.in_turn(done.copy) == [1]
