"""A loss of your own: ``my_loss.py`` beside this file."""

import sys

import staleflow as sf

loss = ["training.loss=my_loss:soft_clip", "training.loss_arguments.sharpness=2"]
result = sf.train(sf.load("laptop", [*loss, *sys.argv[1:]]))
ratios = [row["ratio"] for row in result.metrics if "ratio" in row]  # none where no group has a signal
print(result.reward, max(ratios, default=1.0))
