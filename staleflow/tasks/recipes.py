"""What the base models of the embedded tasks are made by, and where one is once it is made. Loads nothing heavy.

Recipe(seed=0).folder("cache")      # made by ``base_model``, which needs PyTorch; found again by everybody
"""

import hashlib
import json
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from staleflow.tasks import adder, calculator
from staleflow.tasks.adder import Shape

FORMAT = 1
"""Raise it when the code that makes a model changes what a recipe makes."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """Everything that shapes the weights of the adder's model."""

    seed: int = 0
    steps: int = 1000
    batch: int = 16
    learning_rate: float = 2.5e-3
    warmup: int = 20
    bucket: int = 8
    """Batches that are drawn together and sorted by length, so that little padding is computed."""
    near_end: int = 3
    """Every third problem begins within 9 of the modulus. Wrapping around is too rare to be learned otherwise, and
    reinforcement cannot select what the base model never does right."""
    teacher: adder.Teacher = field(default_factory=adder.Teacher)
    shape: Shape = field(default_factory=Shape)

    def folder(self, cache: str | Path) -> Path:
        parts = [FORMAT, asdict(self), adder.VOCABULARY, adder.ADDITIONS_P, adder.MODULUS]
        return Path(cache) / f"adder-{_key(parts)}"


@dataclass(frozen=True, slots=True)
class CalculatorRecipe:
    """Everything that shapes the weights of the calculator's model."""

    seed: int = 0
    steps: int = 800
    batch: int = 16
    learning_rate: float = 2.5e-3
    warmup: int = 20
    teacher: calculator.Teacher = field(default_factory=calculator.Teacher)
    shape: Shape = calculator.SHAPE

    def folder(self, cache: str | Path) -> Path:
        parts = [FORMAT, asdict(self), calculator.VOCABULARY, calculator.TEMPLATE]
        return Path(cache) / f"calculator-{_key(parts)}"


def _key(parts: list[Any]) -> str:
    """A hash that names the result. It includes library versions, which change the last bits of every sum."""
    versions = [version("torch"), version("transformers")]
    return hashlib.blake2b(json.dumps(parts + versions, sort_keys=True).encode(), digest_size=8).hexdigest()
