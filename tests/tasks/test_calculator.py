"""The embedded task of several turns: what it asks, what its tokens are, and what its teacher does wrong."""

import re

from hypothesis import given
from hypothesis import strategies as st

from staleflow.agents.render import Renderer
from staleflow.tasks.calculator import (
    END,
    FEWEST_NUMBERS,
    MOST,
    MOST_NUMBERS,
    MOST_PROMPT_TOKENS,
    MOST_RESPONSE_TOKENS,
    VOCABULARY,
    Calculator,
    Teacher,
    encoded,
    prompt_text,
    transcript,
)
from staleflow.tasks.calculator_model import tokenizer

numbers = st.integers(FEWEST_NUMBERS, MOST_NUMBERS).flatmap(
    lambda count: st.lists(st.integers(1, MOST // count), min_size=count, max_size=count)
)


def test_problems_are_the_same_for_the_same_seed_and_never_in_both_splits() -> None:
    task = Calculator(3)
    assert [task.problem(at) for at in range(50)] == [Calculator(3).problem(at) for at in range(50)]
    trained = {tuple(Calculator(seed).problem(at).facts["numbers"]) for seed in range(3) for at in range(300)}
    held = {tuple(task.problem(at, "held-out").facts["numbers"]) for at in range(300)}
    assert not trained & held


@given(numbers)
def test_the_right_transcript_ends_with_the_sum_and_fits(asked: list[int]) -> None:
    turns = transcript(asked, lambda _call: "add")
    assert turns[-1].made == f"{sum(asked)}<|end|>"
    assert len(turns) == len(asked)
    assert len(encoded(prompt_text(asked))) <= MOST_PROMPT_TOKENS
    assert sum(len(encoded(each.made)) + len(encoded(each.given)) for each in turns) <= MOST_RESPONSE_TOKENS


@given(numbers, st.lists(st.floats(0, 1, exclude_max=True), min_size=MOST_NUMBERS, max_size=MOST_NUMBERS))
def test_the_teacher_ends_every_episode_and_is_right_only_if_it_used_every_number(
    asked: list[int], chances: list[float]
) -> None:
    turns = transcript(asked, lambda call: Teacher().step(call, chances[call]))
    used = [int(each) for turn in turns for each in re.findall(r'"b": (\d+)', turn.made)]
    answer = int(turns[-1].made.removesuffix("<|end|>"))
    assert answer == asked[0] + sum(used)
    assert (answer == sum(asked)) == (len(used) == len(asked) - 1)


def test_every_text_of_the_task_is_its_tokens() -> None:
    words = tokenizer()
    assert len(words) == len(VOCABULARY) == len(set(VOCABULARY))
    for at in range(50):
        asked = Calculator().problem(at)
        text = prompt_text(asked.facts["numbers"])
        rendered = words.apply_chat_template(asked.prompt, add_generation_prompt=True, tokenize=False)  # pyright: ignore[reportArgumentType]
        assert rendered == text
        for turn in transcript(asked.facts["numbers"], lambda _call: "add"):
            text += turn.made + turn.given
        assert words(text).input_ids == encoded(text)
        assert words.decode(encoded(text)) == text


def test_its_template_only_appends() -> None:
    renderer = Renderer(tokenizer(), [END])
    renderer.prove()
    asked = Calculator().problem(0)
    held = renderer.first(asked.prompt)  # pyright: ignore[reportArgumentType]
    for turn in transcript(asked.facts["numbers"], lambda _call: "add"):
        held += encoded(turn.made)
        message = renderer.parse(encoded(turn.made))
        if turn.given:
            told = re.findall(r"\d+", turn.given)[0]
            result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": told}
            assert renderer.extend(held, [result]) == encoded(turn.given)
            held += encoded(turn.given)
