"""Runs on several Ray nodes of this machine. ``make test-ray`` has Ray; without it, these tests are skipped."""

from collections.abc import Iterator

import pytest

from bench.ray_nodes import Nodes


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    """A cluster of two nodes, or more while a test has added some."""
    with Nodes() as made:
        yield made
