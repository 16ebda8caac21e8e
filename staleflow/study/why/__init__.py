"""Why a run does what it does: questions in plain words, answered from what the run recorded.

    answer = ask(directory, config, "why is step 12 waiting")
    answer.sentence, answer.facts

Every figure comes from the journal's events, the coordinator's decisions with their inputs, the metrics or the load of
the instances; nothing is guessed from the settings. Only what a setting *would* bring is computed, from the law.
"""

from __future__ import annotations

from importlib import import_module

from staleflow.config import Config
from staleflow.run.directory import RunDirectory
from staleflow.study.why.answer import Answer
from staleflow.study.why.question import parse

__all__ = ["Answer", "ask"]


def ask(directory: RunDirectory, config: Config, text: str) -> Answer:
    question = parse(text)
    module = import_module(f"staleflow.study.why.{question.about}")  # only what is needed: an answer should come soon
    return getattr(module, f"about_{question.about}")(directory, config, question.name)
