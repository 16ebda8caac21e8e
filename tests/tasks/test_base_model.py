from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from bench.adder_accuracy import generate, greedy_accuracy, load
from staleflow.rollout.model_folder import read_config, read_tensors
from staleflow.tasks import base_model as module
from staleflow.tasks.adder import END, VOCABULARY, Adder, Shape, Teacher, make
from staleflow.tasks.base_model import base_model, new_model, tokenizer, warm_start
from staleflow.tasks.recipes import Recipe
from staleflow.tasks.task import TaskError

SMALL = Recipe(steps=3, batch=4, bucket=2, shape=Shape(hidden=16, intermediate=16, layers=1, heads=2))


def test_the_default_model_has_the_promised_size() -> None:
    parameters = sum(weight.numel() for weight in new_model(Shape(), 0).parameters())
    assert 500_000 < parameters < 1_500_000


def test_the_same_recipe_gives_the_same_weights() -> None:
    torch.manual_seed(1)
    one = warm_start(SMALL).state_dict()
    torch.manual_seed(2)  # whoever else draws random numbers in the process must not matter
    two = warm_start(SMALL).state_dict()
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_the_loss_falls() -> None:
    losses: list[float] = []
    warm_start(Recipe(steps=80, shape=Shape(hidden=32, intermediate=64, layers=1)), lambda _, loss: losses.append(loss))
    assert len(losses) == 80
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])


def test_the_folder_is_a_normal_model(tmp_path: Path) -> None:
    folder = base_model(tmp_path / "cache", SMALL)
    model = AutoModelForCausalLM.from_pretrained(folder)
    words = AutoTokenizer.from_pretrained(folder)
    assert model.config.vocab_size == len(VOCABULARY) == len(words)
    assert model.config.eos_token_id == END == words.eos_token_id
    assert words.encode("+7 #3 4 9") == list(make(49, 7, 3).prompt)
    assert words.decode(words.encode("#0 7 0 = 7 0 </s>")) == "#0 7 0 = 7 0 </s>"
    assert read_config(folder).vocabulary == len(VOCABULARY)
    assert {name for name, _ in read_tensors(folder)} == set(model.state_dict())


def test_token_ids_are_the_tasks_own() -> None:
    assert tokenizer().encode(" ".join(VOCABULARY)) == list(range(len(VOCABULARY)))


def test_a_second_call_trains_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = base_model(tmp_path, SMALL)
    monkeypatch.setattr(module, "warm_start", lambda *_: pytest.fail("trained again"))
    assert base_model(tmp_path, SMALL) == folder
    assert [path.name for path in tmp_path.iterdir()] == [folder.name]


@pytest.mark.parametrize(
    "other",
    [
        Recipe(seed=1),
        Recipe(steps=4),
        Recipe(teacher=Teacher(forget=0.5)),
        Recipe(shape=Shape(layers=2)),
        Recipe(learning_rate=1e-3),
    ],
)
def test_another_recipe_is_another_model(other: Recipe, tmp_path: Path) -> None:
    assert other.folder(tmp_path) != Recipe().folder(tmp_path) == Recipe().folder(tmp_path)


def test_a_warm_start_that_is_cut_off_leaves_no_model(tmp_path: Path) -> None:
    def cut_off(step: int, _loss: float) -> None:
        if step == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        base_model(tmp_path, SMALL, cut_off)
    assert list(tmp_path.iterdir()) == []
    assert base_model(tmp_path, SMALL).is_dir()


def test_two_that_make_the_same_model_at_once_agree(tmp_path: Path) -> None:
    made: list[Path] = []

    def meanwhile(step: int, _loss: float) -> None:
        if step == 0:
            made.append(base_model(tmp_path, SMALL))

    assert base_model(tmp_path, SMALL, meanwhile) == made[0]
    assert [path.name for path in tmp_path.iterdir()] == [made[0].name]


def test_a_cache_that_cannot_be_written_is_one_clear_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(TaskError, match="name another folder"):
        base_model(tmp_path / "file" / "cache", SMALL)


def test_responses_end_at_the_end_token_or_the_limit(tmp_path: Path) -> None:
    model, task = load(base_model(tmp_path, SMALL)), Adder()
    problems = [task.problem(index) for index in range(4)]
    responses = generate(model, problems, temperature=1.0, seed=3)
    assert responses == generate(model, problems, temperature=1.0, seed=3)
    assert all(END not in response[:-1] and len(response) <= 120 for response in responses)
    assert 0.0 <= greedy_accuracy(model, task, count=8) <= 1.0


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_the_base_model_begins_between_a_fifth_and_two_fifths(tmp_path: Path, seed: int) -> None:
    model = load(base_model(tmp_path, Recipe(seed=seed)))
    assert 0.18 < greedy_accuracy(model, Adder()) < 0.42
