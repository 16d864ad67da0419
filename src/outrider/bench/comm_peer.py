"""The other ranks of a communication benchmark, and the exercises that all ranks do in step.

Started by `bench/comm.py`. A message is the number of an exercise, the size of its tensor and how
often to do it.
"""

from __future__ import annotations

from enum import IntEnum
from pathlib import Path
from time import perf_counter

import torch
from torch import Tensor

from outrider.models.parallel.comm import Comm, TorchComm
from outrider.models.parallel.ranks import Link

HERE, READY = "here", "ready"


class Exercise(IntEnum):
    """A sum over all ranks; a tensor from rank 0 to rank 1 and back."""

    ALL_REDUCE = 0
    SEND_RECV = 1


def do(exercise: Exercise, comm: Comm, tensor: Tensor, repeats: int) -> list[float]:
    """The seconds of each time. All ranks have to call it alike."""
    comm.barrier()
    seconds: list[float] = []
    for _ in range(repeats):
        _settle(tensor)
        began = perf_counter()
        match exercise:
            case Exercise.ALL_REDUCE:
                comm.all_reduce_(tensor)
            case Exercise.SEND_RECV:
                _there_and_back(comm, tensor)
        _settle(tensor)
        seconds.append(perf_counter() - began)
    return seconds


def _there_and_back(comm: Comm, tensor: Tensor) -> None:
    if comm.rank == 0:
        comm.send(tensor, 1)
        comm.recv_(tensor, 1)
    elif comm.rank == 1:
        comm.recv_(tensor, 0)
        comm.send(tensor, 0)


def _settle(tensor: Tensor) -> None:
    """Calls on a CUDA device only queue their work."""
    if tensor.device.type == "cuda":
        torch.cuda.synchronize(tensor.device)


def place_of(device: str, rank: int) -> torch.device:
    return torch.device(device, rank) if device == "cuda" else torch.device(device)


def follow() -> None:
    link = Link()
    torch.set_num_threads(1)
    rank, size = link.setup["rank"], link.setup["size"]
    place = place_of(link.setup["device"], rank)
    if place.type == "cuda":
        torch.cuda.set_device(place)
    link.say(HERE)
    comm = TorchComm(rank, size, store=Path(link.setup["store"]), place=place)
    link.say(READY)
    for exercise, num_numbers, repeats in link.messages():
        do(Exercise(exercise), comm, torch.ones(num_numbers, device=place), repeats)


if __name__ == "__main__":
    follow()
