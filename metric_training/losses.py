"""From pairwise similarities to odd-one-out probabilities and their cross-entropy (paper, §4, Eq. 1-2)."""

from __future__ import annotations

import torch
from torch import Tensor

from metric_training.data.votes import PAIRS


def pair_similarities(embeddings: Tensor) -> Tensor:
    """Cosines of the three pairs, in the order of the image left out.

    Args:
        embeddings: (..., 3, D) unit vectors, one an image.

    Returns:
        (..., 3): entry k is the similarity of the two images other than k, the paper's s-bar_k.
    """
    return torch.stack([(embeddings[..., i, :] * embeddings[..., j, :]).sum(-1) for i, j in PAIRS], dim=-1)


def odd_one_out_losses(similarities: Tensor, votes: Tensor, temperature: float) -> Tensor:
    """Cross-entropy of softmax(s-bar / τ) against the vote shares, of each example (paper, Eq. 2).

    Args:
        similarities: (N, n) float, entry k what speaks for choice k: of a triplet the similarity of the pair without
            image k, in 2AFC that of candidate k to the reference.
        votes: (N, n) vote shares that sum to 1.
        temperature: τ > 0.

    Returns:
        (N,) float32.
    """
    log_probs = torch.log_softmax(similarities.float() / temperature, dim=-1)
    return -(votes * log_probs).sum(-1)


def agreement(similarities: Tensor, votes: Tensor) -> Tensor:
    """Vote share of the image that the metric calls odd (argmax of s-bar), for each example.

    Args:
        similarities: (N, 3); votes: (N, 3).

    Returns:
        (N,) in [0, 1]; tied argmaxima share their votes equally, so that a constant metric scores chance.
    """
    top = (similarities == similarities.max(-1, keepdim=True).values).float()
    return (votes * top).sum(-1) / top.sum(-1)


def consensus(votes: Tensor) -> Tensor:
    """Expected agreement of one voter with the others: Σ y², for each example.

    Args:
        votes: (N, 3).

    Returns:
        (N,) in [1/3, 1].
    """
    return (votes**2).sum(-1)
