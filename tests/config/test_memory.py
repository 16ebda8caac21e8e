import json
from dataclasses import replace
from pathlib import Path

import pytest

from staleflow.config import Config, Machine, estimate, load, settled, this_machine
from staleflow.config.machine import _groups, _visible, cache_folder  # pyright: ignore[reportPrivateUsage]
from staleflow.config.memory import Estimate
from staleflow.config.sizes import read_sizes, sizes_of
from staleflow.rollout.shapes import SHAPES, write
from staleflow.servers.payloads import Limits
from staleflow.training.options import Training

MACHINE = Machine(cores=8, memory=64 * 2**30, gpus=(24 * 2**30,))


@pytest.mark.parametrize("name", SHAPES)
def test_parameters_are_counted_as_transformers_counts_them(name: str, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="needs PyTorch")
    transformers = pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(json.dumps(SHAPES[name]))
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(tmp_path))
    assert sizes_of(Config(model=str(tmp_path))).parameters == model.num_parameters()


def test_the_embedded_model_is_counted_right() -> None:
    module = pytest.importorskip("staleflow.tasks.base_model", reason="needs PyTorch")
    model = module.new_model(module.Shape(), 0)
    assert sizes_of(load(None, [])).parameters == model.num_parameters()


def test_adapters_are_counted_as_peft_counts_them(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="needs PyTorch")
    peft = pytest.importorskip("peft", reason="needs peft")
    transformers = pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(json.dumps(SHAPES["tiny"]))
    config = load(None, [f"model={tmp_path}", "training.lora_rank=4"])
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(tmp_path))
        adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=list(config.training.lora_targets)))
    trained = sum(weight.numel() for weight in adapted.parameters() if weight.requires_grad)
    assert sizes_of(config).adapters(4, config.training.lora_targets) == trained


def test_exact_parts_are_exact() -> None:
    config = load(None, ["redundancy=2", "extra_members=1"])
    plan = estimate(config, MACHINE)
    parts = {(part.role, part.what.partition(",")[0].removesuffix(" of 2")): part for part in plan.parts}
    assert parts["instance", "KV memory"].bytes == config.rollout.kv_tokens * 2 * 3 * 128 * 4
    assert parts["instance", "KV memory"].count == 2
    assert parts["trainer", "optimiser"].bytes == 8 * plan.sizes.parameters
    assert parts["trajectories", "tokens"].bytes == 3 * 34 * (9 * 120 * 8 + 4 * 4)
    assert plan.problem is None


