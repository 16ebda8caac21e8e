"""GPUs by name, for planning: what a model of a known shape costs on them, and how much of it fits.

gpu = named_gpu("h100")             # None if it is unknown
gpu.instance_gpus(sizes)            # GPUs of an instance that holds the model
gpu.kv_tokens(sizes, gpus=2)        # KV memory that is left on it, in tokens
gpu.training_gpus(parameters=7e9, trained=7e9)
"""

from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from staleflow.config.sizes import Sizes

USABLE = 0.9
"""Share of the memory that weights and KV memory may take together."""
TRAINED_BYTES, FROZEN_BYTES = 16, 2
"""For each parameter that is trained: weights and gradients in 2 bytes, and 4 for each of master weights and moments;
for each other one."""
TRAINING_USABLE = 0.8
"""Share of the memory for these; the rest is for activations."""


@dataclass(frozen=True, slots=True)
class Gpu:
    name: str
    memory: float
    """Bytes."""
    bandwidth: float
    """Bytes per second."""
    flops: float
    """Peak of dense bfloat16 products, per second."""

    def instance_gpus(self, sizes: "Sizes") -> int:
        """The smallest power of two whose memory is not filled by weights beyond a half."""
        gpus = 1
        while 2 * sizes.parameters > gpus * self.memory / 2:
            gpus *= 2
        return gpus

    def kv_tokens(self, sizes: "Sizes", gpus: int) -> int:
        return max(0, int((USABLE * gpus * self.memory - 2 * sizes.parameters) / sizes.kv_bytes(2)))

    def training_gpus(self, parameters: float, trained: float) -> int:
        """How many hold the trainer's state, at least."""
        state = TRAINED_BYTES * trained + FROZEN_BYTES * (parameters - trained)
        return ceil(state / (TRAINING_USABLE * self.memory))


GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("A100-40GB", 40e9, 1.56e12, 312e12),
        Gpu("A100-80GB", 80e9, 2.04e12, 312e12),
        Gpu("A10", 24e9, 0.6e12, 125e12),
        Gpu("B200", 180e9, 8e12, 2250e12),
        Gpu("H100", 80e9, 3.35e12, 989e12),
        Gpu("H20", 96e9, 4e12, 148e12),
        Gpu("H200", 141e9, 4.8e12, 989e12),
        Gpu("L4", 24e9, 0.3e12, 121e12),
        Gpu("L40S", 48e9, 0.86e12, 362e12),
        Gpu("RTX-3090", 24e9, 0.94e12, 71e12),
        Gpu("RTX-4090", 24e9, 1.01e12, 165e12),
        Gpu("RTX-5090", 32e9, 1.79e12, 210e12),
    )
}
"""As their makers state them, of the SXM kind where there are several."""


COMMON = Gpu("GPU", 80e9, 2e12, 400e12)
"""What is assumed of one that is not named."""


def named_gpu(name: str) -> Gpu | None:
    """Capitals and dashes do not matter."""

    def plain(text: str) -> str:
        return "".join(each for each in text.lower() if each.isalnum())

    return next((gpu for known, gpu in GPUS.items() if plain(known) == plain(name)), None)
