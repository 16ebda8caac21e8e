# pyright: reportMissingImports=false
"""The entry point ``vllm.general_plugins``: vLLM calls it in each of its processes, also in those of other programs."""

BACKEND = "staleflow"


def register() -> None:
    """Make our backend of its weight transfer known to vLLM, by name: it is imported when it is used."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, "staleflow.rollout.vllm.weights", "PullEngine")