@pytest.mark.parametrize("given", [None, 0.5, 1e-4])
def test_the_memory_limit_of_trajectories_holds_one_step_or_is_refused(given: float | None) -> None:
    config = load(None, [] if given is None else [f"processes.trajectory_gib={given}"])
    for memory in (2**20, 64 * 2**30):
        plan = estimate(config, Machine(cores=2, memory=memory))
        limit = plan.facts()["trajectory_bytes"]
        assert limit == (given * 2**30 // 1 if given else max(memory // 4, limit))
        fits = limit >= config.groups * Limits(120, 4, 0).group_bytes(config.members)
        assert fits == ("trajectory_gib" not in (plan.problem or "")) == (given != 1e-4)
    assert "16.00 GiB of prompts and responses" in estimate(load(None, []), MACHINE).text()


def test_the_gpu_preset_fits_a_card_of_24_gb() -> None:
    plan = estimate(load("one-gpu", []), MACHINE)
    assert plan.problem is None
    assert plan.devices == ["cpu", "cuda:0"]
    assert plan.needed("cuda:0") > 4 * 2**30


@pytest.mark.parametrize(
    ("shape", "micro_tokens", "measured"),
    [("qwen-1.5b", 16_384, 48.9), ("qwen-1.5b", 8_192, 38.3), ("qwen-0.5b", 16_384, 20.1), ("qwen-0.5b", 8_192, 15.1)],
)
def test_a_trainer_on_a_gpu_needs_what_was_measured(
    shape: str, micro_tokens: int, measured: float, tmp_path: Path
) -> None:
    write(shape, tmp_path)
    training = Training(device="cuda", micro_tokens=micro_tokens)
    plan = estimate(Config(model=str(tmp_path), training=training), MACHINE)
    parts = [part for part in plan.parts if part.role == "trainer" and not part.what.startswith(("process", "CUDA"))]
    assert sum(part.total for part in parts) / 2**30 == pytest.approx(measured, rel=0.07)


def test_moments_that_are_kept_off_a_gpu_are_8_bytes_of_each_parameter(tmp_path: Path) -> None:
    write("qwen-0.5b", tmp_path)
    plans = [
        estimate(Config(model=str(tmp_path), training=Training(device="cuda", offload_moments=off)), MACHINE)
        for off in (False, True)
    ]
    there, here = (plans[0].needed(device) - plans[1].needed(device) for device in ("cuda:0", "cpu"))
    assert there == -here == 8 * read_sizes("qwen-0.5b", SHAPES["qwen-0.5b"]).parameters


def test_what_does_not_fit_on_a_gpu_is_told_what_is_enough_by_itself_or_together(tmp_path: Path) -> None:
    """A trainer with a GPU of its own was told to give fewer ``rollout.kv_tokens``, which changed nothing."""
    write("qwen-0.5b", tmp_path)

    def fix(device: str, free: int) -> str:
        config = Config(model=str(tmp_path), training=Training(device=device, micro_tokens=16_384))
        config = replace(config, rollout=replace(config.rollout, device="cuda"))
        found = estimate(config, replace(MACHINE, gpus=(free * 2**30, free * 2**30))).problem
        assert found is not None
        return found.partition(": give ")[2].removesuffix("a smaller model or another device")

    moments, micro, again = (
        "training.offload_moments=true",
        "training.micro_tokens=8192",
        "training.activation_checkpointing=true",
    )
    assert fix("cuda:1", 18) == f"{moments}, {micro}, {again}, "
    assert fix("cuda:1", 13) == f"training.micro_tokens=4096, {again}, "
    assert fix("cuda", 18) == f"{moments} {micro} {again} rollout.kv_tokens=32768 together, "
    assert fix("cuda:1", 3) == ""
    said = estimate(load(None, ["rollout.kv_tokens=100000000"]), MACHINE).problem or ""
    assert said.endswith("give rollout.kv_tokens=6250000, a smaller model or another device")


def test_processes_that_are_there_leave_their_room_to_those_that_replace_them(tmp_path: Path) -> None:
    """On a GPU, too: what they have of it is not free."""
    write("qwen-0.5b", tmp_path)
    config = Config(model=str(tmp_path), training=Training(device="cuda"))
    there = estimate(replace(config, rollout=replace(config.rollout, device="cuda")), replace(MACHINE, gpus=(0,)))
    assert there.problem is not None
    assert there.in_place_of(there).problem is None
    more = replace(there.config, rollout=replace(there.config.rollout, kv_tokens=10**7))
    assert estimate(more, there.machine).in_place_of(there).problem is not None


def test_ranks_share_the_state_of_the_trainer_and_need_a_gpu_each(tmp_path: Path) -> None:
    """On the CPU the shares add up to what one process needs; on GPUs each rank has its own."""
    write("qwen-0.5b", tmp_path)
    machine = replace(MACHINE, gpus=(24 * 2**30,) * 2)

    def plan(device: str, ranks: int) -> Estimate:
        return estimate(Config(model=str(tmp_path), training=Training(device=device, ranks=ranks)), machine)

    def state(plan: Estimate, device: str) -> int:
        parts = [part for part in plan.parts if (part.role, part.device) == ("trainer", device)]
        return sum(part.total for part in parts if part.what in ("weights", "gradients", "optimiser"))

    one, two = plan("cuda", 1), plan("cuda", 2)
    assert state(two, "cuda:0") == state(two, "cuda:1") == state(one, "cuda:0") / 2
    assert two.needed("cuda:1") < one.needed("cuda:0")
    assert (
        plan("cuda", 3).problem
        == "training.ranks=3 needs cuda:2, but nvidia-smi finds no such GPU here: give fewer ranks"
    )
    assert state(plan("cpu", 1), "cpu") == state(plan("cpu", 2), "cpu")
    assert plan("cpu", 1).needed() < plan("cpu", 2).needed() < plan("cpu", 8).needed()


@pytest.mark.parametrize("name", ["laptop", "arithmetic-smollm", "gsm8k-smollm"])
def test_presets_for_a_cpu_fit_a_laptop_of_16_gb(name: str) -> None:
    assert estimate(load(name, []), Machine(cores=2, memory=14 * 2**30)).problem is None


def test_memory_grows_with_everything_that_takes_some() -> None:
    least = estimate(load(None, []), MACHINE).needed()
    for more in ("rollout.instances=3", "rollout.kv_tokens=99999", "training.micro_tokens=4096", "reward.workers=9"):
        assert estimate(load(None, [more]), MACHINE).needed() > least
    saving = load(None, ["training.activation_checkpointing=true"])
    assert estimate(saving, MACHINE).needed() < least


def test_the_text_says_what_does_not_fit() -> None:
    text = estimate(load(None, ["rollout.instances=99"]), Machine(cores=2, memory=2 * 2**30)).text()
    assert "does not fit: the run needs" in text
    assert "99 instances on cpu" in text
    assert "1 per compute process, 2 cores" in text


def test_the_facts_are_plain_values() -> None:
    plan = estimate(load("one-gpu", []), MACHINE)
    facts = json.loads(json.dumps(plan.facts()))
    assert facts["needed"] == {device: plan.needed(device) for device in plan.devices}
    assert sum(part["total"] for part in facts["parts"]) == sum(facts["needed"].values())
    assert facts["problem"] is None


@pytest.mark.parametrize(
    ("only", "free"), [(None, (100, 200)), ("1", (200,)), ("1,0", (200, 100)), ("GPU-b", (200,)), ("", ()), ("-1", ())]
)
def test_gpus_are_those_that_cuda_shows(only: str | None, free: tuple[int, ...]) -> None:
    text = "0, GPU-a, 100\n1, GPU-b, 200\n"
    assert _visible(text, only) == tuple(size * 2**20 for size in free)


def test_this_machine_has_something() -> None:
    machine = this_machine()
    assert machine.cores >= 1
    assert machine.memory > 2**20
    assert cache_folder().endswith("staleflow")


def test_limits_of_control_groups_count(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.write_text("0::/job/7\n")
    for folder, most in (("", "max"), ("job/7", str(4 * 2**30)), ("memory", "")):
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        (tmp_path / folder / "memory.max").write_text(most)
        (tmp_path / folder / "memory.current").write_text(str(2**30))
    assert _groups(tmp_path, own) == [(4 * 2**30, 2**30)]


def test_the_standby_state_is_a_choice_with_its_cost_shown_and_off_where_it_does_not_fit() -> None:
    config = load("plain", ["model=smollm2-135m"])
    parameters = sizes_of(config).parameters
    assert estimate(config, MACHINE).of("standby") == 2 * 12 * parameters
    assert f"{2 * 12 * parameters / 2**30:.2f} GiB" in estimate(config, MACHINE).text()
    assert settled(config, MACHINE) == (config, "")
    needed = estimate(config, MACHINE).needed()
    tight = (Machine(cores=2, memory=needed - 1), replace(MACHINE, shared=9 * parameters))
    for machine in tight:
        without, note = settled(config, machine)
        assert without.processes.standby is False
        assert estimate(without, machine).of("standby") == 0
        assert "processes.standby is off, since its 3.01 GiB do not fit in" in note
        assert "twice: off" in estimate(without, machine).text()
    given = load("plain", ["model=smollm2-135m", "processes.standby=true"])
    assert settled(given, tight[0]) == (given, "")
    assert estimate(given, tight[0]).problem is not None


def test_more_instances_are_refused_by_what_is_free_beside_those_that_run() -> None:
    config = load(None, ["rollout.instances=5"])
    one = estimate(config, MACHINE).instance
    assert estimate(config, Machine(cores=2, memory=3 * one)).problem_of_more(3) is None
    said = estimate(config, Machine(cores=2, memory=3 * one - 1)).problem_of_more(3)
    assert said is not None
    assert said.startswith("3 more instances need")
    assert said.endswith("give rollout=4 or less")
