"""Drafters of published formats against the drafts of their publishers' own libraries.

Shapes:  K = drafted positions, V = vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from checks.engine import greedy
from doubles.published_drafters import CASES, CUTS, TARGET, TEXT, Case, states_of
from doubles.rig import Rig
from doubles.tiny_checkpoints import random_llama
from outrider.core.config import EngineConfig
from outrider.core.draft import Budget
from outrider.core.errors import CheckpointError, OutriderError, given
from outrider.core.params import SamplingParams
from outrider.core.plugins import KINDS, MODEL
from outrider.core.protocols import Drafter, DraftRow
from outrider.core.resolve import resolve
from outrider.core.rng import KeyedRng
from outrider.drafters.common.context import BuildContext, LoadedModels
from outrider.models.decoder import LoadOptions, ModelCapacity
from outrider.models.heads import HeadsToLoad, hidden_layers_of, kind_of, mask_token_of
from outrider.models.llama import LlamaModel
from outrider.models.loading import load_model
from outrider.plugins.heads.block_heads import read_block_config
from outrider.plugins.heads.blocks import Sight
from outrider.testing import GREEDY

NAMES = sorted(path.stem for path in CASES.glob("*.json"))
KIND_OF = {
    "mlp-speculator": "mlp-speculator",
    "mlp-speculator-tied": "mlp-speculator",
    "pard": "model",
    **{name: name.partition("-")[0] for name in NAMES if not name.startswith(("mlp", "pard"))},
    "dflash2": "dflash",
}
SAMPLED = SamplingParams(temperature=1.0, seed=3)
PROMPTS = [TEXT[:9], TEXT[3:5], TEXT[20:41]]


@dataclass(frozen=True, slots=True)
class Pair:
    case: Case
    kind: str
    target: LlamaModel
    drafter: Drafter

    def states(self, seq_id: int, length: int) -> DraftRow:
        """A row of TEXT up to `length` tokens, all but the last one read by the target."""
        params, needs = GREEDY, self.drafter.needs
        hidden = states_of(self.target, needs, seq_id, length - 1) if needs.hidden_layers else None
        budget = Budget(len(self.case.drafts[CUTS[-1]]))
        rng = KeyedRng(params.rng_seed, 0, length)
        return DraftRow(seq_id, list(TEXT[:length]), None, budget, params, rng, hidden=hidden)

    def open(self, seq_id: int) -> None:
        self.target.state.open(seq_id, ())
        self.drafter.open(seq_id, TEXT[:1])


def loaded(name: str, root: Path, *, chunk: int = 8) -> Pair:
    case = Case.read(CASES / f"{name}.json")
    return Pair(case, *drafter_in(case.write(root / name), chunk=chunk))


def drafter_in(
    folder: Path, *, chunk: int, dtype: str = "float32", tree_nodes: int = 0
) -> tuple[str, LlamaModel, Drafter]:
    """The kind of a drafter's folder, a target, and the drafter."""
    kind = kind_of(folder)
    layers = () if kind == MODEL else hidden_layers_of(folder, kind, 8)
    room = ModelCapacity(num_slots=512, page_size=4, max_rows=64, max_logits=64)
    target = random_llama(TARGET, dtype=dtype, capacity=replace(room, hidden_layers=layers))
    config = EngineConfig(
        k=6,
        tree_nodes=tree_nodes,
        batch_size=2,
        prefill_chunk=chunk,
        page_size=4,
        controller="fixed",
    )
    resolved = resolve(config, kind)
    draft, heads = None, ()
    if kind == MODEL:
        draft = load_model(folder, LoadOptions(capacity=room, device="cpu"), name="draft")
    else:
        heads = (HeadsToLoad(folder, kind, replace(room, hidden_layers=layers)),)
    models = LoadedModels(
        target,
        draft,
        target.kernels.argmax,
        sampling=target.kernels.sampling,
        heads=heads,
        mask_token=mask_token_of(folder),
        lookups=target.kernels.lookups,
    )
    drafter: Drafter = BuildContext(resolved, models, KINDS[kind]).build()
    return kind, target, drafter


