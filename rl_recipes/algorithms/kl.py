"""How far the policy has gone from the reference, the editor with its adapter switched off."""

from __future__ import annotations

from torch import Tensor

from tpips_reward.errors import TPIPSError


def gaussian_kl(mean: Tensor, reference_mean: Tensor, std: float) -> Tensor:
    """KL between two Gaussians of equal std, averaged over elements: mean (mu - mu_ref)^2 / (2 std^2), shape (B,).

    `std` is that of the step itself, s sqrt(-dt) for the SDE rules. The reference carries no gradient.
    """
    if not std > 0.0:
        raise TPIPSError(f"The KL of a step needs a positive std, but it is {std}; use stochastic steps only.")
    return squared_distance(mean, reference_mean) / (2.0 * std**2)


def velocity_distance(velocity: Tensor, reference_velocity: Tensor) -> Tensor:
    """mean (v - v_ref)^2, shape (B,): stands in for the KL where steps have no likelihood (NFT, backpropagation).

    For a stochastic step with mean a x + b v it is the Gaussian KL up to the factor b^2 / (2 std^2). The reference
    carries no gradient.
    """
    return squared_distance(velocity, reference_velocity)


def squared_distance(value: Tensor, reference: Tensor) -> Tensor:
    """(B,) mean squared difference of two tensors (B, ...); the second carries no gradient."""
    if value.shape != reference.shape:
        raise TPIPSError(
            f"Policy and reference must be compared on one batch, but their shapes are {tuple(value.shape)} and "
            f"{tuple(reference.shape)}."
        )
    return (value - reference.detach()).square().flatten(1).mean(dim=1)
