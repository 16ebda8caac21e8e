"""Why a request cannot be served, in the same words for every engine that makes tokens.

problem = refused(request, engine_holds, vocabulary=32_000, capacity=4096, decodes_text=True)      # None if it can be
"""

from collections.abc import Container

from staleflow.rollout.engine import Request
from staleflow.types import made_count


def refused(request: Request, here: Container[str], vocabulary: int, capacity: int, decodes_text: bool) -> str | None:
    """``here``: names of the requests that the engine holds. ``capacity``: tokens of the longest sequence."""
    if request.name in here:
        return f"request {request.name} is already here: interrupt or abort it first"
    if not request.prompt:
        return f"request {request.name} has an empty prompt: give at least one token"
    tokens = [*request.prompt, *request.tokens]
    if min(tokens) < 0 or max(tokens) >= vocabulary:
        strange = next(token for token in tokens if not 0 <= token < vocabulary)
        return f"request {request.name}: token {strange} is unknown, the model's tokens are 0 to {vocabulary - 1}"
    if len(tokens) > capacity:
        return (
            f"request {request.name} has {len(tokens)} tokens but the engine holds {capacity} per sequence: "
            "shorten the prompt or raise kv_tokens (never beyond the model's max_position_embeddings)"
        )
    for token in request.sampling.stop_tokens:
        if not 0 <= token < vocabulary:
            return f"request {request.name}: stop token {token} is unknown, the tokens are 0 to {vocabulary - 1}"
    if request.sampling.stop_strings and not decodes_text:
        return f"request {request.name} has stop strings but the model's folder has no tokenizer.json"
    counted = sum(count for _, count in request.spans)
    if not len(request.tokens) == len(request.logprobs) == counted:
        return (
            f"request {request.name} resumes with {len(request.tokens)} tokens, {len(request.logprobs)} "
            f"log-probabilities and spans of {counted}: give one of each per token"
        )
    if made_count(request.spans) >= request.sampling.max_tokens:
        return f"request {request.name} already has its {request.sampling.max_tokens} tokens: raise max_tokens"
    return None
