"""Engines that take part in a comparison without computing: their text and their pace are known."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from outrider_lab.bench.peers.process import PeerError
from outrider_lab.bench.peers.sides import Ask, RefusedError, Setup, answer


@dataclass(slots=True)
class ScriptedSide:
    """Writes the ids after the prompt's last one, as many as may be, at so many seconds a token by
    name of the setup. Setups of `broken` are refused when they load, and `tired` ones from their
    so many-th run on. With `off` its ids are other ones."""

    pace: Mapping[str, float] = field(default_factory=dict[str, float])
    usual: float = 0.01
    broken: Sequence[str] = ()
    tired: Mapping[str, int] = field(default_factory=dict[str, int])
    off: int = 0
    loaded: dict[str, Setup] = field(default_factory=dict[str, Setup])
    runs: list[Ask] = field(default_factory=list[Ask])
    dropped: list[str] = field(default_factory=list[str])

    def about(self) -> dict[str, Any]:
        return {"versions": {"scripted": "1"}}

    def load(self, setup: Setup) -> list[str]:
        if setup.name in self.broken:
            raise RefusedError(f"{setup.name} is broken")
        self.loaded[setup.name] = setup
        return [f"has {setup.threads} threads"]

    def run(self, ask: Ask) -> dict[str, Any]:
        done = sum(one.name == ask.name for one in self.runs)
        if done >= self.tired.get(ask.name, done + 1):
            raise RefusedError(f"{ask.name} is tired")
        self.runs.append(ask)
        seconds = self.pace.get(ask.name, self.usual)
        num = ask.max_tokens
        return {
            "ids": [ask.ids[-1] + self.off + i for i in range(num)],
            "seconds": seconds * num,
            "drafted": 2 * num,
            "accepted": num,
            "arrivals": [seconds * (i + 1) for i in range(num)],
        }

    def drop(self, name: str) -> None:
        self.dropped.append(name)
        del self.loaded[name]


@dataclass(slots=True)
class SidePeer:
    """A side in this process, asked as a peer is."""

    side: ScriptedSide
    pid: int = -1
    closed: bool = False

    def ask(self, do: str, **request: Any) -> dict[str, Any]:
        said = answer(self.side, {"do": do, **request})
        if "refused" in said:
            raise PeerError(said["refused"])
        return said

    def close(self, *, hurry: bool = False) -> None:
        del hurry
        self.closed = True
