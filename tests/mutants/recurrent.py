"""Bugs in recurrent memory: what is kept, replayed, folded, adopted and shared."""

from __future__ import annotations

from checks.memory import recurrent_beginnings, recurrent_forks, recurrent_rounds
from mutants.planting import Mutant

DELTA = "outrider.kernels.reference.delta"
HYBRID = "outrider.plugins.hybrids.memory"
RECURRENT = "outrider.plugins.hybrids.states"
STAGING = "outrider.plugins.hybrids.memory"
CHECKPOINTS = "outrider.plugins.hybrids.states"

MUTANTS = (
    Mutant(
        "convolution window one row late",
        DELTA,
        "window_WC = rows_TC[token + 1 : token + taps]",
        "window_WC = rows_TC[token : token + taps - 1]",
        recurrent_rounds,
    ),
    Mutant(
        "replay without decay",
        DELTA,
        "state_HKV.mul_(cell.decay_LH[layer][:, None, None])",
        "state_HKV.mul_(1.0)",
        recurrent_rounds,
    ),
    Mutant(
        "replayed rows not in the convolution",
        DELTA,
        "num_replayed = min(len(run.replayed), num_rows)",
        "num_replayed = 0",
        recurrent_rounds,
    ),
    Mutant(
        "the last replayed inputs taken for the first",
        DELTA,
        "replayed = run.replayed[len(run.replayed) - num_replayed :]",
        "replayed = run.replayed[:num_replayed]",
        recurrent_rounds,
    ),
    Mutant(
        "fold before the replay",
        DELTA,
        "    for number in run.replayed:",
        "    for number in run.replayed if run.fold is None else ():",
        recurrent_rounds,
    ),
    Mutant(
        "key head of another group",
        DELTA,
        "key_HK = key_GK.repeat_interleave(change_HV.shape[0] // key_GK.shape[0], dim=0)",
        "key_HK = key_GK.repeat(change_HV.shape[0] // key_GK.shape[0], 1)",
        recurrent_rounds,
    ),
    Mutant(
        "commit adopts the last state that was staged",
        HYBRID,
        "base, base_length, kept = seq.states[node], position, []",
        "base, base_length, kept = seq.states[max(seq.states)], position, []",
        recurrent_rounds,
    ),
    Mutant(
        "kept inputs are done once more after a fold",
        HYBRID,
        "seq.base, seq.base_length, seq.kept = cell, length, []",
        "seq.base, seq.base_length, seq.kept = cell, length, seq.kept",
        recurrent_rounds,
    ),
    Mutant(
        "a commit holds a state twice",
        HYBRID,
        "self._states.share([] if base is None else [base])",
        "self._states.share([] if base is None else [base, base])",
        recurrent_rounds,
    ),
    Mutant(
        "siblings go on from one another",
        RECURRENT,
        "            if self.parents[node] != node - 1:",
        "            if self.parents[node] == ROOT:",
        recurrent_rounds,
    ),
    Mutant(
        "a second run replays what was folded",
        STAGING,
        "source, replayed, fold = fold, replayed[origin.num_kept :], None",
        "source, replayed, fold = fold, replayed, None",
        recurrent_rounds,
    ),
    Mutant(
        "inputs replayed from the leaf up",
        RECURRENT,
        "return StateOrigin(self.base, (*self.kept, *reversed(replayed)), len(self.kept))",
        "return StateOrigin(self.base, (*self.kept, *replayed), len(self.kept))",
        recurrent_rounds,
    ),
    Mutant(
        "a cut fork keeps the whole state",
        HYBRID,
        "old.base_length <= len(tokens):",
        "old.base_length >= 0:",
        recurrent_forks,
    ),
    Mutant(
        "a cut fork keeps all inputs",
        HYBRID,
        "seq.kept = old.kept[: len(tokens) - old.base_length]",
        "seq.kept = old.kept[:]",
        recurrent_forks,
    ),
    Mutant(
        "read again from one token late",
        RECURRENT,
        "return start, len(self.tokens) + parent + 1",
        "return start + 1, len(self.tokens) + parent + 1",
        recurrent_forks,
    ),
    Mutant(
        "a state found by its length",
        CHECKPOINTS,
        "if len(key) <= most and key == tuple(tokens[: len(key)])",
        "if len(key) <= most",
        recurrent_beginnings,
    ),
    Mutant(
        "pages are reused without a state",
        HYBRID,
        "reused = self.kv.open(seq_id, tokens[:length], salt)",
        "length = reused = self.kv.open(seq_id, tokens, salt)",
        recurrent_beginnings,
    ),
)
