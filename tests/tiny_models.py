"""The smallest models, in folders as ``staleflow train`` takes them: of the embedded task, and of any text."""

from dataclasses import replace
from pathlib import Path

import torch
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from staleflow.tasks.base_model import Shape, new_model, tokenizer

TINY = Shape(hidden=16, intermediate=16, layers=1, heads=2)


def save_tiny(folder: Path, seed: int = 0, **shape: int) -> Path:
    new_model(replace(TINY, **shape), seed).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def save_chat(folder: Path, seed: int = 0) -> Path:
    """A model of bytes with a chat template: any text is a prompt."""
    raw = Tokenizer(BPE({each: at for at, each in enumerate(sorted(ByteLevel.alphabet()))}, []))
    raw.pre_tokenizer = ByteLevel(add_prefix_space=False)  # pyright: ignore[reportAttributeAccessIssue]
    raw.decoder = ByteLevelDecoder()  # pyright: ignore[reportAttributeAccessIssue]
    words = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<end>", pad_token="<end>")
    words.chat_template = (
        "{% for each in messages %}[{{ each['role'] }}] {{ each['content'] }}<end>{% endfor %}"
        "{% if add_generation_prompt %}[assistant] {% endif %}"
    )
    torch.manual_seed(seed)
    end = words.convert_tokens_to_ids("<end>")
    assert isinstance(end, int)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(words),
            hidden_size=TINY.hidden,
            intermediate_size=TINY.intermediate,
            num_hidden_layers=TINY.layers,
            num_attention_heads=TINY.heads,
            max_position_embeddings=512,
            eos_token_id=end,
            pad_token_id=end,
            bos_token_id=None,
        )
    )
    model.save_pretrained(folder)
    words.save_pretrained(folder)
    return folder
