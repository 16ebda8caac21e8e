"""A tracker of the tests: a line for each call, in the run's directory."""

import json

from staleflow.observe.tracking import TrackedRun, Values


class Lines:
    def __init__(self, run: TrackedRun, file: str = "tracked.jsonl") -> None:
        self._path = run.path / file

    def log(self, step: int, values: Values) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps({"step": step, **values}) + "\n")

    def close(self) -> None:
        with self._path.open("a") as file:
            file.write("{}\n")
