"""The program of ranks 1 and on: load a share, then make every call that rank 0 makes.

Started by `load_sharded`; a follower knows no requests and no text, only its part of each pass.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from outrider.core.spec import StateRoom
from outrider.models.decoder import Decoder, Room
from outrider.models.loading import LoadOptions, load_model, pick_device
from outrider.models.parallel.link import Link
from outrider.models.parallel.messages import apply
from outrider.models.parallel.torch_comm import TorchComm

HERE, LOADED = "here", "loaded"


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What a follower has to know to load its share. `store` is the file in which ranks meet."""

    folder: str
    name: str
    store: str
    options: LoadOptions

    def to_dict(self) -> dict[str, object]:
        return asdict(self)


def follow() -> None:
    link = Link()
    setup, rank, size = link.setup, link.setup["rank"], link.setup["size"]
    options = _options(setup["options"])
    torch.set_num_threads(options.threads)
    place = pick_device(options.device)
    if place.type == "cuda":
        torch.cuda.set_device(rank)
    link.say(HERE)
    comm = TorchComm(rank, size, store=Path(setup["store"]), place=place)
    model: Decoder = load_model(Path(setup["folder"]), options, name=setup["name"], comm=comm)
    link.say(LOADED)
    for message in link.messages():
        apply(message, model)


def _options(given: dict[str, Any]) -> LoadOptions:
    room: dict[str, Any] = {**given["room"], "states": StateRoom(**given["room"]["states"])}
    values: dict[str, Any] = {**given, "room": Room(**room)}
    return LoadOptions(**values)


if __name__ == "__main__":
    follow()
