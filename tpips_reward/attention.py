"""Attention of the language tower, section by section: no mask is made that a kernel does not need.

The sequences of all fusions fall into runs of queries (`Section`) that see a beginning of the sequence. Most of them
see it whole, or causally, which every kernel does without a mask; only the few tokens at the end (late fusion's aspects,
early fusion's registers) need a mask of their own rows. A mask of L x L, and the work on what it hides, is saved.

Kernels: PyTorch's SDPA (which chooses among its own, xformers' memory-efficient one among them), or FlashAttention 2
for the sections without a mask and for the vision tower.
"""

from __future__ import annotations

import importlib.util
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from tpips_reward.errors import TPIPSError

KERNELS = ("sdpa", "flash")
# what transformers calls them in a vision tower
VISION_KERNELS = {"sdpa": "sdpa", "flash": "flash_attention_2"}


class Section(NamedTuple):
    """Queries `start` to `stop` (excluded), which see the keys 0 to `keys` (excluded).

    Attributes:
        causal: each sees the keys up to its own place; then `start` is 0 and `keys` is `stop`.
        mask: (B, 1, stop - start or 1, keys) boolean, True where a query sees a key; None: all of them.
    """

    start: int
    stop: int
    keys: int
    causal: bool = False
    mask: Tensor | None = None


def choose_kernel(wanted: str | None, device: torch.device, dtype: torch.dtype) -> str:
    """The kernel for what is wanted: "sdpa", "flash", or None for the fastest that runs here.

    Raises:
        TPIPSError: an unknown name, or "flash" where FlashAttention does not run.
    """
    if wanted not in (None, *KERNELS):
        raise TPIPSError(f"The attention {wanted!r} is unknown; use {' or '.join(KERNELS)}, or None for the fastest.")
    if wanted == "sdpa":
        return wanted
    hindrance = None
    if device.type != "cuda":
        hindrance = f"it needs a GPU, and the device is {str(device)!r}"
    elif dtype != torch.bfloat16:
        hindrance = f"it computes in bfloat16, and the dtype is {str(dtype).removeprefix('torch.')}"
    elif importlib.util.find_spec("flash_attn") is None:
        hindrance = "it is not installed (pip install flash-attn)"
    elif torch.cuda.get_device_capability(device)[0] < 8:
        hindrance = "it needs a GPU of the Ampere generation or later"
    if hindrance and wanted == "flash":
        raise TPIPSError(f"FlashAttention cannot be used: {hindrance}; use attention='sdpa', or leave it out.")
    return "sdpa" if hindrance else "flash"


def set_kernel(model: nn.Module, kernel: str) -> None:
    """Make a `Qwen3VLModel` use a kernel of `KERNELS`."""
    model.language_model.config._attn_implementation = f"tpips_{kernel}"  # type: ignore[union-attr]
    model.visual.config._attn_implementation = VISION_KERNELS[kernel]  # type: ignore[union-attr]


def _by_sections(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    flash: bool,
    scaling: float,
    sections: tuple[Section, ...] | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """(B, H, L, d) queries, (B, H_kv, L, d) keys and values -> (B, L, H, d); by transformers' attention interface.

    Without sections: one, causal unless there is a mask.
    """
    length = query.shape[2]
    if sections is None:
        sections = (Section(0, length, length, attention_mask is None, attention_mask),)
    parts = []
    for start, stop, keys, causal, mask in sections:
        part, k, v = query[:, :, start:stop], key[:, :, :keys], value[:, :, :keys]
        if flash and mask is None:
            parts.append(_flash(part, k, v, scaling, causal))
        else:
            parts.append(sdpa_attention_forward(module, part, k, v, mask, scaling=scaling, is_causal=causal)[0])
    return (parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)), None


def _flash(query: Tensor, key: Tensor, value: Tensor, scaling: float, causal: bool) -> Tensor:
    from flash_attn import flash_attn_func

    rows = [tensor.transpose(1, 2) for tensor in (query, key, value)]
    return flash_attn_func(*rows, softmax_scale=scaling, causal=causal)


def _sdpa_sections(*arguments: Any, **options: Any) -> tuple[Tensor, None]:
    return _by_sections(*arguments, flash=False, **options)


def _flash_sections(*arguments: Any, **options: Any) -> tuple[Tensor, None]:
    return _by_sections(*arguments, flash=True, **options)


# A name that has no mask function of transformers' own: the masks are ours.
AttentionInterface.register("tpips_sdpa", _sdpa_sections)
AttentionInterface.register("tpips_flash", _flash_sections)
