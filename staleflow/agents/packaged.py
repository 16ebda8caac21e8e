"""The package ``renderers`` in place of the model's chat template: written by hand for families of models.

    environment.renderer=qwen3        # or auto: by the name of the model's folder

It renders what is new after the exact tokens before (``bridge_to_next_turn``), reads reasoning and tool calls by their
tokens, and says where it cannot; ``environment.renderer_arguments`` are the fields of its configuration, such as
``thinking_retention: all``.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from staleflow.agents.messages import Message, MessageError, answer
from staleflow.agents.render import APPENDED, ASKED, SAID, TOOL, Renderer, Tools, called, shared, told
from staleflow.errors import ConfigError, line_of


class PackagedRenderer(Renderer):
    @classmethod
    def made(cls, folder: Path, stops: Collection[int], kind: str, arguments: Mapping[str, Any]) -> Self:
        made = cls.of(folder, stops)
        try:
            from pydantic import TypeAdapter
            from renderers import create_renderer  # pyright: ignore[reportMissingImports]
            from renderers.configs import RendererConfig  # pyright: ignore[reportMissingImports]

            config = TypeAdapter(RendererConfig).validate_python({"name": kind, **arguments})
            made.package = create_renderer(made.words, config)
        except Exception as error:  # it raises many kinds; all mean that it has none for this model
            raise ConfigError(
                f"environment.renderer={kind} cannot be used for {folder} ({line_of(error)}): give another name, other "
                "renderer_arguments, or builtin"
            ) from None
        return made

    package: Any
    """Its renderer."""

    def first(self, messages: Sequence[Message], tools: Tools | None = None) -> list[int]:
        try:
            return list(
                self.package.render_ids(list(messages), tools=list(tools or ()) or None, add_generation_prompt=True)
            )
        except Exception as error:  # whatever it does
            raise MessageError(f"the renderer refuses these messages ({line_of(error)}): send others") from None

    def extend(
        self,
        held: Sequence[int],
        new: Sequence[Message],
        tools: Tools | None = None,
        calls: Sequence[Message] = (),  # noqa: ARG002
        made: int = 0,
    ) -> list[int] | None:
        held = list(held)
        cut = len(held) - made
        try:
            found = self.package.bridge_to_next_turn(held[:cut], held[cut:], list(new), tools=list(tools or ()) or None)
        except Exception:  # it does not take these messages one after the other
            return None
        ids = None if found is None else list(getattr(found, "token_ids", found))
        return ids[len(held) :] if ids is not None and ids[: len(held)] == held else None

    def parse(self, tokens: Sequence[int], calls: bool = True, mark: str = "") -> Message:
        found = self.package.parse_response(list(tokens))
        read = [(each.name, each.arguments) for each in found.tool_calls if each.status.name == "OK"] if calls else []
        thought = "" if found.reasoning_content is None else f"{found.reasoning_content}</think>"
        text = f"{thought}{found.content}" if calls or not found.tool_calls else self.text(tokens)
        return answer(
            text, lambda said: (said, [(name, _value(each)) for name, each in read]), mark or self.mark(tokens)
        )

    def prove(self, roles: Collection[str] = APPENDED) -> None:
        first = self.first([ASKED])
        self.stem = first[: shared(first, self.first([told("user")], [TOOL]))]
        words: Any = self.words
        stops = [token for token in self.package.get_stop_token_ids() if token in self.stops]
        if not stops:
            raise ConfigError(
                f"the model in {self.name} does not stop at a token by which its renderer ends an answer: add one of "
                f"{self.package.get_stop_token_ids()} to eos_token_id in generation_config.json"
            )
        for role in roles:
            made = [*words.encode(SAID, add_special_tokens=False), stops[0]]
            if role == "tool":
                whole = self.package.render_ids([ASKED, called(SAID)], tools=[TOOL])
                made = whole[len(self.first([ASKED], [TOOL])) :]
                made = made[: 1 + max(at for at, token in enumerate(made) if token in stops)]
            held = [*self.first([ASKED], [TOOL]), *made]
            if self.extend(held, [told(role)], [TOOL], made=len(made)) is None:
                raise ConfigError(
                    f"the renderer of {self.name} cannot append a {role} message to the tokens before: give "
                    "renderer_arguments (thinking_retention: all), or leave it out of environment.appends"
                )
        self.unproven = frozenset()


def _value(arguments: Any) -> dict[str, Any]:
    return arguments if isinstance(arguments, dict) else json.loads(arguments or "{}")
