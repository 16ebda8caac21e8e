"""Chat templates in the manners of the field, and a tokenizer whose merges cross what templates write."""

from functools import lru_cache
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

SPECIAL = ["<|end|>", "<|start|>", "<|text|>", "<|header|>", "<|headed|>", "<|turn|>", "</s>", "<s>"]
LEARNT = [
    "the cat said hello to the cat\n\nand the dog: hello hello [user] [assistant] [tool]\n",
    "aaaa bbbb  cc\n\n\n",
]

PLAIN = (
    "{% for each in messages %}<|start|>{{ each.role }}\n{{ each.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
"""ChatML."""

_CALLS = (
    "{% for call in each.tool_calls or [] %}\n<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
    "\n</tool_call>{% endfor %}"
)
_TOOLS = (
    "{% if tools %}<|start|>system\n{% if messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}"
    "\n# Tools\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|end|>\n"
    "{% elif messages[0].role == 'system' %}<|start|>system\n{{ messages[0].content }}<|end|>\n{% endif %}"
)
_ANSWERS = (  # tool results that follow each other share one user's turn
    "{% elif each.role == 'tool' %}{% if loop.previtem.role != 'tool' %}<|start|>user{% endif %}"
    "\n<tool_response>\n{{ each.content }}\n</tool_response>"
    "{% if loop.last or loop.nextitem.role != 'tool' %}<|end|>\n{% endif %}"
)
CALLS = (
    _TOOLS + "{% for each in messages %}{% if each.role == 'assistant' %}"
    "<|start|>assistant\n{{ each.content }}" + _CALLS + "<|end|>\n" + _ANSWERS + "{% elif not loop.first or "
    "each.role != 'system' %}<|start|>{{ each.role }}\n{{ each.content }}<|end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
"""ChatML with tools, as Qwen2.5 has them."""

FORGETS = (
    _TOOLS + "{% set told = namespace(last=0) %}{% for each in messages %}{% if each.role == 'user' %}"
    "{% set told.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for each in messages %}{% if each.role == 'assistant' %}<|start|>assistant\n"
    "{% set said = each.content.split('</think>')[-1].lstrip('\n') %}"
    "{% set thought = each.content.split('</think>')[0].split('<think>')[-1].strip('\n') "
    "if '</think>' in each.content else '' %}"
    "{% if loop.index0 > told.last and (loop.last or thought) %}<think>\n{{ thought }}\n</think>\n\n{% endif %}"
    "{{ said }}" + _CALLS + "<|end|>\n" + _ANSWERS + "{% elif not loop.first or each.role != 'system' %}"
    "<|start|>{{ each.role }}\n{{ each.content }}<|end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
"""Drops the reasoning of answers before the last user's message, as Qwen3 does; keeps it while tools are called."""

HEADERS = (
    "<|text|>{% for each in messages %}{% if each.role == 'assistant' and each.tool_calls %}"
    "{% if each.tool_calls | length != 1 %}{{ raise_exception('one tool call at a time') }}{% endif %}"
    "<|header|>assistant<|headed|>\n\n{{ each.content | trim }}"
    '{"name": "{{ each.tool_calls[0].function.name }}", '
    '"parameters": {{ each.tool_calls[0].function.arguments | tojson }}}<|turn|>'
    "{% elif each.role == 'tool' %}<|header|>ipython<|headed|>\n\n{{ each.content | tojson }}<|turn|>"
    "{% else %}<|header|>{{ each.role }}<|headed|>\n\n{{ each.content | trim }}<|turn|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|header|>assistant<|headed|>\n\n{% endif %}"
)
"""As Llama 3: trims every text, and takes one call at a time."""

DATED = "<|text|>{{ strftime_now('%d %b %Y') }}\n" + PLAIN
DATED_UNLESS = "{% if date is not defined %}{% set date = '26 Jul 2024' %}{% endif %}<|text|>{{ date }}\n" + PLAIN

MOVES = (
    "<s>{% for each in messages %}{% if each.role == 'user' %}"
    "{% if tools and loop.last %}[TOOLS]{{ tools | tojson }}[/TOOLS]{% endif %}[INST] {{ each.content }} [/INST]"
    "{% elif each.role == 'assistant' %} {{ each.content }}</s>"
    "{% elif each.role == 'tool' %}[RESULT]{{ each.content }}[/RESULT]{% else %}{{ raise_exception('no system') }}"
    "{% endif %}{% endfor %}"
)
"""As Mistral: the tools stand before the last user's message."""

SPACED = (
    "<s>{% for each in messages %}{% if each.role == 'assistant' %} {{ each.content | trim }} </s>"
    "{% elif each.role == 'user' or each.role == 'tool' %}[INST] {{ each.content }} [/INST]"
    "{% else %}{{ raise_exception('no system') }}{% endif %}{% endfor %}"
)
"""As Llama 2: no words before an answer, and a space before its end."""

ENDLESS = "{% for each in messages %}{{ each.role }}: {{ each.content }}\n\n{% endfor %}"
ENDLESS += "{% if add_generation_prompt %}assistant:{% endif %}"
"""Nothing ends an answer."""

DEAF = PLAIN.replace(
    "<|start|>{{ each.role }}", "{% if each.role == 'tool' %}{% continue %}{% endif %}<|start|>{{ each.role }}"
)
"""Leaves out what tools say."""

GOOD = {"plain": PLAIN, "calls": CALLS, "headers": HEADERS, "spaced": SPACED, "dated-unless": DATED_UNLESS}
BAD = {
    "forgets": (FORGETS, "drops the reasoning of an answer when a user message follows"),
    "dated": (DATED, "writes the date"),
    "moves": (MOVES, "writes a message otherwise when others follow it"),
    "endless": (ENDLESS, "does not end an answer by a token at which the model stops"),
    "deaf": (DEAF, "leaves out tool messages"),
    "broken": ("{{ raise_exception('closed') }}", "refuses a user's message"),
    "no-tools": (
        PLAIN.replace("{{ each.content }}", "{{ each.content if each.role != 'tool' else raise_exception('no') }}"),
        "cannot append a tool message",
    ),
}


@lru_cache
def learnt() -> str:
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore[reportAttributeAccessIssue]
    raw.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    trainer = trainers.BpeTrainer(
        vocab_size=340,
        special_tokens=SPECIAL,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    raw.train_from_iterator(LEARNT * 20, trainer)
    return raw.to_str()


def words_of(template: str) -> Any:
    """A tokenizer with merges, so that one text has many encodings, of which ``encode`` gives one."""
    words = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(learnt()), eos_token="<|end|>")
    words.chat_template = template
    return words


def stops_of(words: Any) -> set[int]:
    return {words.convert_tokens_to_ids(each) for each in ("<|end|>", "<|turn|>", "</s>")}
