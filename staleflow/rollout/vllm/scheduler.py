# pyright: reportMissingImports=false
"""vLLM's scheduler, which also counts: what a step computes is what the coordinator's cost model is about."""

from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler


class CountingScheduler(Scheduler):
    decoding = context = prefilled = preempted = 0
    """Of the latest step: sequences that decode, the tokens that they attend to, tokens that are prefilled; and how
    often a sequence was preempted so far."""

    def schedule(self, *arguments: Any, **more: Any) -> Any:
        output = super().schedule(*arguments, **more)
        self.decoding = self.context = self.prefilled = 0
        for name, count in output.num_scheduled_tokens.items():
            request = self.requests[name]
            before = request.num_computed_tokens - count
            if before + 1 == request.num_tokens:
                self.decoding += 1
                self.context += before
            else:
                self.prefilled += count
        self.preempted += len(output.preempted_req_ids or ())
        return output
