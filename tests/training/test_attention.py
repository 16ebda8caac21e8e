"""Rows of a packed pass see themselves only, whichever way their attention is computed."""

import copy
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from staleflow.training import attention as module
from staleflow.training.attention import attend_by_rows, attends_by_rows, by_rows, flash_shares
from staleflow.training.pieces import Layout, Pieces, Sizes

LENGTHS = [3, 1, 6, 2]
SHAPE: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": 12}
HEADS: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2}


def models() -> list[Any]:
    torch.manual_seed(0)
    return [
        LlamaForCausalLM(LlamaConfig(**SHAPE, **HEADS)).double(),
        Qwen3ForCausalLM(Qwen3Config(**SHAPE, **HEADS, head_dim=4)).double(),
    ]


@pytest.mark.parametrize("family", [0, 1], ids=["llama", "qwen3"])
def test_packed_rows_have_the_outputs_and_gradients_of_masked_ones(family: int) -> None:
    model = models()[family]
    by_mask = copy.deepcopy(model)
    attend_by_rows(model)
    tokens = torch.randint(12, (1, sum(LENGTHS)), generator=torch.Generator().manual_seed(1))
    positions = torch.cat([torch.arange(each) for each in LENGTHS])[None]
    packed = by_rows(Layout.of(Sizes(LENGTHS, [0] * len(LENGTHS))).pieces(torch.from_numpy))
    found = model(input_ids=tokens, position_ids=positions, use_cache=False, **packed).logits
    expected = by_mask(input_ids=tokens, position_ids=positions, use_cache=False).logits
    assert torch.allclose(found, expected, atol=1e-10)
    found.sin().sum().backward()
    expected.sin().sum().backward()
    for one, other in zip(model.parameters(), by_mask.parameters(), strict=True):
        assert torch.allclose(one.grad, other.grad, atol=1e-10)


def test_a_model_without_rows_works_as_before() -> None:
    model = models()[0]
    plain = copy.deepcopy(model)
    attend_by_rows(model)
    tokens = torch.tensor([[0, 0, 1, 2], [3, 4, 5, 6]])
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    found, expected = (each(tokens, attention_mask=mask).logits[:, 2:] for each in (model, plain))
    assert torch.allclose(found, expected, atol=1e-12)
    assert "staleflow" not in model.config.to_json_string()


def test_attention_in_windows_is_left_to_transformers() -> None:
    sliding = Qwen3Config(**SHAPE, **HEADS, head_dim=4, use_sliding_window=True, sliding_window=2, max_window_layers=0)
    model = Qwen3ForCausalLM(sliding)
    attend_by_rows(model)
    assert not attends_by_rows(model)


def test_a_call_that_sees_other_keys_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert flash_shares(torch.device("cpu"))
    plain, asked = module.attention, list[Pieces]()

    def wrong(*states: Any, pieces: Pieces) -> Any:
        """The second call, which would be that of the GPU, sees other keys."""
        asked.append(pieces)
        assert pieces.context is not None
        shifted = pieces._replace(context=pieces.context._replace(where_K=pieces.context.where_K.roll(1)))
        return plain(*states, pieces=pieces if len(asked) == 1 else shifted)

    monkeypatch.setattr(module, "attention", wrong)
    assert not flash_shares(torch.device("cpu"))
    assert len(asked) == 2
