"""Numbers of eight bits with a scale for each row: what FP8 is here, for weights and for KV.

A number is stored as e4m3 (four bits of exponent, three of mantissa, none infinite), divided by a
scale that puts the largest of its row at 448, the largest there is. Source of the format:
Micikevicius et al., FP8 Formats for Deep Learning, https://arxiv.org/abs/2209.05433.
"""

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
LARGEST = 448.0
# Below it a scale would lose bits, or be zero: the least normal float32.
LEAST_SCALE = 2.0**-126


def quantise(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Rows [..., columns] as FP8 and scales float32 [..., 1]. A row of zeros has scale 1.

    What is not finite makes its row NaN where it is multiplied with its scale again, all of it or
    the number itself: it is seen.
    """
    numbers = rows.float()
    largest = numbers.abs().amax(dim=-1, keepdim=True)
    scales = torch.where(largest == 0, 1.0, (largest / LARGEST).clamp_min(LEAST_SCALE))
    return (numbers / scales).clamp(-LARGEST, LARGEST).to(FP8), scales
