"""Where the autoencoder's training starts: a nearly linear network, which learns many times faster than a default one.

At the start all residual branches are closed, and every stream has one constant channel. The constant dominates the
norms, so that they hardly change what flows beside it, and the convolutions of the main path keep its variance. A few
minutes on a CPU are too short to recover from a start in which thirty normalised layers scramble the image.
"""

from __future__ import annotations

import torch
from diffusers import AutoencoderKLQwenImage

#: The constant channel's value, against signals of about 0.5.
_CONSTANT = 3.0
#: Posterior log-variance at the start: noise of the latents' own size would drown the first gradients.
_LOGVAR = -5.0


@torch.no_grad()
def start_linear(vae: AutoencoderKLQwenImage, generator: torch.Generator) -> None:
    """Re-initialises the autoencoder in place."""
    for name, module in vae.named_modules():
        if name.endswith((".conv2", ".proj")):
            module.weight.zero_()
            module.bias.zero_()
        elif name.endswith("conv_shortcut") and not isinstance(module, torch.nn.Identity):
            weight = _orthogonal(module.weight[:, :, -1], generator)
            # The constant channel goes through, and nothing else touches it.
            weight[0], weight[:, 0], weight[0, 0] = 0.0, 0.0, 1.0
            module.weight[:, :, -1] = weight
            module.bias.zero_()
        elif name.endswith((".conv_in", ".resample.1")):
            last = module.weight[:, :, -1] if module.weight.ndim == 5 else module.weight
            weight = _orthogonal(last, generator)
            if name.endswith(".resample.1"):
                weight[:, 0] = 0.0
                weight *= 1.5
            weight[0] = 0.0
            last.copy_(weight)
            module.bias.zero_()
            module.bias[0] = _CONSTANT
    assert vae.quant_conv.bias is not None
    vae.quant_conv.bias[vae.config.z_dim :] = _LOGVAR
    vae.quant_conv.weight[vae.config.z_dim :] *= 0.1


def _orthogonal(like: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """A kernel of the same shape whose rows (or columns) over all taps are orthonormal."""
    flat = torch.empty_like(like.flatten(1))
    torch.nn.init.orthogonal_(flat, generator=generator)
    return flat.view_as(like).clone()
