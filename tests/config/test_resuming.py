"""What a resumed run may change, and which processes that an earlier attempt left would not know of it."""

from hypothesis import given
from hypothesis import strategies as st

from staleflow.config import load
from staleflow.config.resuming import differences, outdated

FREE = {
    "steps=99": set[str](),
    "rollout.instances=3": set[str](),
    "rollout.kv_tokens=4096": {"instance", "evaluator"},
    "training.ranks=2": {"trainer"},
    "training.micro_tokens=64": {"trainer"},
    "training.share_prompts=false": {"trainer"},
    "training.activation_checkpointing=true": {"trainer"},
    "evaluation.problems=9": {"evaluator"},
    "checkpoints.keep=5": set[str](),
}
"""By change, whose processes were started with another value."""
FIXED = ["staleness=1", "group_size=4", "training.learning_rate=0.5", "rollout.max_tokens=64", "reward.timeout_s=3"]


@given(free=st.sets(st.sampled_from([*FREE])), fixed=st.sets(st.sampled_from(FIXED)))
def test_what_is_a_matter_of_memory_and_speed_may_be_changed_and_nothing_else(free: set[str], fixed: set[str]) -> None:
    """A run that was out of memory could not be resumed with fewer ``training.micro_tokens``."""
    found = differences(load(None, []), load(None, sorted(free | fixed)))
    assert set(found) == {change.partition("=")[0] for change in fixed}


@given(free=st.sets(st.sampled_from([*FREE])))
def test_processes_are_outdated_if_they_read_what_was_changed(free: set[str]) -> None:
    after = load(None, sorted(free))
    assert outdated(load(None, []), after) == {role for change in free for role in FREE[change]}
    assert outdated(after, after) == set()
