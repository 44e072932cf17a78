"""PyTorch's datatypes and ours: which is which, and how arrays of them come and go without a copy."""

from __future__ import annotations

import numpy as np
import torch

from carpool.types import Array, Datatype

TORCH_TYPES = {
    Datatype.BOOL: torch.bool,
    Datatype.UINT8: torch.uint8,
    Datatype.UINT16: torch.uint16,
    Datatype.UINT32: torch.uint32,
    Datatype.UINT64: torch.uint64,
    Datatype.INT8: torch.int8,
    Datatype.INT16: torch.int16,
    Datatype.INT32: torch.int32,
    Datatype.INT64: torch.int64,
    Datatype.FP16: torch.float16,
    Datatype.FP32: torch.float32,
    Datatype.FP64: torch.float64,
    Datatype.BF16: torch.bfloat16,
}
DATATYPE_OF = {dtype: datatype for datatype, dtype in TORCH_TYPES.items()}
FLOATS = (Datatype.FP16, Datatype.BF16, Datatype.FP32)
"""Those that a model in any precision takes and answers: they are converted on the device."""

PRECISIONS = {
    "fp32": torch.float32,
    "tf32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
}


def carried(datatype: Datatype) -> torch.dtype:
    """How tensors of it lie in buffers: numpy has no BF16, so that its bits go as they are."""
    return torch.uint16 if datatype is Datatype.BF16 else TORCH_TYPES[datatype]


def as_tensor(array: Array | torch.Tensor) -> torch.Tensor:
    """Where it lies. What is read-only, unaligned or not contiguous is copied first."""
    if isinstance(array, np.ndarray):
        return torch.from_numpy(array if lies_well(array) else np.array(array, order="C"))
    return array


def lies_well(array: Array) -> bool:
    """A tensor can be made over it."""
    return array.flags.carray
