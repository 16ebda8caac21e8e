"""Text to tokens and back without what a tokenizer of transformers does around it, which takes longer than the work.

    encode, decode = coders(words)
    decode(encode("hello"))

They are those of its own tokenizer in Rust, without truncation and padding. Where that is not all that the tokenizer
does (it is written in Python, or cleans up what it decodes), they are its ``encode`` and ``decode``.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

Encode = Callable[[str], list[int]]
Decode = Callable[[Sequence[int]], str]
TRIED = (
    "",
    " ",
    "hello",
    " hello  world\n\n",
    "<think>\nhm\n</think>",
    '{"a": [1, 2.5]}',
    "é🙂 ñ",
    "...  don't , no .",
)


class Words(Protocol):
    """A tokenizer of transformers."""

    def apply_chat_template(self, conversation: Any, **options: Any) -> Any: ...

    def encode(self, text: Any, **options: Any) -> Any: ...

    def decode(self, token_ids: Any, **options: Any) -> Any: ...


def coders(words: Words) -> tuple[Encode, Decode]:
    def encode(text: str) -> list[int]:
        return words.encode(text, add_special_tokens=False)

    def decode(tokens: Sequence[int]) -> str:
        return words.decode(list(tokens))

    try:
        from tokenizers import Tokenizer

        own: Any = words
        rust = Tokenizer.from_str(own.backend_tokenizer.to_str())
        rust.no_truncation()
        rust.no_padding()
        special = [own.decode([token]) for token in own.all_special_ids]
    except Exception:  # there is none, or parts of it are written in Python
        return encode, decode

    def encode_in_rust(text: str) -> list[int]:
        return rust.encode(text, add_special_tokens=False).ids

    def decode_in_rust(tokens: Sequence[int]) -> str:
        return rust.decode(list(tokens), skip_special_tokens=False)

    tried = [*TRIED, *special, *(f"{each}\n hello {each}" for each in special)]
    encoded = [encode(text) for text in tried]
    same = encoded == [encode_in_rust(text) for text in tried]
    if same and [decode(each) for each in encoded] == [decode_in_rust(each) for each in encoded]:
        return encode_in_rust, decode_in_rust
    return encode, decode
