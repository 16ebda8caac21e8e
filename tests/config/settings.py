"""Settings that are right by themselves and together, to draw from."""

from typing import Any

from hypothesis import strategies as st

from staleflow.config.text import render_flow

TEXTS = st.text(min_size=1, max_size=12)
SETTINGS: dict[str, st.SearchStrategy[Any]] = {
    "seed": st.integers(0, 10**6),
    "steps": st.integers(1, 10**6),
    "staleness": st.integers(0, 9),
    "groups": st.integers(8, 99),
    "group_size": st.integers(4, 99),
    "redundancy": st.integers(0, 7),
    "extra_members": st.integers(0, 3),
    "filter": st.sampled_from(["none", "no-signal"]),
    "stop_at": st.none() | st.floats(-9, 9),
    "runs": TEXTS.filter(lambda text: not text.startswith("~")),
    "data.prompt": TEXTS,
    "data.answer": st.none() | TEXTS,
    "data.template": TEXTS.map(lambda text: text + "{prompt}"),
    "data.shuffle": st.booleans(),
    "data.epochs": st.none() | st.integers(1, 9),
    "data.arguments": st.dictionaries(TEXTS, st.integers() | TEXTS | st.booleans() | st.none(), max_size=3),
    "reward.timeout_s": st.floats(1e-6, 1e6),
    "rollout.instances": st.integers(1, 9),
    "rollout.max_tokens": st.integers(10, 200),
    "rollout.stop_strings": st.lists(TEXTS, max_size=3),
    "rollout.temperature": st.floats(1e-3, 9),
    "rollout.dtype": st.sampled_from(["float32", "bfloat16"]),
    "training.loss": st.sampled_from(["ppo", "dapo", "gspo", "cispo"]),
    "training.advantage": st.sampled_from(["grpo", "dr_grpo", "rloo", "reinforce++", "gae"]),
    "training.correction": st.sampled_from(["none", "truncated", "masked", "decoupled"]),
    "training.eps_low": st.none() | st.floats(0, 1),
    "training.eps_high": st.none() | st.floats(0, allow_nan=False),
    "training.clip_norm": st.floats(1e-9, allow_nan=False),
    "training.learning_rate": st.floats(1e-12, 1),
    "training.sequence_band": st.tuples(st.floats(0.1, 1), st.floats(1, 9)).map(list),
    "training.updates_per_step": st.integers(1, 8),
    "training.overlong_buffer": st.integers(0, 10),
    "training.schedule": st.sampled_from(["constant", "linear", "cosine"]),
    "training.kl_coefficient": st.floats(0, 1),
    "training.lora_rank": st.integers(0, 8),
    "strategies.migration": st.sampled_from(["gain", "blocked", "off"]),
    "strategies.mu": st.floats(0, 1),
    "evaluation.every": st.integers(1, 9),
    "evaluation.patience": st.integers(0, 9),
    "samples": st.integers(0, 9),
    "checkpoints.keep": st.integers(0, 9),
    "processes.threads": st.none() | st.integers(1, 9),
    "processes.pin": st.booleans(),
}


@st.composite
def some_settings(draw: st.DrawFn) -> dict[str, Any]:
    names = draw(st.lists(st.sampled_from(sorted(SETTINGS)), unique=True, max_size=8))
    given = {name: draw(SETTINGS[name]) for name in names}
    return given | ({"data.source": "puzzles:make"} if "data.arguments" in given else {})


def as_override(name: str, value: Any) -> str:
    return f"{name}={render_flow(value)}"
