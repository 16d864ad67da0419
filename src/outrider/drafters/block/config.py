"""What a folder of a block net says of itself, and whether it fits a target.

The form is ours: `config.json` with `model_type` outrider_block and the sizes below, beside
`model.safetensors` with the tensors that `net.py` names.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from outrider.core.errors import CheckpointError, ContractError
from outrider.core.spec import ModelSpec
from outrider.models.json_object import JsonObject

MODEL_TYPE = "outrider_block"


@dataclass(frozen=True, slots=True)
class BlockConfig:
    """`num_places` are guessed in one pass, by the last `num_context` tokens' states of
    `hidden_layers`. Hidden size and vocabulary are the target's."""

    num_places: int
    num_context: int
    num_layers: int
    num_heads: int
    ffn_size: int
    hidden_layers: tuple[int, ...]
    rms_norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        if self.num_places <= 0:
            raise ContractError("a block drafts one token or more")
        if self.num_context <= 0:
            raise ContractError("a block reads one token or more")


def read_block_config(folder: Path, target: ModelSpec) -> BlockConfig:
    """Raises CheckpointError for a file that is wrong or belongs to another target."""
    values = JsonObject.read(folder / "config.json")
    for key, size in (("hidden_size", target.hidden_size), ("vocab_size", target.vocab_size)):
        if values.integer(key) != size:
            raise CheckpointError(
                f"{values.where}: the net has {key} {values.integer(key)}, the target {size}.",
                hint="a block net shares tables with the one target that it was trained for",
            )
    config = BlockConfig(
        num_places=values.integer("num_places"),
        num_context=values.integer("num_context"),
        num_layers=values.integer("num_layers"),
        num_heads=values.integer("num_heads"),
        ffn_size=values.integer("ffn_size"),
        hidden_layers=values.integers("hidden_layers") or (target.num_layers,),
        rms_norm_eps=values.number("rms_norm_eps", 1e-6),
    )
    if target.hidden_size % config.num_heads:
        raise CheckpointError(
            f"{values.where}: {target.hidden_size} channels cannot be shared among "
            f"num_heads={config.num_heads}."
        )
    return config


def config_values(config: BlockConfig, target: ModelSpec) -> dict[str, object]:
    """What `config.json` holds."""
    sizes = {"hidden_size": target.hidden_size, "vocab_size": target.vocab_size}
    return {"model_type": MODEL_TYPE, **sizes, **asdict(config)}
