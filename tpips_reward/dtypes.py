"""Which numbers weights are held in: a dtype by name, and the one for a device."""

from __future__ import annotations

import torch

from tpips_reward.errors import TPIPSError


def parse_dtype(dtype: torch.dtype | str) -> torch.dtype:
    """A torch.dtype or its name -> float32, bfloat16 or float64.

    Raises:
        TPIPSError: another dtype. float16 is refused: the backbone's activations exceed its range of 65504 and become
            infinite, which would end in NaN scores.
    """
    known = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64,
             "fp32": torch.float32, "bf16": torch.bfloat16}  # fmt: skip
    kind = known.get(str(dtype).removeprefix("torch."))
    if kind is not None:
        return kind
    if str(dtype).removeprefix("torch.") in ("float16", "half", "fp16"):
        raise TPIPSError(
            "float16 is refused: activations of models this large can exceed its largest number, 65504, and turn into NaN; "
            "use bfloat16, which is as small."
        )
    raise TPIPSError(f"dtype {dtype!r} is unknown; use 'float32', 'bfloat16' or 'float64'.")


def weights_dtype(dtype: torch.dtype | str | None, device: torch.device) -> torch.dtype:
    """What weights are loaded in: `parse_dtype`'s; None: float32 on a CPU, bfloat16 elsewhere."""
    if dtype is None:
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    return parse_dtype(dtype)
