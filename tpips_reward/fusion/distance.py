"""Mid fusion's distance: which layers are probed, how their tokens are compared, and the learned weights in it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tpips_reward.errors import TPIPSError

DEFAULT_PROBES = 20
_SMALLEST_BOTTLENECK = 16


@dataclass(frozen=True)
class Activations:
    """What a pair needs of one image under one aspect.

    Attributes:
        tokens: (P, N, D) image tokens at each of P probe layers, as the model gave them.
        text: (P, D) pooled text tokens there.
    """

    tokens: Tensor
    text: Tensor


def spread_layers(count: int, layers: int) -> list[int]:
    """`count` evenly spaced indices into the hidden states, from 1 (after the first layer) to `layers`.

    Raises:
        TPIPSError: more probes than layers, or none.
    """
    if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= layers:
        raise TPIPSError(f"{count!r} probe layers do not fit a backbone of {layers} layers; give num_probes 1 to {layers}, or probe_layers.")
    return [int(index) for index in np.rint(np.linspace(1, layers, count))]


def check_layers(chosen: Sequence[int], layers: int) -> list[int]:
    """Refuse probe layers that a backbone of `layers` layers does not have; 0, the embeddings, is none of them."""
    whole = isinstance(chosen, Sequence) and not isinstance(chosen, str) and len(chosen) > 0
    if not whole or any(isinstance(index, bool) or not isinstance(index, int) for index in chosen):
        raise TPIPSError(f"The probe layers must be a list of whole numbers from 1 to {layers}, got {chosen!r}.")
    wrong = [index for index in chosen if not 1 <= index <= layers]
    if wrong:
        raise TPIPSError(f"The probe layers {wrong} do not exist; this backbone has the layers 1 to {layers}.")
    if len(set(chosen)) != len(chosen):
        raise TPIPSError(f"The probe layers {list(chosen)} name a layer twice; give each once.")
    return list(chosen)


class LayerHead(nn.Module):
    """Text states (B, D) of a probe layer -> channel weights (B, D) in (0, 1)."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        inner = max(hidden // 4, _SMALLEST_BOTTLENECK)
        self.channel_mlp = nn.Sequential(nn.Linear(hidden, inner), nn.GELU(), nn.Linear(inner, hidden), nn.Sigmoid())

    def forward(self, text: Tensor) -> Tensor:
        return self.channel_mlp(text)


class DistanceHead(nn.Module):
    """The learned part of the distance: channel weights of each probe layer, and how the layers are mixed."""

    def __init__(self, hidden: int, probes: int) -> None:
        super().__init__()
        self.layer_logits = nn.Parameter(torch.zeros(probes))
        self.layer_heads = nn.ModuleList(LayerHead(hidden) for _ in range(probes))

    def forward(self, pairs: Sequence[tuple[Activations, Activations]]) -> Tensor:
        """Distances (B,) >= 0: sum over layers of share * mean over tokens of w . (a - b)^2.

        The channel weights w are those of the mean of the two images' text states, so the order makes no difference.
        """
        text = torch.stack([(first.text + second.text) / 2 for first, second in pairs], dim=1)  # (P, B, D)
        weights = [head(states) for head, states in zip(self.layer_heads, text, strict=True)]
        shares = self.layer_logits.softmax(0)
        totals = []
        for row, (first, second) in enumerate(pairs):
            # layer by layer: normalised copies of all layers at once would be larger than the activations
            layers = zip(first.tokens, second.tokens, weights, strict=True)
            gaps = [token_gap(a, b, weight[row]) for a, b, weight in layers]
            totals.append((shares * torch.stack(gaps)).sum())
        return torch.stack(totals)


def token_gap(first: Tensor, second: Tensor, weight: Tensor) -> Tensor:
    """One layer's distance: the mean over tokens of sum_c weight_c (a_c - b_c)^2, a and b of unit length.

    Args:
        first, second: (N, D) tokens of two images, in any dtype and of any length.
        weight: (D,) channel weights; the distance is computed in their dtype.
    """
    gap = F.normalize(first.to(weight.dtype), dim=-1) - F.normalize(second.to(weight.dtype), dim=-1)
    return (gap.square() @ weight).mean()
