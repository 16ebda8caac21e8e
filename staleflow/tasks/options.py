"""The problems of a run: the section ``data`` of the configuration, and the kinds of sources."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from staleflow.registry import Entry, Registry
from staleflow.settings import Count, Section
from staleflow.tasks.adder import PROMPT_TOKENS

ADDER = "adder"
"""The embedded task and its model."""
CALCULATOR = "calculator"
"""The embedded task of several turns, and its model."""
EMBEDDED = (ADDER, CALCULATOR)
SMOLLM = "smollm2-135m"
GYM = "reasoning-gym:"
HUB = "OWNER/NAME"
"""Stands for everything of this form."""
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


def is_hub_name(name: str) -> bool:
    """Whether it could be something on the Hugging Face hub."""
    return _HUB_NAME.fullmatch(name) is not None and not Path(name).exists()


class Sources(Registry[Entry]):
    def key(self, name: str) -> str | None:
        return super().key(name) or (HUB if is_hub_name(name) else None)


SOURCES = Sources(
    "data.source",
    {
        ADDER: Entry("staleflow.tasks.adder:Adder"),
        CALCULATOR: Entry("staleflow.tasks.calculator:Calculator"),
        ".jsonl": Entry("staleflow.tasks.sources:read_jsonl"),
        ".ndjson": Entry("staleflow.tasks.sources:read_jsonl"),
        ".parquet": Entry("staleflow.tasks.sources:read_parquet", needs="pyarrow"),
        HUB: Entry("staleflow.tasks.sources:read_hub", needs="datasets", arguments=True),
        GYM: Entry("staleflow.tasks.sources:reasoning_gym", needs="reasoning_gym", arguments=True),
    },
    takes=(),
    arguments="arguments",
)
"""The user's own is called with ``data.arguments`` only. Files are read by ``read(path, prompt, answer)``."""


def is_file(source: str) -> bool:
    """Whether the source is a data file."""
    return (SOURCES.key(source) or "").startswith(".")


@dataclass(frozen=True, slots=True)
class Data(Section):
    source: Annotated[str, SOURCES] = ADDER
    """``adder`` or ``calculator`` (the embedded tasks), a .jsonl or .parquet file, ``module:function``, ``OWNER/NAME``
    on the Hugging Face hub, or ``reasoning-gym:NAME``."""
    prompt: str = "prompt"
    """The column of the prompt, text or messages, or a text with columns in braces: ``"{Body} {Question}"``."""
    answer: str | None = "answer"
    """The column of the right answer, which the reward sees as ``facts["answer"]``; null: there is none."""
    template: str = "{prompt}"
    """What the model reads: a text in which ``{prompt}`` stands for the prompt."""
    chat: bool = False
    """Wrap the prompt in the chat template of the model's tokenizer."""
    system: str | None = None
    """The system message of a chat; null: that of the chat template, if it has one."""
    max_prompt_tokens: Count = 512
    """Longer prompts are left out."""
    epochs: Count | None = None
    """How often a finite data set is read; null: until the run ends."""
    shuffle: bool = True
    """Shuffle the data anew in every epoch, by the seed."""
    held_out: str | None = None
    """A file with the problems of the evaluation, or ``OWNER/NAME`` on the hub, of which the split test is read; null:
    some are split off the source."""
    held_out_count: Count | None = None
    """How many are split off, by a hash of their prompts; null: a tenth of the data, at most 1,000."""
    arguments: dict[str, Any] = field(default_factory=dict[str, Any])
    """Passed to ``module:function``, to the reasoning-gym task, or to ``datasets.load_dataset`` (such as ``name``)."""

    @property
    def longest_prompt(self) -> int:
        """Tokens that a prompt may have."""
        return PROMPT_TOKENS if self.source == ADDER else self.max_prompt_tokens

    def contradictions(self) -> Iterator[str]:
        if "{prompt}" not in self.template:
            yield "template has no {prompt}: write it where the prompt goes"
        if self.system is not None and not self.chat:
            yield "system is given without a chat: write data.chat=true, or put it into data.template"
        if self.held_out is not None and self.held_out_count is not None:
            yield "held_out and data.held_out_count are both given: leave one out"
        if self.held_out is not None and not is_file(self.held_out) and SOURCES.key(self.held_out) != HUB:
            yield f"held_out={self.held_out}: the ending is not known: give a .jsonl or .parquet file"