@pytest.fixture(scope="module", params=NAMES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return loaded(request.param, tmp_path_factory.mktemp("drafters"))


def test_there_are_cases_of_every_format() -> None:
    assert set(KIND_OF.values()) == {
        *(
            "dflash",
            "dspark",
            "xpress",
            "eagle",
            "peagle",
            "mtp",
            "mlp-speculator",
            "hydra",
            "model",
        ),
    }


def test_a_folder_is_recognised(pair: Pair) -> None:
    assert pair.kind == KIND_OF[pair.case.name] == pair.drafter.name


def test_drafts_are_those_of_the_library(pair: Pair) -> None:
    """Whole drafts, each after the text went on otherwise than drafted, or further."""
    pair.open(0)
    free = pair.target.state.num_free_tokens
    for length, expected in pair.case.drafts.items():
        (draft,) = pair.drafter.propose([pair.states(0, length)])
        assert draft.tokens == expected
    pair.target.state.close(0)
    pair.drafter.close(0)
    assert pair.target.state.num_free_tokens >= free


def test_texts_of_a_batch_do_not_meet(pair: Pair) -> None:
    lengths = list(pair.case.drafts)[-3:]
    for seq_id in (0, 1):
        pair.open(seq_id)
    for one, two in ((lengths[0], lengths[1]), (lengths[1], lengths[2])):
        rows = [pair.states(0, one), pair.states(1, two)]
        drafts = pair.drafter.propose(rows)
        assert [draft.tokens for draft in drafts] == [pair.case.drafts[n] for n in (one, two)]
    for seq_id in (0, 1):
        pair.target.state.close(seq_id)
        pair.drafter.close(seq_id)


def test_distributions_are_those_of_the_library(pair: Pair) -> None:
    pair.open(0)
    row = replace(pair.states(0, CUTS[-1]), params=SAMPLED)
    (draft,) = pair.drafter.propose([row])
    pair.target.state.close(0)
    pair.drafter.close(0)
    expected_KV = pair.case.probs_KV
    probs_KV = given(draft.probs_NV, "distributions")[: len(expected_KV)]
    torch.testing.assert_close(probs_KV.float(), expected_KV, atol=2e-5, rtol=1e-3)


@pytest.mark.sample(10)
def test_a_tree_has_the_draft_as_its_first_path(pair: Pair) -> None:
    pair.open(0)
    row = pair.states(0, CUTS[-1])
    row = replace(row, budget=replace(row.budget, num_nodes=9))
    (draft,) = pair.drafter.propose([row])
    pair.target.state.close(0)
    pair.drafter.close(0)
    assert draft.tokens[0] == pair.case.drafts[CUTS[-1]][0]
    assert len(draft.tokens) <= 9


@pytest.fixture(scope="module")
def plain() -> list[list[int]]:
    return Rig(random_llama(TARGET), batch_size=2, chunk=7).outputs(PROMPTS, greedy(14))


@pytest.mark.sample(12)
def test_greedy_text_is_that_of_plain_decoding(pair: Pair, plain: list[list[int]]) -> None:
    rig = Rig(pair.target, pair.drafter, k=4, batch_size=2, chunk=7)
    assert rig.outputs(PROMPTS, greedy(14)) == plain
    assert sum(trace.num_drafted for trace in rig.traces) > 0


@pytest.mark.parametrize("name", ["dflash", "peagle", "mtp", "hydra"])
def test_a_missing_tensor_is_named(name: str, tmp_path: Path) -> None:
    case = Case.read(CASES / f"{name}.json")
    missing = max(case.shapes, key=lambda one: len(case.shapes[one]))
    shapes = {key: shape for key, shape in case.shapes.items() if key != missing}
    with pytest.raises(CheckpointError, match="missing"):
        _load_changed(replace(case, shapes=shapes), tmp_path)


def _load_changed(case: Case, root: Path) -> None:
    folder = case.write(root / "changed")
    kind = kind_of(folder)
    layers = hidden_layers_of(folder, kind, 8)
    room = ModelCapacity(num_slots=512, page_size=4, max_rows=64, hidden_layers=layers)
    target = random_llama(TARGET, capacity=room)
    heads = HeadsToLoad(folder, kind, room)
    models = LoadedModels(target, None, target.kernels.argmax, heads=(heads,))
    BuildContext(resolve(EngineConfig(batch_size=1), kind), models, KINDS[kind]).build()


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        ("dflash", {"mask_token_id": 96}, "mask_token_id must be from 0 to 95"),
        ("dflash", {"block_size": 1}, "block_size must be from 2"),
        ("dflash2", {"conv_group_size": 24}, "does not divide"),
        ("hydra", {"hydra_head_arch": "cross-attn"}, "cross-attn"),
        ("mlp-speculator", {"emb_dim": 65}, "emb_dim 65, the target 64"),
        ("peagle", {"mask_token_id": None}, "mask_token_id is missing"),
    ],
)
def test_configs_that_do_not_fit_are_refused(
    name: str, changes: dict[str, object], said: str, tmp_path: Path
) -> None:
    case = Case.read(CASES / f"{name}.json")
    with pytest.raises(OutriderError, match=said):
        _load_changed(replace(case, config={**case.config, **changes}), tmp_path)


def mask(sight: Sight, context: int, size: int) -> list[list[bool]]:
    rows: list[list[bool]] = []
    for place in range(context, context + size):
        first, end = sight.span(place, context, context + size)
        rows.append([first <= key < end for key in range(context + size)])
    return rows


def test_windows_of_the_zlab_folders(tmp_path: Path) -> None:
    case = Case.read(CASES / "dflash-zlab.json")

    def sights(top: Mapping[str, object], part: Mapping[str, object]) -> tuple[Sight, ...]:
        inner = {**case.config["dflash_config"], **part}
        changed = replace(case, config={**case.config, **top, "dflash_config": inner})
        folder = changed.write(tmp_path)
        spec = random_llama(TARGET).spec
        return read_block_config(folder, spec, from_anchor=False).sights

    slides = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 7}
    assert sights({}, {}) == (Sight(), Sight())
    assert sights(slides, {}) == (Sight(7, causal=True), Sight())
    assert sights({**slides, "is_causal": False}, {}) == (Sight(7), Sight())
    assert sights({"is_causal": True}, {}) == (Sight(causal=True), Sight(causal=True))
    whole = {"use_swa": True, "swa_window_size": 9, "causal": False}
    assert sights({}, whole) == (Sight(9), Sight(9))


@pytest.mark.parametrize("shape", [(192,), (1, 192)])
def test_the_state_of_masks_may_have_fewer_axes(shape: tuple[int, ...], tmp_path: Path) -> None:
    case = Case.read(CASES / "peagle.json")
    config = {**case.config, "mask_token_id": None, "pard_token": case.config["mask_token_id"]}
    shapes = {**case.shapes, "mask_hidden": shape}
    changed = replace(case, config=config, shapes=shapes)
    drafters = [
        drafter_in(one.write(tmp_path / str(number)), chunk=8)
        for number, one in enumerate((case, changed))
    ]
    found: list[list[tuple[int, ...]]] = []
    for kind, target, drafter in drafters:
        pair = Pair(case, kind, target, drafter)
        pair.open(0)
        found.append([draft.tokens for draft in drafter.propose([pair.states(0, 9)])])
    assert found[0] == found[1]


@pytest.mark.parametrize("causal", [False, True])
def test_a_window_ends_at_the_token_itself(causal: bool) -> None:
    """z-lab's folders: tokens less than the window away."""
    query, key = torch.arange(5, 9)[:, None], torch.arange(9)[None]
    sees = query - key < 3
    sees &= key <= query if causal else key - query < 3
    assert torch.equal(torch.tensor(mask(Sight(3, causal=causal), 5, 4)), sees)


def test_the_cases_are_small() -> None:
    sizes = [path.stat().st_size for path in CASES.glob("*.json")]
    assert sum(sizes) < 200_000
    assert all(json.loads(path.read_text())["drafts"] for path in CASES.glob("*.json"))
