"""A model among ranks: the same logits and memory as in one process, with one sum a block."""

from __future__ import annotations

import re
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from checks.state import Rollback, check_rollback
from doubles.kinds import close_to, stored
from doubles.thread_ranks import (
    WAYS,
    Barrier,
    ThreadRanks,
    barrier_comms,
    sharded,
    share_out,
    shared_comms,
    socket_comms,
)
from outrider.core.errors import CapacityError, ConfigError
from outrider.core.protocols import DraftNeeds, StepOutput, StepRow
from outrider.core.tree import ROOT
from outrider.models.configs import LlamaConfig
from outrider.models.decoder import LoadOptions, ModelCapacity
from outrider.models.llama_weights import Alone, Comm, Share
from outrider.models.loading import load_model
from outrider.plugins.parallel import comm
from outrider.plugins.parallel.comm import RankError
from outrider.plugins.parallel.messages import RankCall
from outrider.plugins.parallel.sharded import Orders, check_split, refuse_split

OPTIONS = LoadOptions(capacity=ModelCapacity(num_slots=256, page_size=4), device="cpu")
TEXT = (1, 4, 2, 2, 0, 3, 1, 77, 95, 30)
NEEDS, HIDDEN = DraftNeeds(), DraftNeeds(hidden_layers=(1,))
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


every_way = pytest.mark.parametrize("way", WAYS)


@pytest.mark.parametrize(("name", "size"), CUTS)
def test_logits_and_hidden_states_equal_those_of_one_process(name: str, size: int) -> None:
    whole, meeting = load_model(stored(name, 0), OPTIONS), Barrier(size)
    split, _ = share_out(name, barrier_comms(size, meeting), OPTIONS)
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


@pytest.mark.parametrize(("name", "size"), CUTS)
def test_a_native_pass_has_the_bits_of_its_operators(name: str, size: int) -> None:
    """In each rank; also where rank 0 goes operator by operator and the others do not."""
    rows = [StepRow.chain(0, TEXT, logits_from=2), StepRow(1, (5, 6, 7), (ROOT, ROOT, 0))]
    outputs: list[Tensor] = []
    for way, needs in [(barrier_comms, NEEDS), (shared_comms, NEEDS), (shared_comms, HIDDEN)]:
        split, _ = share_out(name, way(size), OPTIONS)
        for seq_id in range(2):
            split.state.open(seq_id, ())
        outputs.append(split.step(rows, needs).logits_MV.clone())
    assert all(torch.equal(output, outputs[0]) for output in outputs)


@every_way
@pytest.mark.parametrize(("size", "force_reference"), [(2, False), (4, False), (2, True)])
def test_a_rows_bits_do_not_depend_on_its_batch(
    way: Callable[[int], list[Comm]], size: int, force_reference: bool
) -> None:
    options = LoadOptions(capacity=OPTIONS.capacity, device="cpu", force_reference=force_reference)
    split, _ = share_out("llama2", way(size), options)
    assert split.kernels.exact
    for seq_id in range(3):
        split.state.open(seq_id, ())
    tree = StepRow(1, (5, 6, 7), (ROOT, ROOT, 0))
    rows = [StepRow.chain(0, TEXT), tree, StepRow.chain(2, TEXT[:3])]
    together_MV = split.step(rows, NEEDS).logits_MV.clone()
    split.state.commit({0: (), 1: (), 2: ()})
    alone = [split.step([row], NEEDS).logits_MV.clone() for row in rows]
    assert torch.equal(together_MV, torch.cat(alone))


@every_way
@pytest.mark.parametrize("num", [1, 1000, 70_000])
def test_sums_are_added_up_in_the_order_of_ranks(
    way: Callable[[int], list[Comm]], num: int
) -> None:
    """So each rank has the same bits, whatever lies beside a number; and one after another."""
    comms = way(3)
    parts = [torch.randn(2, num, generator=torch.Generator().manual_seed(r)) for r in range(3)]
    wanted = parts[0] + parts[1] + parts[2]

    def take_part(comm: Comm) -> Tensor:
        own = parts[comm.rank].clone()
        for row in own:
            comm.all_reduce_(row)
        return own

    with ThreadPoolExecutor(3) as pool:
        assert all(torch.equal(got, wanted) for got in pool.map(take_part, comms))


