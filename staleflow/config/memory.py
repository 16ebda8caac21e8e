"""What a run will need, before it starts: processes, threads, memory by role, against what the machine has.

    needs = estimate(config)
    print(needs.text())
    needs.problem           # None, or the line that refuses the run

A pure function of the configuration, the model's sizes and the machine. Weights, optimiser, KV memory and payload are
exact; activations and PyTorch's own memory are estimates, marked "about".
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import reduce
from math import ceil
from typing import Any

from staleflow.config.machine import Machine, this_machine
from staleflow.config.schema import Config
from staleflow.config.sizes import Sizes, sizes_of
from staleflow.config.text import render_flow
from staleflow.settings import numbered

BYTES = {"float32": 4, "bfloat16": 2}
PROCESS = 280 * 2**20
"""Estimate: a Python process with PyTorch loaded, beyond what processes share."""
WORKER = 60 * 2**20
"""Estimate: a reward worker."""
CONTROL = 250 * 2**20
"""Estimate: the control plane."""
CONTEXT = 500 * 2**20
"""Estimate: a process on a GPU."""
LOGITS = 2**30
"""Logits that the trainer holds on a GPU at a time."""
STATE_BYTES = 12
"""What a trainer that takes over needs for each trained parameter: the parameter and two moments."""
PAYLOAD_BYTES = 8
"""A token and its log-probability."""
TRAJECTORY_SHARE = 4
"""The trajectory server takes at most the free memory divided by this."""
FEWEST = 256
"""A trainer is not told to take fewer ``training.micro_tokens``: it would be slow."""
Change = tuple[str, str, Any]
"""Section, setting, value."""


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """What ``count`` equal processes need for one purpose."""

    role: str
    what: str
    bytes: int
    device: str = "cpu"
    count: int = 1

    @property
    def total(self) -> int:
        return self.bytes * self.count


@dataclass(frozen=True, slots=True)
class Estimate:
    config: Config
    sizes: Sizes
    machine: Machine
    parts: tuple[MemoryUse, ...]

    def needed(self, device: str = "cpu") -> int:
        return sum(part.total for part in self.parts if part.device == device)

    @property
    def devices(self) -> list[str]:
        return sorted({part.device for part in self.parts})

    @property
    def instance(self) -> int:
        """Bytes of one rollout instance on its device."""
        device = numbered(self.config.rollout.device)
        return sum(part.bytes for part in self.parts if part.role == "instance" and part.device == device)

    def of(self, *roles: str) -> int:
        """Bytes of these roles on all devices."""
        return sum(part.total for part in self.parts if part.role in roles)

    @property
    def threads(self) -> int:
        """Threads of each compute process, unless the runtime has cores to spare for the trainer."""
        processes = self.config.rollout.instances + self.config.training.ranks
        return self.config.processes.threads or max(1, self.machine.cores // processes)

    @property
    def problem(self) -> str | None:
        """Why the run does not fit, in one line with the fix; None if it does."""
        limit, least = trajectory_bytes(self.config, self.machine.memory), self.config.groups * _group(self.config)
        if limit < least:
            return (
                f"processes.trajectory_gib={self.config.processes.trajectory_gib:g} cannot hold one step of "
                f"groups={self.config.groups}: give {ceil(least / 2**30 * 1000) / 1000:g} or more, or leave it out"
            )
        for device in self.devices:
            has = self._has(device)
            if has is None and device in self.config.training.devices[1:]:
                ranks = self.config.training.ranks
                return f"training.ranks={ranks} needs {device}, but nvidia-smi finds no such GPU here: give fewer ranks"
            if has is None:
                setting = "rollout.device" if device == numbered(self.config.rollout.device) else "training.device"
                return f"{setting}={device}, but nvidia-smi finds no such GPU here: give {setting}=cpu"
            if self.needed(device) > has:
                return self._too_much(device, has)
        return None

    def in_place_of(self, before: "Estimate") -> "Estimate":
        """With the room, too, of processes that are there already and are adopted or replaced."""
        gpus = tuple(free + before.needed(f"cuda:{at}") for at, free in enumerate(self.machine.gpus))
        machine = replace(self.machine, memory=self.machine.memory + before.needed(), gpus=gpus)
        return replace(self, machine=machine)

    def problem_of_more(self, count: int) -> str | None:
        """Why there is no room for ``count`` instances beside what runs already; None if there is."""
        wanted = self.config.rollout.instances
        for device in self.devices:
            one = sum(part.bytes for part in self.parts if part.role == "instance" and part.device == device)
            has = self._has(device) or 0
            if count * one > has:
                more = f"{count} more instances need" if count > 1 else "one more instance needs"
                said = f"{more} {gigabytes(count * one)} on {device}, which has {gigabytes(has)} free"
                return f"{said}: give rollout={wanted - count + has // one} or less"
        return None

    def _has(self, device: str) -> int | None:
        if device == "cpu":
            return self.machine.memory
        index = int(device.partition(":")[2])
        return self.machine.gpus[index] if index < len(self.machine.gpus) else None

    def _too_much(self, device: str, has: int) -> str:
        need, instances = self.needed(device), self.config.rollout.instances
        said = f"the run needs {gigabytes(need)} on {device}, which has {gigabytes(has)} free"
        if device == numbered(self.config.rollout.device):
            fitting = (has - (need - instances * self.instance)) // self.instance
            if fitting >= 1:
                return f"{said}: give rollout.instances={fitting} instead of {instances}, or a lower rollout.kv_tokens"
        every = [each for each in _lighter(self.config) if self._needed_with([each[0]], device) < need]
        found = [next((one for one in each if self._needed_with([one], device) <= has), None) for each in every]
        if fixes := [each for each in found if each is not None]:
            return f"{said}: give {', '.join(_words(fixes))}, a smaller model or another device"
        first = [each[0] for each in every]
        together = f"{' '.join(_words(first))} together, " if self._needed_with(first, device) <= has else ""
        return f"{said}: give {together}a smaller model or another device"

    def _needed_with(self, changes: Sequence[Change], device: str) -> int:
        config = reduce(_changed, changes, self.config)
        return replace(self, config=config, parts=_parts(config, self.sizes, self.machine)).needed(device)

    def facts(self) -> dict[str, Any]:
        """The same as plain values, for ``--json``."""
        return {
            "model": self.config.model,
            "parameters": self.sizes.parameters,
            "instances": self.config.rollout.instances,
            "reward_workers": self.config.reward.workers,
            "threads": self.threads,
            "cores": self.machine.cores,
            "trajectory_bytes": trajectory_bytes(self.config, self.machine.memory),
            "parts": [{**asdict(part), "total": part.total} for part in self.parts],
            "needed": {device: self.needed(device) for device in self.devices},
            "free": {device: self._has(device) for device in self.devices},
            "problem": self.problem,
        }

    def text(self) -> str:
        config, rollout = self.config, self.config.rollout
        of = f" of {config.training.ranks} ranks" if config.training.ranks > 1 else ""
        lines = [
            f"model      {config.model}, {self.sizes.parameters:,} parameters",
            f"steps      {config.steps} of {config.groups} groups of {config.group_size}, staleness at most "
            f"{config.staleness}, consume {config.strategies.consume}",
            f"processes  control plane, 1 trainer{of} on {config.training.device}, {rollout.instances} instances on "
            f"{rollout.device}, 1 evaluator, {config.reward.workers} for rewards",
            f"threads    {self.threads} per compute process, {self.machine.cores} cores",
            f"limit      {gigabytes(trajectory_bytes(config, self.machine.memory))} of prompts and responses",
            "",
        ]
        rows = [(part.role, part.what, part.device, gigabytes(part.total)) for part in self.parts]
        rows += [("", "needed", device, gigabytes(self.needed(device))) for device in self.devices]
        for device in self.devices:
            has = self._has(device)
            rows.append(("", "free", device, "none found" if has is None else gigabytes(has)))
        wide = [max(len(row[at]) for row in rows) for at in range(4)]
        lines += ["  ".join([*(row[at].ljust(wide[at]) for at in range(3)), row[3].rjust(wide[3])]) for row in rows]
        if self.problem is not None:
            lines += ["", f"does not fit: {self.problem}"]
        return "\n".join(lines)


def estimate(config: Config, machine: Machine | None = None) -> Estimate:
    """What a run needs on this machine, or on another. ``ConfigError`` if there is no such model."""
    sizes = sizes_of(config)
    machine = machine or this_machine()
    return Estimate(config, sizes, machine, _parts(config, sizes, machine))


def _parts(config: Config, sizes: Sizes, machine: Machine) -> tuple[MemoryUse, ...]:
    limit = trajectory_bytes(config, machine.memory)
    return (*_rollout(config, sizes), *_trainer(config, sizes), *_rest(config, sizes, limit))


def _lighter(config: Config) -> Iterator[list[Change]]:
    """What may be tried to make it fit: values of settings that change no update, the least change first."""
    training, rollout = config.training, config.rollout
    if training.device != "cpu" and training.ranks == 1:
        yield [("training", "offload_moments", True)]
    yield [("training", "micro_tokens", each) for each in _halves(training.micro_tokens, FEWEST)]
    yield [("training", "activation_checkpointing", True)]
    least = config.longest_prompt + config.longest_response + config.strategies.headroom
    yield [("rollout", "kv_tokens", each) for each in _halves(rollout.kv_tokens, max(least, rollout.max_running))]


def _halves(value: int, least: int) -> Iterator[int]:
    """At least one."""
    while True:
        yield (value := max(value // 2, least))
        if value == least:
            return


def _words(changes: Sequence[Change]) -> list[str]:
    return [f"{section}.{setting}={render_flow(value)}" for section, setting, value in changes]


def _changed(config: Config, change: Change) -> Config:
    section, setting, value = change
    return replace(config, **{section: replace(getattr(config, section), **{setting: value})})


def settled(config: Config, machine: Machine) -> tuple[Config, str]:
    """With what was left to the machine decided, and a line if that is a loss."""
    if config.processes.standby is not None:
        return config, ""
    needs = estimate(config, machine)
    room = machine.shared is None or needs.of("parameters", "standby") <= machine.shared
    without = replace(config, processes=replace(config.processes, standby=False))
    if (needs.problem is None and room) or estimate(without, machine).problem is not None:
        return config, ""
    where = "memory" if room else f"shared memory, of which {gigabytes(machine.shared or 0)} are free"
    return without, (
        f"processes.standby is off, since its {gigabytes(needs.of('standby'))} do not fit in {where}: a trainer that "
        "dies will end the run, which can then be resumed from its newest checkpoint"
    )


def trajectory_bytes(config: Config, free: int) -> int:
    """The memory limit of the trajectory server: as configured, or a share of what is free, but at least one step."""
    if config.processes.trajectory_gib is not None:
        return int(config.processes.trajectory_gib * 2**30)
    return max(free // TRAJECTORY_SHARE, config.groups * _group(config))


def _group(config: Config) -> int:
    """Most bytes of one group."""
    return config.members * config.longest_response * PAYLOAD_BYTES + config.longest_prompt * 4


def _rollout(config: Config, sizes: Sizes) -> list[MemoryUse]:
    rollout, device = config.rollout, numbered(config.rollout.device)
    item, count = BYTES[rollout.dtype], rollout.instances
    weights, kv = sizes.parameters * item, rollout.kv_tokens * sizes.kv_bytes(item)
    parts: list[MemoryUse] = []
    for role, many in (("instance", count), ("evaluator", 1)):
        of = f" of {many}" if many > 1 else ""
        parts.append(MemoryUse(role, f"weights{of}", weights, device, many))
        parts.append(MemoryUse(role, f"KV memory, {rollout.kv_tokens:,} tokens{of}", kv, device, many))
        parts += _process(role, device, many)
    return parts


def _trainer(config: Config, sizes: Sizes) -> list[MemoryUse]:
    """On several GPUs each rank has its share of the state; on the CPU the shares add up to the whole."""
    training, every = config.training, sizes.parameters
    trained = sizes.adapters(training.lora_rank, training.lora_targets) if training.lora_rank else every
    ranks, devices = training.ranks, training.devices
    activations = sizes.activation_bytes(training.activation_checkpointing, devices[0] != "cpu")
    reference = 4 * every if training.kl_coefficient and not training.lora_rank else 0
    weights = 4 * (every + (trained if training.lora_rank else 0))
    parts: list[MemoryUse] = []
    if training.offload_moments:
        parts.append(MemoryUse("trainer", "optimiser", 8 * trained))
    for device in devices:
        share = len(devices)
        parts += [
            MemoryUse("trainer", "weights", ceil(weights / share), device),
            MemoryUse("trainer", "gradients", ceil(4 * trained / share), device),
            MemoryUse(
                "trainer",
                f"activations, about, of {training.micro_tokens:,} tokens",
                training.micro_tokens * activations,
                device,
                ranks // share,
            ),
        ]
        if not training.offload_moments:
            parts.append(MemoryUse("trainer", "optimiser", ceil(8 * trained / share), device))
        if device != "cpu":
            half = 2 * (every if ranks == 1 else every // max(1, sizes.layers))  # of ranks one block at a time
            parts.append(MemoryUse("trainer", "weights in bfloat16 and logits", half + LOGITS, device))
        if reference:
            parts.append(MemoryUse("trainer", "reference weights", ceil(reference / share), device))
        parts += _process("trainer", device, ranks // share)
    steady = sum(part.total for part in parts if part.device == "cpu")
    if ranks > 1 and (more := 4 * every * ranks - steady) > 0:
        parts.append(MemoryUse("trainer", "weights while each rank reads them", more))
    return parts


def _rest(config: Config, sizes: Sizes, limit: int) -> list[MemoryUse]:
    groups = (config.staleness + 1) * (config.groups + config.redundancy)
    adapters = sizes.adapters(config.training.lora_rank, config.training.lora_targets)
    trained = adapters if config.training.lora_rank else sizes.parameters
    weights = BYTES[config.rollout.dtype] * sizes.parameters
    state = STATE_BYTES * trained if config.processes.with_standby else 0
    what = f"trainer's state, {STATE_BYTES} bytes per trained parameter, twice{'' if state else ': off'}"
    return [
        MemoryUse("parameters", "two versions in shared memory", weights, count=2),
        MemoryUse("standby", what, state, count=2),
        MemoryUse("trajectories", "tokens, at most", min(limit, groups * _group(config))),
        MemoryUse("rewards", "workers, about", WORKER, count=config.reward.workers),
        MemoryUse("control", "process, about", CONTROL),
    ]


def _process(role: str, device: str, count: int) -> list[MemoryUse]:
    parts = [MemoryUse(role, "process, about", PROCESS, "cpu", count)]
    if device != "cpu":
        parts.append(MemoryUse(role, "CUDA, about", CONTEXT, device, count))
    return parts


def gigabytes(size: int) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 / 10 else f"{size / 2**20:.1f} MiB"
