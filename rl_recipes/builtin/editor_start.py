"""Where the transformer's training starts: as a network that copies the source and looks at the instruction.

Sharp attention to one position out of 128 is slow to find by gradient descent, since the rotary embedding's fast
frequencies are a few dimensions of many. So in each block one head starts by looking at the source's token of the same
place, and one at the instruction. The first blocks carry what they find there into a part of the stream that the noisy
latents leave free, and the read-out starts as the least-squares one. These are starting values; all of it is trained.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from diffusers import QwenImageTransformer2DModel

#: How much the norms of queries and keys amplify the dimensions that carry position.
_SHARPNESS = 2.4
#: What is left of the random weights of queries and keys in the two heads.
_CONTENT = 0.2
#: Shares of a query's squared length: frame, and the two fastest frequencies of row and of column.
_FRAME, _FAST, _SLOW = 0.4, 0.2, 0.1


@torch.no_grad()
def start_attention(transformer: QwenImageTransformer2DModel) -> None:
    """Sets the biases of queries and keys of heads 0 and 1 in all blocks, in place; needs two heads at least."""
    frame, row, _ = (axis // 2 for axis in transformer.config.axes_dims_rope)
    width = transformer.config.attention_head_dim
    shares = {0: _FRAME, frame: _FAST, frame + 1: _SLOW, frame + row: _FAST, frame + row + 1: _SLOW}
    place = torch.zeros(width // 2, dtype=torch.complex64)
    for pair, share in shares.items():
        place[pair] = math.sqrt(share * width)
    # The source is frame 1, the edit frame 0: turned by one step of the frame's fastest frequency, a query finds it.
    ahead = place.clone()
    ahead[0] *= torch.exp(torch.tensor(1j))
    # The slowest frequency of the frame axis hardly turns: it tells text from images, wherever they are.
    text = torch.zeros_like(place)
    text[frame - 1] = math.sqrt(width)
    for block in transformer.transformer_blocks:
        attention = block.attn
        _set_head(attention.to_q, 0, ahead)
        _set_head(attention.to_k, 0, place)
        _set_head(attention.to_q, 1, text)
        _set_head(attention.to_k, 1, -text)
        _set_head(attention.add_q_proj, 1, text)
        _set_head(attention.add_k_proj, 1, text)
        for pair in shares:
            for norm in (attention.norm_q, attention.norm_k):
                norm.weight[2 * pair : 2 * pair + 2] = _SHARPNESS


def _set_head(projection: torch.nn.Linear, head: int, value: torch.Tensor) -> None:
    """Makes one head's queries or keys ``value`` (half the head's width, complex), plus a little of the content."""
    width = 2 * len(value)
    rows = slice(head * width, (head + 1) * width)
    projection.weight[rows] *= _CONTENT
    projection.bias[rows] = torch.view_as_real(value).flatten()


@torch.no_grad()
def open_gates(transformer: QwenImageTransformer2DModel) -> None:
    """Sets the bias of all residual gates to one: random gates near zero let little of a block through at first."""
    for block in transformer.transformer_blocks:
        for modulation in (block.img_mod[-1], block.txt_mod[-1]):
            for gate in (modulation.bias.chunk(6)[2], modulation.bias.chunk(6)[5]):
                gate.fill_(1.0)


#: The constant of the free half of the stream: it steadies the layer norms, as in the autoencoder's start.
_CONSTANT = 2.0
#: What is left at the start of random weights that write to the stream.
_QUIET = 0.2


@torch.no_grad()
def start_copying(transformer: QwenImageTransformer2DModel) -> None:
    """Lets head 0 of the first blocks copy the source's token into the free part of the stream, in place.

    The stream must be twice as wide as a token or wider; where blocks are too few, a part of the token is copied.
    """
    channels, head = transformer.config.in_channels, transformer.config.attention_head_dim
    stream = transformer.inner_dim
    transformer.img_in.weight.mul_(0.05)
    transformer.img_in.weight[:channels] += torch.eye(channels)
    transformer.img_in.bias.zero_()
    transformer.img_in.bias[channels:] = _CONSTANT * (-1.0) ** torch.arange(stream - channels)
    transformer.norm_out.linear.weight.zero_()
    transformer.norm_out.linear.bias.zero_()
    for index, block in enumerate(transformer.transformer_blocks):
        block.img_mod[-1].weight.zero_()
        block.img_mod[-1].bias[_not_gates(stream)] = 0.0
        block.img_mlp.net[-1].weight.mul_(_QUIET)
        out = block.attn.to_out[0]
        out.weight.mul_(_QUIET)
        first = index * head
        if first + head <= min(channels, stream - channels):
            block.attn.to_v.weight[:head] = torch.eye(stream)[first : first + head]
            block.attn.to_v.bias[:head] = 0.0
            out.weight[:, :head] = torch.eye(stream)[:, channels + first : channels + first + head]


def _not_gates(width: int) -> torch.Tensor:
    """Indices of the shifts and scales within a block's modulation."""
    parts = torch.arange(6 * width).chunk(6)
    return torch.cat([parts[0], parts[1], parts[3], parts[4]])


@torch.no_grad()
def fit_readout(
    transformer: QwenImageTransformer2DModel, predict: Callable[[], torch.Tensor], velocity: torch.Tensor
) -> float:
    """Sets `proj_out` to the ridge regression of the velocity on the features before it.

    Args:
        transformer: changed in place.
        predict: runs the transformer on a batch and returns its output for the edit's tokens, (B, T, C).
        velocity: what it should have returned, (B, T, C).

    Returns:
        the mean squared error of the fit.
    """
    seen: list[torch.Tensor] = []
    hook = transformer.proj_out.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    predict()
    hook.remove()
    features = seen[0][:, : velocity.shape[1]].flatten(0, 1).double()
    features = torch.cat([features, torch.ones_like(features[:, :1])], 1)
    target = velocity.flatten(0, 1).double()
    gram = features.T @ features
    ridge = 1e-3 * gram.diagonal().mean() * torch.eye(len(gram), dtype=gram.dtype)
    solution = torch.linalg.solve(gram + ridge, features.T @ target)
    transformer.proj_out.weight.copy_(solution[:-1].T)
    transformer.proj_out.bias.copy_(solution[-1])
    return float((features @ solution - target).square().mean())
