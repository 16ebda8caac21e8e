"""The smallest model of the embedded task, in a folder as ``staleflow train`` takes one."""

from dataclasses import replace
from pathlib import Path

from staleflow.tasks.base_model import Shape, new_model, tokenizer

TINY = Shape(hidden=16, intermediate=16, layers=1, heads=2)


def save_tiny(folder: Path, seed: int = 0, **shape: int) -> Path:
    new_model(replace(TINY, **shape), seed).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder
