"""The package ``renderers`` as the renderer of a run, with a tokenizer that has Qwen3's special tokens."""

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from staleflow.agents.options import Environment
from staleflow.agents.render import opened
from staleflow.errors import ConfigError
from tests.agents.serving import TOOLS, USER
from tests.agents.templates import PLAIN, learnt

SPECIAL = ["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<tool_call>", "</tool_call>"]
SPECIAL += ["<tool_response>", "</tool_response>", "<think>", "</think>"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    words = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(learnt()), eos_token="<|im_end|>")
    words.add_tokens(SPECIAL, special_tokens=True)
    words.chat_template = PLAIN
    words.save_pretrained(path := tmp_path_factory.mktemp("qwen"))
    return path


def made(folder: Path, **options: Any) -> Any:
    words = PreTrainedTokenizerFast.from_pretrained(folder)
    return opened(folder, [words.convert_tokens_to_ids("<|im_end|>")], Environment(**options))


def test_without_the_package_the_setting_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("staleflow.agents.options.find_spec", lambda _name: None)
    with pytest.raises(ConfigError, match="pip install renderers"):
        Environment(renderer="qwen3")


def test_it_extends_the_tokens_before_and_reads_calls_by_their_tokens(folder: Path) -> None:
    pytest.importorskip("renderers", reason="pip install 'staleflow[agents]'")
    renderer = made(folder, renderer="qwen3", renderer_arguments={"thinking_retention": "all"})
    words = renderer.words
    first = renderer.first(USER, TOOLS)
    assert first[: len(renderer.stem)] == renderer.stem
    text = '<think>\nhm\n</think>\n\nso\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>'
    own = words.encode(text, add_special_tokens=False)
    message = renderer.parse(own)
    assert message["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": 1}'}
    assert message["content"].strip() == "so"
    result = {"role": "tool", "content": "2", "tool_call_id": message["tool_calls"][0]["id"]}
    extension = renderer.extend([*first, *own], [result], TOOLS, made=len(own))
    assert words.decode(extension) == (
        "\n<|im_start|>user\n<tool_response>\n2\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )
    assert renderer.extend([*first, *own[:3]], [{"role": "user", "content": "x"}], TOOLS, made=3) is not None


def test_a_role_that_it_cannot_append_is_refused_with_the_fix(folder: Path) -> None:
    pytest.importorskip("renderers", reason="pip install 'staleflow[agents]'")
    with pytest.raises(ConfigError, match="thinking_retention: all"):
        made(folder, renderer="qwen3")
    made(folder, renderer="qwen3", appends=("tool",))
    with pytest.raises(ConfigError, match="renderer=qwen33 cannot be used"):
        made(folder, renderer="qwen33")
