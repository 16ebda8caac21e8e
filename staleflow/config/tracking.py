"""Where the figures of a run go besides its own files: the setting ``track``, and the built-in trackers.

A tracker is called with the run (``staleflow.observe.tracking.TrackedRun``) and its arguments, and has two methods:
``log(step, values)`` and ``close()``.
"""

from staleflow.registry import Entry, Registry

_HERE = "staleflow.observe.trackers"
TRACKERS = Registry(
    "track",
    {
        "tensorboard": Entry(f"{_HERE}:TensorBoard", needs="tensorboard", arguments=True),
        "wandb": Entry(f"{_HERE}:WeightsAndBiases", needs="wandb", arguments=True),
        "trackio": Entry(f"{_HERE}:Trackio", needs="trackio", arguments=True),
        "prometheus": Entry(f"{_HERE}:Prometheus", needs="prometheus_client", arguments=True),
    },
    takes=("run",),
    own="module:Class",
)
