"""When a trainer begins with the groups that wait, on a GPU that instances compute on, too.

A pass costs something however few tokens it has: weights are read, gradients added to, some thousand kernels launched.
On a GPU of its own a trainer would be idle meanwhile, and begins at once. Where instances compute, they pay for it. So
groups gather until they fill a pass, or are as many as are still to come: then less and less is left to do when the
last one does, and the passes of a step grow in number with the logarithm of its groups. ::

    if not gathers(groups=3, missing=5, tokens=6000, micro_tokens=16_384): begin()
"""

WORTH_A_PASS = 2048
"""Tokens that take a GPU longer than what a pass costs in any case."""


def gathers(groups: int, missing: int, tokens: int, micro_tokens: int) -> bool:
    """Whether ``groups`` that wait, of so many tokens, wait for some of the ``missing`` ones of their step."""
    if not missing or tokens >= micro_tokens:
        return False
    return groups < missing or tokens < WORTH_A_PASS
