"""The trackers that a run's configuration names.

trackers = trackers_of(config, directory, first_step=0, tell=print)
"""

from collections.abc import Callable
from functools import partial

from staleflow.config import Config
from staleflow.config.convert import leaves, to_tree
from staleflow.config.tracking import TRACKERS
from staleflow.observe.tracking import TrackedRun, Trackers
from staleflow.run.directory import RunDirectory
from staleflow.settings import short_name


def trackers_of(config: Config, directory: RunDirectory, first_step: int, tell: Callable[[str], None]) -> Trackers:
    names, given = config.trackers, config.track_arguments
    run = TrackedRun(directory.path.name, directory.path, first_step, dict(leaves(to_tree(config))))
    arguments = {each: given if len(names) == 1 else given.get(short_name(each), {}) for each in names}
    return Trackers({each: partial(TRACKERS.load(each), run, **arguments[each]) for each in names}, tell)
