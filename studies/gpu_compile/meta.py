"""Engines on PyTorch's meta device: the shapes, types and launches of a GPU, without numbers.

What the host reads there is made up: integers are 1, floats 1.0 and booleans false, so a text goes
on to its end with tokens of id 1. Nothing is put back: a process that traces does nothing else.

Shapes:  O = outputs, I = inputs, F = factors of a group, G = groups, B = rows, R = a row's report.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor

from outrider.engine import drafting
from outrider.kernels import registry
from outrider.kernels.operators import Kernels, pick_device
from outrider.kernels.reference.linear import GROUP, Groups, quantise
from outrider.kernels.registry import AS_STORED
from outrider.models.weights import HEAD, Weights
from outrider.plugins.gpu.kernels import tiles, trial
from outrider.plugins.gpu.kernels.build import triton_kernels
from outrider.plugins.gpu.rounds import build
from outrider.plugins.gpu.rounds.program import Mailbox, Ticket

META = torch.device("meta")


class Launch(tiles.Launch):
    """One launch as `tiles.launch` was called. Its tensors have no data."""

    @property
    def name(self) -> str:
        return self.kernel.__name__

    @property
    def types(self) -> str:
        """The dtypes of its pointers, each once, in the order of the arguments."""
        found = dict.fromkeys(_type(one) for one in self.arguments if isinstance(one, Tensor))
        return " ".join(found)


def source_of(kernel: Any) -> str:
    """A digest of the source of a kernel and of all functions that it calls."""
    texts: dict[str, str] = {}
    unread = [kernel.fn]
    while unread:
        function = unread.pop()
        name = f"{function.__module__}.{function.__name__}"
        if name not in texts:
            texts[name] = inspect.getsource(function)
            named = (function.__globals__.get(word) for word in function.__code__.co_names)
            unread += [found.fn for found in named if hasattr(found, "fn")]
    text = "\n".join(texts[name] for name in sorted(texts))
    return sha256(text.encode()).hexdigest()[:12]


def _type(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


Form: TypeAlias = tuple[object, ...]


@dataclass(slots=True)
class Recorder:
    """Stands for `tiles.launch`: keeps the first launch of each form, and all of them in `last`
    while that is a list. What is compiled ahead goes to `ahead`. `seen` has the forms of both until
    it is cleared."""

    forms: dict[Form, Launch] = field(default_factory=dict[Form, Launch])
    last: list[Launch] | None = None
    ahead: dict[Form, Launch] = field(default_factory=dict[Form, Launch])
    seen: set[Form] = field(default_factory=set[Form])
    is_ahead: bool = False

    def __call__(
        self, kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any
    ) -> None:
        if 0 in grid:
            return
        devices = {one.device.type for one in arguments if isinstance(one, Tensor)}
        if devices != {"meta"}:
            raise AssertionError(f"{kernel.__name__} is launched with tensors of {devices}")
        one = Launch(kernel, grid, arguments, constants)
        self.seen.add(one.form)
        if self.is_ahead:
            self.ahead.setdefault(one.form, one)
            return
        self.forms.setdefault(one.form, one)
        if self.last is not None:
            self.last.append(one)

    def compile_launches(self, _: torch.device, work: Callable[[], object]) -> None:
        """Stands for `trial.compile_launches`."""
        self.is_ahead = True
        try:
            work()
        finally:
            self.is_ahead = False


def pretend() -> Recorder:
    """From now on what is built for a GPU is built on the meta device, with Triton's operators,
    whose launches the result records. Rounds are captured by running them once."""
    for name, value in _READ_AS.items():
        _read(name, lambda _, value=value: value)
    _read("tolist", _numbers)
    _read("nonzero", lambda one: torch.zeros(1, one.ndim, dtype=torch.int64, device=META))
    recorder = Recorder()
    _everywhere(tiles.launch, recorder)
    _everywhere(trial.compile_launches, recorder.compile_launches)
    _everywhere(registry.choose, _choose)
    _everywhere(pick_device, _device)
    _everywhere(quantise, _quantise)
    vars(build)["_device_refusal"] = lambda *_: None
    # It refuses distributions that have no numbers.
    vars(drafting)["_check_distributions"] = lambda *_: None
    Mailbox.post = _post
    return recorder


_READ_AS = {"item": 1, "__int__": 1, "__index__": 1, "__float__": 1.0, "__bool__": False}


def _read(name: str, made: Callable[[Tensor], object]) -> None:
    """Has tensors without data read as `made` says."""
    original = getattr(Tensor, name)

    def read(self: Tensor, *arguments: object) -> object:
        return made(self) if self.is_meta else original(self, *arguments)

    setattr(Tensor, name, read)


def _numbers(tensor: Tensor) -> object:
    value = 1.0 if tensor.is_floating_point() else tensor.dtype is not torch.bool and 1

    def nested(shape: tuple[int, ...]) -> object:
        return [nested(shape[1:]) for _ in range(shape[0])] if shape else value

    return nested(tuple(tensor.shape))


def _everywhere(original: object, substitute: object) -> None:
    """Modules that were imported have it under a name of their own."""
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] in ("outrider", "gpu_check", "gpu_compile"):
            own = vars(module)
            for key in [key for key, found in own.items() if found is original]:
                if module is not sys.modules[__name__]:
                    own[key] = substitute


def _choose(
    *, device: torch.device, dtype: torch.dtype, quantise: str = "none", **others: object
) -> Kernels:
    del device, others
    scheme = "none" if quantise == AS_STORED else quantise
    return triton_kernels(META, dtype, scheme, (), exact=True)


def _device(name: str) -> torch.device:
    return META if name == "auto" or name.startswith(("cuda", "meta")) else torch.device(name)


def _quantise(weight_OI: Tensor, bits: int) -> Groups:
    """Codes and factors of the right shapes."""
    num_out, num_in = weight_OI.shape
    num_groups = -(-num_in // GROUP)
    codes_OI = torch.empty(num_out, num_groups * GROUP, dtype=torch.int8, device=META)
    factors_FOG = torch.empty(2 if bits == 4 else 1, num_out, num_groups, device=META)
    return Groups(codes_OI, factors_FOG)


def _post(self: Mailbox, report_BR: Tensor) -> Ticket:
    """A report of rows that drafted nothing and got the token 1."""
    del self
    made_BR = torch.zeros(report_BR.shape, dtype=report_BR.dtype)
    made_BR[:, -2] = 1
    return Ticket(made_BR, None)


class NoWeights:
    """Weights of any name and shape, without a value."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def __contains__(self, name: str) -> bool:
        return name.endswith(("embed_tokens.weight", HEAD))

    def take(self, name: str, *shape: int, **_: object) -> Tensor:
        del name
        return torch.empty(shape, dtype=self._dtype, device=META)

    def check_all_taken(self, **_: object) -> None:
        """There is no end to them."""


def no_weights(dtype: torch.dtype) -> Weights:
    return cast("Weights", NoWeights(dtype))
