"""Computes a convolution and what stands behind it at once."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


def convolution_relu(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    other: Tensor | None,
    stride: Any,
    padding: Any,
    dilation: Any,
) -> Tensor:
    """Computes `relu(convolution(x) + bias + other)`; on a GPU in one kernel."""
    if x.is_cuda:
        if other is None:
            return torch.cudnn_convolution_relu(x, weight, bias, stride, padding, dilation, 1)
        return torch.cudnn_convolution_add_relu(x, weight, other, 1.0, bias, stride, padding, dilation, 1)
    made = functional.conv2d(x, weight, bias, stride, padding, dilation)
    return functional.relu(made if other is None else made + other)
