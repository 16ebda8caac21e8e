"""Stop strings, which may begin in one token and end in another.

Only the end of the text is decoded, with a few tokens before it: some tokenizers decode a token differently at the
beginning of a text than inside it. ::

    stops = StopStrings(tokenizer.decode)
    if stops.hit(sequence): ...
"""

from collections.abc import Callable

from staleflow.rollout.sequence import Sequence

BEFORE = 4
"""Tokens that are decoded before the part that is searched."""


class StopStrings:
    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode

    def hit(self, sequence: Sequence) -> bool:
        """Whether the last token completed one of the sequence's stop strings."""
        strings = sequence.request.sampling.stop_strings
        # A character takes four bytes at most and a token is at least one byte of text, unless it is a special one.
        longest = max(len(string.encode()) for string in strings) + 4
        begin = max(sequence.prompt, len(sequence.tokens) - longest)
        before = self._decode(sequence.tokens[max(0, begin - BEFORE) : begin])
        text = self._decode(sequence.tokens[max(0, begin - BEFORE) :])[len(before) :]
        return any(string in text for string in strings)
