"""The value head of PPO: what a state is worth, as a linear function of the last hidden state.

values_T = ValueHead(hidden=2048, like=parameter)(hidden_TH)
"""

import torch
from torch import Tensor, nn


class ValueHead(nn.Module):
    """V = w h + b, in float32 at least. It begins at 0, so that the first advantages are discounted rewards."""

    def __init__(self, hidden: int, like: Tensor) -> None:
        super().__init__()
        dtype = torch.promote_types(like.dtype, torch.float32)
        self.linear = nn.Linear(hidden, 1, device=like.device, dtype=dtype)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, hidden_TH: Tensor) -> Tensor:
        return self.linear(hidden_TH.to(self.linear.weight.dtype))[:, 0]
