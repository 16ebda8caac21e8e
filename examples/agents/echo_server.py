"""A server of OpenEnv (``pip install openenv-core uvicorn``), for ``environment.play=openenv``.

python examples/agents/echo_server.py 8000
environment: {play: openenv, arguments: {base_url: "http://localhost:8000", observation: said}}
"""

# pyright: reportMissingImports=false
import sys

import uvicorn
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State


class Said(Action):
    message: str


class Heard(Observation):
    said: str


class Echo(Environment):
    """Repeats what it hears, three times; a point for every answer that is longer than the one before."""

    def __init__(self):
        super().__init__()
        self._state = State(step_count=0)
        self._longest = 0

    def reset(self, seed=None, episode_id=None, **kwargs):
        self._state, self._longest = State(episode_id=episode_id, step_count=0), 0
        return Heard(said="Say something.", reward=0.0, done=False)

    def step(self, action, timeout_s=None, **kwargs):
        self._state.step_count += 1
        longer = len(action.message) > self._longest
        self._longest = max(self._longest, len(action.message))
        return Heard(said=action.message, reward=float(longer), done=self._state.step_count == 3)

    @property
    def state(self):
        return self._state


if __name__ == "__main__":
    uvicorn.run(create_fastapi_app(Echo, Said, Heard), port=int(sys.argv[1]), log_level="warning")
