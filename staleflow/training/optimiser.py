"""AdamW, with its moments beside the parameters or, to save a GPU's memory, in the host's.

    optimiser = AdamW(groups, ...)              # or HostedAdamW
    optimiser.forget()                          # moments of zero, as before the first update
    optimiser.step()

The moments are 8 of the 18 bytes that a parameter takes on a GPU, and are needed only in the update. ``HostedAdamW``
brings them there part by part and takes them back: while one part is updated, the next one comes and the one before
leaves. An update then takes as long as 8 bytes for each parameter take one way, for both ways are used at once. What it
computes is the same to the last bit.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from staleflow.servers.weights.gpu import pin, unpin

PART = 1 << 24
"""Values of a part: 64 MiB of each moment, long enough that copies are as fast as they can be."""
LANES = 3
"""Parts on the GPU at a time: one that comes, one that is updated, one that leaves."""
STEP, MEAN, SQUARE = "step", "exp_avg", "exp_avg_sq"


class AdamW(torch.optim.AdamW):
    @property
    def parameters(self) -> list[Tensor]:
        return [each for group in self.param_groups for each in group["params"]]

    def forget(self) -> None:
        """The state before the first update, with the zeros that AdamW would make then.

        So it has the same tensors at every version."""
        for each in self.parameters:
            moments = (torch.zeros_like(each, memory_format=torch.preserve_format) for _ in range(2))
            self._begin(each, *moments)

    def _begin(self, parameter: Tensor, mean: Tensor, square: Tensor) -> None:
        step = torch.zeros((), dtype=torch.float32, device=parameter.device)
        self.state[parameter] = {STEP: step, MEAN: mean, SQUARE: square}


class HostedAdamW(AdamW):
    """For contiguous parameters on one device."""

    def forget(self) -> None:
        if not self.state:
            self._allocate()
        for held in self.state.values():
            for each in held.values():
                each.zero_()

    def _allocate(self) -> None:
        """In one piece for each precision: memory is pinned by pages, which tensors would share."""
        for dtype in {each.dtype for each in self.parameters}:
            alike = [each for each in self.parameters if each.dtype == dtype]
            sizes = [each.numel() for each in alike]
            every = torch.zeros(2, sum(sizes), dtype=dtype)
            if alike[0].is_cuda and pin(every.data_ptr(), every.nbytes):  # where it cannot be, copies are slower
                weakref.finalize(self, unpin, every.data_ptr()).atexit = False
            for parameter, *moments in zip(alike, *(row.split(sizes) for row in every), strict=True):
                self._begin(parameter, *(each.view_as(parameter) for each in moments))

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        assert closure is None
        parts = [*self._parts()]
        if not parts:
            return
        like = parts[0].parameter
        most = max(part.mean.nbytes for part in parts)
        lanes = [[torch.empty(most, dtype=torch.uint8, device=like.device) for _ in "mv"] for _ in range(LANES)]
        ways = _CudaWays() if like.is_cuda else _HostWays()
        for at, part in enumerate(parts):
            lane = at % LANES
            mean, square = (room[: part.mean.nbytes].view(part.mean.dtype) for room in lanes[lane])
            with ways.coming(lane):
                mean.copy_(part.mean, non_blocking=True)
                square.copy_(part.square, non_blocking=True)
            self._update(part, mean, square)
            with ways.leaving(lane):
                part.mean.copy_(mean, non_blocking=True)
                part.square.copy_(square, non_blocking=True)
        ways.end()
        for parameter, held in self.state.items():
            held[STEP] += parameter.grad is not None

    def _parts(self) -> Iterator[_Part]:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                held = self.state[parameter]
                flat = (parameter.view(-1), parameter.grad.reshape(-1), held[MEAN].view(-1), held[SQUARE].view(-1))
                for values, gradient, mean, square in zip(*(each.split(PART) for each in flat), strict=True):
                    yield _Part(values, gradient, mean, square, held[STEP], group)

    def _update(self, part: _Part, mean: Tensor, square: Tensor) -> None:
        group = part.group
        adamw(
            [part.parameter], [part.gradient], [mean], [square], [], [part.step.clone()],
            fused=True, amsgrad=False, beta1=group["betas"][0], beta2=group["betas"][1], lr=group["lr"],
            weight_decay=group["weight_decay"], eps=group["eps"], maximize=False,
        )  # fmt: skip


class _Part(NamedTuple):
    """Some values of a parameter, one behind the other, and what belongs to them."""

    parameter: Tensor
    gradient: Tensor
    mean: Tensor
    square: Tensor
    step: Tensor
    group: dict[str, Any]


class _HostWays:
    """Nothing runs beside anything else."""

    @contextmanager
    def coming(self, lane: int) -> Iterator[None]:  # noqa: ARG002 - see _CudaWays
        yield

    leaving = coming

    def end(self) -> None:
        pass


class _CudaWays:
    """Copies to the device and back in a stream each, beside the updates."""

    def __init__(self) -> None:
        self._here = torch.cuda.current_stream()
        self._to, self._back = torch.cuda.Stream(), torch.cuda.Stream()
        self._to.wait_stream(self._here)
        self._left: dict[int, Any] = {}

    @contextmanager
    def coming(self, lane: int) -> Iterator[None]:
        """When what the lane held has left; the update waits for it."""
        if lane in self._left:
            self._to.wait_event(self._left[lane])
        with torch.cuda.stream(self._to):
            yield
        self._here.wait_stream(self._to)

    @contextmanager
    def leaving(self, lane: int) -> Iterator[None]:
        """When the update is done."""
        self._back.wait_stream(self._here)
        with torch.cuda.stream(self._back):
            yield
            self._left[lane] = self._back.record_event()

    def end(self) -> None:
        """The host has all of it, and nobody reads the lanes any more."""
        self._back.synchronize()
