"""Stop strings, which may begin in one token and end in another.

Only the end of the text is decoded, with a few tokens before it: some tokenizers decode a token differently at the
beginning of a text than inside it. ::

    stops = StopStrings(model_folder)
    if stops.available and stops.hit(sequence): ...
"""

from functools import cached_property
from pathlib import Path

from tokenizers import Tokenizer

from staleflow.rollout.sequence import Sequence

BEFORE = 4
"""Tokens that are decoded before the part that is searched."""


class StopStrings:
    def __init__(self, folder: Path) -> None:
        self._file = folder / "tokenizer.json"

    @property
    def available(self) -> bool:
        """Whether the model's folder has a tokenizer."""
        return self._file.is_file()

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        return Tokenizer.from_file(str(self._file))

    def _decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=False)

    def hit(self, sequence: Sequence) -> bool:
        """Whether the last token completed one of the sequence's stop strings."""
        strings = sequence.request.sampling.stop_strings
        # A character takes four bytes at most and a token is at least one byte of text, unless it is a special one.
        longest = max(len(string.encode()) for string in strings) + 4
        begin = max(sequence.since, len(sequence.tokens) - longest)
        before = self._decode(sequence.tokens[max(0, begin - BEFORE) : begin])
        text = self._decode(sequence.tokens[max(0, begin - BEFORE) :])[len(before) :]
        return any(string in text for string in strings)
