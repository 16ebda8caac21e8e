import contextlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from staleflow.config import Config, ConfigError, load
from staleflow.servers.payloads import TOKEN
from staleflow.tasks import adder
from staleflow.tasks.adder import Adder
from staleflow.tasks.opening import TaskSet, model_folder, open_source, open_task, stop_tokens, was_cut
from staleflow.tasks.task import TaskError

WORDS = ["<unk>", "<end>", "<user>", "<model>", "Q:", "sum", *map(str, range(100))]
GSM8K = Path(__file__).parents[3] / "shared/data/gsm8k"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model without weights: what is read to open a task."""
    folder = tmp_path / "model"
    folder.mkdir()
    words = Tokenizer(WordLevel({word: at for at, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = WhitespaceSplit()  # pyright: ignore[reportAttributeAccessIssue]
    words.add_special_tokens(["<end>", "<user>", "<model>"])
    words.save(str(folder / "tokenizer.json"))
    files: dict[str, dict[str, Any]] = {
        "config.json": {"vocab_size": 128, "eos_token_id": 1, "model_type": "llama"},
        "generation_config.json": {"eos_token_id": [7, 1]},
        "tokenizer_config.json": {"eos_token": "<end>", "tokenizer_class": "PreTrainedTokenizerFast"},
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    template = "{% for m in messages %}{{ '<user> ' + m.content + ' ' }}{% endfor %}{{ '<model>' }}"
    (folder / "chat_template.jinja").write_text(template)
    return folder


def rows(path: Path, *numbers: int, words: int = 1) -> Path:
    lines = [json.dumps({"prompt": " ".join([str(number)] * words), "answer": number}) for number in numbers]
    path.write_text("\n".join(lines) + "\n")
    return path


def opened(folder: Path, source: Path | str, *more: str) -> TaskSet:
    given = [f"model={folder}", f"data.source={source}", "reward.function=last-number", *more]
    return open_config(load("plain", given), folder)


def open_config(config: Config, folder: Path) -> TaskSet:
    source = open_source(config.data, config.seed)
    return open_task(config.data, source, folder, config.seed, config.evaluation.problems)


def trained(task: TaskSet, count: int) -> list[str]:
    return [str(task.prompts.problem(number).prompt) for number in range(count)]


def test_the_embedded_task_needs_no_tokenizer_and_trains_on_what_the_warm_start_has_not_seen(tmp_path: Path) -> None:
    task = open_config(load(None, ["seed=3", "evaluation.problems=5"]), tmp_path / "nothing here")
    assert task.prompts.problem(7) == Adder(1003).problem(7)
    assert [problem for _, problem in task.held_out] == [Adder(0).problem(at, "held-out") for at in range(5)]
    assert task.held_out[0][0] == task.held_out[0][1].prompt
    assert (task.stop_tokens, task.vocab_size, task.max_prompt_tokens) == ((adder.END,), len(adder.VOCABULARY), 4)
    assert task.decode(Adder().solve(task.held_out[0][1])).endswith("</s>")


def test_held_out_prompts_are_never_trained_on(folder: Path, tmp_path: Path) -> None:
    source = rows(tmp_path / "a.jsonl", *range(40), *range(40))  # each twice
    task = opened(folder, source, "data.held_out_count=10")
    held = {str(problem.prompt) for _, problem in task.held_out}
    assert len(task.held_out) == len(held) == 10
    assert sorted({*trained(task, 60)} | held) == sorted(map(str, range(40)))
    assert not held & set(trained(task, 60))


def test_the_split_does_not_depend_on_seed_order_or_evaluation(folder: Path, tmp_path: Path) -> None:
    def held(name: str, numbers: list[int], *more: str) -> set[Any]:
        task = opened(folder, rows(tmp_path / name, *numbers), *more)
        return {str(problem.prompt) for _, problem in task.held_out}

    some = held("a.jsonl", list(range(40)))
    assert len(some) == 4, "a tenth"
    assert held("b.jsonl", list(reversed(range(40))), "seed=5") == some
    assert held("a.jsonl", list(range(40)), "evaluation.problems=2") < some
    fewer, more = (opened(folder, tmp_path / "a.jsonl", f"evaluation.problems={n}") for n in (2, 4))
    assert fewer.fingerprint == more.fingerprint
    assert opened(folder, tmp_path / "a.jsonl", "seed=1").fingerprint != more.fingerprint


def test_a_held_out_file_is_kept_out_of_training(folder: Path, tmp_path: Path) -> None:
    held = rows(tmp_path / "held.jsonl", 1, 2, 3, 50)
    task = opened(folder, rows(tmp_path / "a.jsonl", *range(10)), f"data.held_out={held}")
    assert [problem.prompt for _, problem in task.held_out] == ["1", "2", "3", "50"]
    assert sorted(trained(task, 7)) == ["0", "4", "5", "6", "7", "8", "9"]


def test_templates_and_chats_wrap_the_prompt(folder: Path, tmp_path: Path) -> None:
    source = rows(tmp_path / "a.jsonl", *range(20))
    task = opened(folder, source, "data.template='Q: {prompt} sum'")
    tokens, problem = task.held_out[0]
    assert [WORDS[token] for token in tokens] == ["Q:", problem.prompt, "sum"]
    task = opened(folder, source, "data.chat=true", "data.system='sum'")
    tokens, problem = task.held_out[0]
    assert [WORDS[token] for token in tokens] == ["<user>", "sum", "<user>", problem.prompt, "<model>"]
    ids = np.frombuffer(task.prompts.ids(0), TOKEN).tolist()
    assert [WORDS[token] for token in ids][3] == task.prompts.problem(0).prompt
    assert task.decode([*tokens, 5, 1]) == f"sum {problem.prompt} sum", "special tokens are not text"


@pytest.mark.parametrize("kind", ["slow", "fast"])
def test_a_tokenizer_that_brings_code_is_neither_run_nor_asked_about(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """transformers asks on the terminal whether to run it unless it is asked not to."""
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Evil: pass\n")
    classes = [None, "evil.Evil"] if kind == "fast" else ["evil.Evil", None]
    settings = {"tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": classes}}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked"))
    source = rows(tmp_path / "a.jsonl", *range(20))
    with contextlib.suppress(TaskError):
        opened(folder, source, "data.chat=true")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "template", ["{{ messages.__class__.__mro__ }}{{ ''.__class__.mro() }}", "{{ 1/0 }}", "{% if %}"]
)
def test_a_chat_template_that_breaks_out_or_down_is_one_line(folder: Path, tmp_path: Path, template: str) -> None:
    (folder / "chat_template.jinja").write_text(template)
    source = rows(tmp_path / "a.jsonl", *range(20))
    with pytest.raises(TaskError, match=r"chat template of .* failed .*data\.chat=false") as error:
        opened(folder, source, "data.chat=true")
    assert "\n" not in str(error.value)


def test_prompts_that_are_too_long_are_left_out(folder: Path, tmp_path: Path) -> None:
    source = tmp_path / "a.jsonl"
    source.write_text("".join(json.dumps({"prompt": "sum " * n, "answer": n}) + "\n" for n in range(1, 21)))
    task = opened(folder, source, "data.max_prompt_tokens=5", "data.held_out_count=19")
    assert all(len(tokens) <= 5 for tokens, _ in task.held_out)
    with pytest.raises(TaskError, match="raise"):
        opened(folder, rows(source, *range(20), words=9), "data.max_prompt_tokens=5")


def test_stop_tokens_come_from_every_file_that_names_some(folder: Path) -> None:
    assert stop_tokens(folder) == (7, 1)
    (folder / "tokenizer_config.json").write_text('{"eos_token": {"content": "<model>"}}')
    assert stop_tokens(folder) == (7, 1, 3)
    (folder / "generation_config.json").unlink()
    assert stop_tokens(folder) == (1, 3)
    (folder / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="cannot be read"):
        stop_tokens(folder)


def test_generators_and_endless_tasks_are_sources(folder: Path) -> None:
    task = opened(folder, "staleflow.tasks.arithmetic:problems", "data.arguments={operations: +}")
    assert len(task.held_out) == 8
    assert str(task.prompts.problem(0).prompt).startswith("What is")
    endless = opened(folder, "tests.tasks.test_sources:endless", "evaluation.problems=3")
    assert endless.prompts.problem(5) == Adder(3).problem(5)
    assert [problem for _, problem in endless.held_out] == [Adder(3).problem(at, "held-out") for at in range(3)]


@pytest.mark.parametrize(
    ("source", "more", "line"),
    [
        ("staleflow.tasks.arithmetic:problems", "data.arguments={digit: 1}", "correct data.arguments"),
        ("staleflow.tasks.arithmetic:problems", "data.arguments={digits: 0}", "give at least 1"),
        ("staleflow.tasks.arithmetic:problems", "data.held_out_count=207", "lower data.held_out_count"),
    ],
)
def test_data_that_cannot_be_made_is_one_clear_line(folder: Path, source: str, more: str, line: str) -> None:
    with pytest.raises(TaskError, match=line) as error:
        opened(folder, source, more)
    assert "\n" not in str(error.value)


def test_a_single_prompt_is_not_told_to_hold_out_fewer_than_one(folder: Path, tmp_path: Path) -> None:
    """It said ``or a lower data.held_out_count``, which must be at least 1."""
    with pytest.raises(TaskError, match=r"one prompt only, too few to hold out 1: give data.held_out$"):
        opened(folder, rows(tmp_path / "a.jsonl", 1, 1))


def test_a_damaged_tokenizer_is_one_clear_line(folder: Path, tmp_path: Path) -> None:
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(TaskError, match="save a fast tokenizer"):
        opened(folder, rows(tmp_path / "a.jsonl", *range(20)))


def test_the_model_of_each_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr("staleflow.tasks.base_model.base_model", lambda *given: asked.append(given) or tmp_path)
    monkeypatch.setattr("staleflow.tasks.opening.smollm", lambda cache: Path(cache) / "smollm")
    assert model_folder("adder", str(tmp_path), 4) == tmp_path
    assert (asked[0][0], asked[0][1].seed) == (str(tmp_path), 4)
    assert model_folder("smollm2-135m", "/cache") == Path("/cache/smollm")
    assert model_folder("/models/qwen", "/cache") == Path("/models/qwen")


@pytest.mark.skipif(not GSM8K.is_dir(), reason="needs ../shared/data/gsm8k")
def test_gsm8k_is_read_from_its_path(folder: Path) -> None:
    files = [f"data.source={GSM8K}/train.jsonl", f"data.held_out={GSM8K}/test.jsonl", "data.chat=false"]
    config = load("gsm8k-smollm", [f"model={folder}", *files, "evaluation.problems=16"])
    task = open_config(config, folder)
    assert len(task.held_out) == 16
    assert "####" in task.prompts.problem(0).facts["answer"]


def test_messages_are_asked_as_they_are_and_split_as_texts_are(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    said = [[{"role": "user", "content": str(at)}, {"role": "assistant", "content": "sum"}] for at in range(20)]
    path.write_text("\n".join(json.dumps({"prompt": each, "answer": 1}) for each in [*said, *said]) + "\n")
    task = opened(folder, path, "data.chat=true", "data.held_out_count=5")
    held = [problem.prompt for _, problem in task.held_out]
    assert len(held) == 5
    assert not [prompt for prompt in held if str(prompt) in trained(task, 30)]
    first = task.prompts.problem(0).prompt
    words = [WORDS[token] for token in np.frombuffer(task.prompts.ids(0), TOKEN)]
    assert words == ["<user>", first[0]["content"], "<user>", "sum", "<model>"]  # type: ignore[index]
    system = opened(folder, path, "data.chat=true", "data.held_out_count=5", "data.system=sum")
    assert len(system.prompts.ids(0)) == len(task.prompts.ids(0)) + 2 * TOKEN.itemsize
    with pytest.raises(TaskError, match=r"give data\.chat=true"):
        opened(folder, path)


def test_what_is_left_out_is_counted_and_said(folder: Path, tmp_path: Path) -> None:
    path = rows(tmp_path / "a.jsonl", *range(20))
    path.write_text(path.read_text() + json.dumps({"prompt": "1 2 3 4 5 6 7 8 9", "answer": 1}) + "\n")
    (tmp_path / "held.jsonl").write_text(json.dumps({"prompt": "99", "answer": 1}) + "\n")
    task = opened(folder, path, f"data.held_out={tmp_path / 'held.jsonl'}", "data.max_prompt_tokens=8")
    assert (task.size, task.left_out) == (20, 1)
    limit = "data.max_prompt_tokens=8 (the longest has 9)"
    assert task.about() == f"20 problems to train on, 1 held out; left out: 1 longer than {limit}"


def test_a_response_is_cut_unless_an_end_token_or_a_stop_string_ended_it(folder: Path, tmp_path: Path) -> None:
    task = opened(folder, rows(tmp_path / "a.jsonl", *range(20)))
    number = {word: at for at, word in enumerate(WORDS)}

    def ids(*words: str) -> bytes:
        return np.asarray([number[word] for word in words], TOKEN).tobytes()

    cut = was_cut(task, ())
    assert [cut(ids("1", "<end>")), cut(ids("1", "2")), cut(ids("sum", "Q:"))] == [False, True, True]
    assert cut(b"")
    assert not was_cut(task, ("um Q:",))(ids(*["2"] * 30, "sum", "Q:"))
    assert was_cut(task, ("um Q:",))(ids("sum", "Q:", *["2"] * 30)), "it would have ended there"
