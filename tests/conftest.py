"""What holds for all tests: nothing is downloaded, one thread for each process, no test fails for being slow, and who
may run beside whom.

Property tests draw the same examples every time, so that a failure belongs to the change that is tested;
``make test-all`` draws new ones (``HYPOTHESIS_PROFILE=new``).

Tests marked ``processes`` start processes that want the cores for themselves. Under ``pytest -n`` they run one after
the other, in one of the workers; ``make test-busy`` runs them again and again on a machine that is busy.
"""

import os

import pytest
from hypothesis import HealthCheck, settings

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when PyTorch is loaded

settings.register_profile("same", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
settings.register_profile("new", settings.get_profile("same"), derandomize=False)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.pluginmanager.hasplugin("xdist"):
        for item in items:
            if item.get_closest_marker("processes"):
                item.add_marker(pytest.mark.xdist_group("processes"))
