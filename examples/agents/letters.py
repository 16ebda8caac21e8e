"""A taskset of verifiers (0.4) with a harness of its own: say a letter, then say it again.

PYTHONPATH=examples/agents staleflow train model=my-model data.chat=true environment.play=verifiers \
    data.source=staleflow.agents.verifiers:problems \
    'data.arguments={env: {taskset: {id: letters}, agent: {runtime: {type: subprocess}}}}' \
    'environment.arguments={env: {taskset: {id: letters}, agent: {runtime: {type: subprocess}}}}'

Its harness runs in the worker, so that it installs nothing; those that come with verifiers run programs, and install
what these need when they start.
"""

from collections.abc import Iterator
from typing import Any

import openai
import verifiers.v1 as vf  # pyright: ignore[reportMissingImports]

__all__ = ["Letters", "TwoTurns"]


class Letter(vf.TaskData):
    letter: str


class SayIt(vf.Task[Letter]):
    @vf.reward
    async def said(self, trace: Any) -> float:
        """The share of answers that have it."""
        said = [str(each.content) for each in trace.assistant_messages]
        return sum(self.data.letter in each for each in said) / max(1, len(said))


class Letters(vf.Taskset[SayIt]):
    def load(self) -> Iterator[SayIt]:
        for letter in "abcdefgh":
            yield SayIt(Letter(prompt=f"Say {letter}", letter=letter), self.config.task)


class TwoTurns(vf.Harness[vf.HarnessConfig]):
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(
        self,
        ctx: Any,
        trace: Any,
        runtime: Any,
        endpoint: str,
        secret: str,
        mcp_urls: Any,
        data: Any,
    ) -> Any:
        client = openai.AsyncOpenAI(base_url=endpoint, api_key=secret)
        messages: list[Any] = [{"role": "user", "content": data.prompt}]
        for _ in range(2):
            answer = await client.chat.completions.create(model=ctx.model, messages=messages, max_tokens=6)
            said = answer.choices[0].message.content or ""
            messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "Again"}]
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")
