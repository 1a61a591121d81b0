"""An exact 2-D path for the Qwen-Image VAE, for batches of single images.

The VAE is a causal video model. A single image is a video of one frame: the causal padding puts zeros in front of it, so
only the last temporal slice of every 3-D kernel meets it, and a 2-D convolution with that slice gives the same numbers at
a third of the work. Gradients are equal too: the other slices only ever meet zeros.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import MethodType

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKLQwenImage
from diffusers.models.autoencoders.autoencoder_kl_qwenimage import QwenImageCausalConv3d


def enable_single_frame(vae: AutoencoderKLQwenImage) -> None:
    """Let `vae` convolve single frames in two dimensions; videos, and frames with a cache, still take the 3-D path."""
    for module in vae.modules():
        if isinstance(module, QwenImageCausalConv3d):
            module.forward = MethodType(_forward, module)


def disable_single_frame(vae: AutoencoderKLQwenImage) -> None:
    """Undo `enable_single_frame`."""
    for module in vae.modules():
        if isinstance(module, QwenImageCausalConv3d):
            module.__dict__.pop("forward", None)


@contextmanager
def single_frame(vae: AutoencoderKLQwenImage) -> Iterator[AutoencoderKLQwenImage]:
    """`enable_single_frame` for the length of a block."""
    enable_single_frame(vae)
    try:
        yield vae
    finally:
        disable_single_frame(vae)


def _forward(conv: QwenImageCausalConv3d, x: torch.Tensor, cache_x: torch.Tensor | None = None) -> torch.Tensor:
    """The causal convolution of x (B, C, T, H, W), in two dimensions where T is 1 and nothing came before."""
    left, right, top, bottom, before, _ = conv._padding
    one_output_frame = before + 1 == conv.kernel_size[0]
    if x.shape[2] != 1 or cache_x is not None or not one_output_frame or (left, top) != (right, bottom):
        return QwenImageCausalConv3d.forward(conv, x, cache_x)
    weight = conv.weight[:, :, -1]
    out = F.conv2d(x[:, :, 0], weight, conv.bias, stride=conv.stride[1:], padding=(top, left))
    return out.unsqueeze(2)
