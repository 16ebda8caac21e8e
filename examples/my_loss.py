"""A loss that bends where PPO clips. The trainer's process imports it by name."""

import torch

from staleflow.training.correction import log_ratio
from staleflow.training.packed import TOKEN_MEAN, aggregate


def soft_clip(logprobs_T, advantages_T, segments, correction, aggregation=TOKEN_MEAN, *, sharpness=4.0):
    ratio_T = log_ratio(logprobs_T, correction.anchor_T).exp()
    gate_T = torch.sigmoid(sharpness * (ratio_T - 1)) * 4 / sharpness  # slope 1 at ratio 1
    losses_T = -correction.weights_T * gate_T * advantages_T
    return aggregate(losses_T, segments, aggregation, correction.keep_N, {"ratio": ratio_T})
