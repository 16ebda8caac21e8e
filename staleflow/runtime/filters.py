"""Why a complete group is not worth training on: the control plane's ``filter``."""

from staleflow.servers.lifecycle import Group

NO_SIGNAL = "no signal"


def no_signal(group: Group) -> str | None:
    """Groups whose rewards are all equal teach nothing."""
    rewards = {member.reward for member in group.members if member.state == "complete"}
    return NO_SIGNAL if len(rewards) <= 1 else None
