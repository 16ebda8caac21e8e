"""LoRA, evaluation with several samples per problem, early stop, and the best checkpoint."""

import sys

import staleflow as sf

config = sf.load(
    "arithmetic-smollm",
    [
        "training.lora_rank=8",
        "training.learning_rate=2e-4",
        "evaluation.samples=4",
        "evaluation.temperature=1",
        "evaluation.figure=pass@4",
        "evaluation.patience=3",
        *sys.argv[1:],
    ],
)
result = sf.train(config)
print(result.summary["accuracy"][-1], result.summary["stopped_early"], result.best)
