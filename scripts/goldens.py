"""Store what transformers computes for tiny random checkpoints and the embedded pair.

    PYTHONPATH=src:tests python scripts/goldens.py [NAME ...]

Without names, all of them. One file a model under tests/golden/models: the text, its logits, hidden
states and the greedy continuation, with the versions and the checksum of the weights that made
them. Tests then need neither transformers nor a network.
"""

from __future__ import annotations

import platform
import sys
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from doubles.tiny_checkpoints import VARIANTS, Variant, checksum, random_tensors, write_checkpoint
from outrider.models.loading import resolve
from outrider.models.names import ALIASES
from outrider.models.weights import EMBEDDINGS
from parity.oracle import Oracle

FOLDER = Path(__file__).resolve().parent.parent / "tests" / "golden" / "models"
NUM_TOKENS = 20
NUM_GREEDY = 64
# Every so many logits of the embedded pair's vocabulary, to keep its files small.
STRIDE = 64
# Float32 logits differ by a thousandth of this between kernels; a smaller lead could flip a choice.
MIN_LEAD = 2e-3


def main() -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    names = {name.removeprefix("outrider/").replace("-", "_"): name for name in ALIASES}
    wanted = set(sys.argv[1:] or [*names, *(variant.name for variant in VARIANTS)])
    for variant in VARIANTS:
        if variant.name not in wanted:
            continue
        seed = next(seed for seed in count(3) if _store_variant(variant, seed))
        print(f"{variant.name}: seed {seed}")
    for name in sorted(wanted & set(names)):
        path = resolve(names[name])
        weights = load_file(path / "model.safetensors")
        assert _store(name, path, weights, stride=STRIDE)
    total = sum(path.stat().st_size for path in FOLDER.iterdir())
    print(f"{total} bytes in {FOLDER}")


def _store_variant(variant: Variant, seed: int) -> bool:
    with TemporaryDirectory() as folder:
        path = write_checkpoint(Path(folder), variant, seed=seed)
        weights = random_tensors(variant.config, seed=seed)
        return _store(variant.name, path, weights, seed=seed)


def _store(
    name: str, folder: Path, weights: dict[str, Tensor], *, seed: int = 0, stride: int = 1
) -> bool:
    """False, with nothing stored, if some greedy choice was too close to call."""
    oracle = Oracle(folder)
    (embedding,) = (weights[found] for found in EMBEDDINGS if found in weights)
    vocab_size = embedding.shape[0]
    tokens = [(37 * i * i + 11 * i + 5) % vocab_size for i in range(NUM_TOKENS)]
    greedy, lead = oracle.greedy(tokens, NUM_GREEDY)
    if lead < MIN_LEAD:
        return False
    logits_NV, hidden_NKD = oracle.run(tokens)
    tensors = {
        "tokens_N": torch.tensor(tokens),
        "logits_NV": logits_NV[:, ::stride].contiguous(),
        "hidden_KD": hidden_NKD[-1].contiguous(),
        "greedy": torch.tensor(greedy),
    }
    metadata = {
        "command": "PYTHONPATH=src:tests python scripts/goldens.py",
        "seed": str(seed),
        "stride": str(stride),
        "weights": checksum({key: value.float() for key, value in weights.items()}),
        "smallest_lead": f"{lead:.4f}",
        "torch": torch.__version__,
        "transformers": oracle.version,
        "python": platform.python_version(),
    }
    save_file(tensors, FOLDER / f"{name}.safetensors", metadata=metadata)
    return True


if __name__ == "__main__":
    main()