@every_way
def test_more_is_sent_than_is_held_on_the_way(way: Callable[[int], list[Comm]]) -> None:
    comms = way(2)
    given_N = torch.arange(300_000, dtype=torch.float32)
    with ThreadPoolExecutor(1) as pool:
        sent = pool.submit(comms[1].send, given_N, 0)
        got_N = torch.empty_like(given_N)
        comms[0].recv_(got_N, 1)
        sent.result()
    assert torch.equal(got_N, given_N)


@pytest.mark.parametrize("way", [shared_comms, socket_comms])
def test_whoever_waits_fails_at_the_end(way: Callable[[int], list[Comm]]) -> None:
    leads, other = way(2)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(other.all_reduce_, torch.ones(3))
        # Long enough to be asleep, which is not what makes it pass.
        wait([waiting], 0.05)
        leads.end()
        with pytest.raises(RankError, match="lost each other"):
            waiting.result(10)
    with pytest.raises(RankError, match="lost each other"):
        leads.all_reduce_(torch.ones(3))


def test_rank_0_waits_only_so_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comm, "SILENCE_SECONDS", 0.2)
    for way in (shared_comms, socket_comms):
        leads, _other = way(2)
        with pytest.raises(RankError, match="lost each other"):
            leads.all_reduce_(torch.ones(3))


def test_a_lane_of_its_own_has_logits_of_its_own() -> None:
    """Passes take turns; what one returned stays while another runs."""
    split, ranks = share_out("llama2", shared_comms(2), OPTIONS)
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
        other.step([StepRow.chain(1, TEXT)], NEEDS)


class SplitRollback(Rollback):
    kind = staticmethod(sharded("qwen2", 2))


@pytest.mark.slow
def test_memory_of_all_ranks_takes_part_in_rollback() -> None:
    check_rollback(SplitRollback, percent=5)


@every_way
def test_every_rank_holds_the_same_rows(way: Callable[[int], list[Comm]]) -> None:
    """Also of what was copied: by a fork within a page, and of a path through a tree."""
    whole = load_model(stored("llama2", 0), OPTIONS)
    split, ranks = share_out("llama2", way(2), OPTIONS)
    probe = StepRow.chain(2, (3, 5))
    outputs: list[Tensor] = []
    for model in (whole, split):
        model.state.open(0, ())
        model.step([StepRow.chain(0, TEXT)], NEEDS)
        model.state.commit({0: range(len(TEXT))})
        assert model.state.open(1, TEXT[:8]) == 8
        model.state.fork(0, 2, 5)
        model.step([StepRow(2, (9, 8, 7), (ROOT, ROOT, 1)), StepRow.chain(1, (3,))], NEEDS)
        assert model.state.commit({2: (1, 2), 1: ()}) == 2
        model.state.close(0)
        outputs.append(model.step([probe], NEEDS).logits_MV)
    close_to(*outputs)
    # The fork's row, and two of the path.
    copies = [message for message in ranks.told if message[0] == RankCall.COPY]
    assert [message[1] for message in copies] == [1, 2]


def test_what_does_not_fit_is_refused_before_anybody_is_told() -> None:
    split, ranks = share_out("llama2", barrier_comms(2), OPTIONS)
    split.state.open(0, ())
    num_told = len(ranks.told)
    with pytest.raises(CapacityError):
        split.step([StepRow.chain(0, (1,) * 300)], NEEDS)
    with pytest.raises(CapacityError):
        split.state.reserve({0: 300})
    assert len(ranks.told) == num_told
    split.step([StepRow.chain(0, TEXT)], NEEDS)


def test_after_a_loss_no_pass_runs_but_memory_can_be_given_back() -> None:
    split, ranks = share_out("llama2", barrier_comms(2), OPTIONS)
    split.state.open(0, ())
    num_free = split.state.num_free_tokens
    split.step([StepRow.chain(0, TEXT)], NEEDS)
    ranks.lose("rank 1 ended")
    with pytest.raises(RankError, match="rank 1 ended"):
        split.step([StepRow.chain(0, TEXT)], NEEDS)
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
    options = LoadOptions(capacity=OPTIONS.capacity, device="cpu", quantise="int8")
    with pytest.raises(ConfigError, match="quantised weights cannot be split"):
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
    orders = Orders(Alone(), ThreadRanks([], [Alone()]))
    done: list[int] = []

    def act() -> None:
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        time.sleep(0.05)
        done.append(1)

    with pytest.raises(KeyboardInterrupt):
        orders.in_turn(act)
    assert orders.in_turn(done.copy) == [1]
