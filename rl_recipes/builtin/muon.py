"""Orthogonalised momentum for matrices and kernels, AdamW for the rest: fewer steps than AdamW alone, at this size.

The update of a matrix is its momentum with all singular values moved towards one by a Newton-Schulz iteration (Jordan
et al., "Muon: an optimizer for hidden layers in neural networks", 2024), scaled so that its root mean square is like
AdamW's (Liu et al., "Muon is scalable for LLM training", 2025, eq. 4). All in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

_NS = (3.4445, -4.7750, 2.0315)


def orthogonalise(matrix: torch.Tensor, iterations: int = 5) -> torch.Tensor:
    """A matrix with the singular vectors of ``matrix`` and singular values of about 0.7 to 1.2; (m, n) float32."""
    wide = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
    x = wide / (wide.norm() + 1e-7)
    a, b, c = _NS
    for _ in range(iterations):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x if wide is matrix else x.T


class Muon(torch.optim.Optimizer):
    """Muon for ``matrices`` (two or more dimensions; kernels as (out, rest)), AdamW for ``others``, one learning rate.

    Args:
        matrices: weights of layers that map between features.
        others: embeddings, biases, norms, first and last layers.
        lr: learning rate of both; AdamW's scale.
        momentum: of Muon, with Nesterov's look-ahead.
        betas, eps: of AdamW.
        weight_decay: decoupled, for weights of two or more dimensions.
        others_scale: factor on the learning rate of ``others``.
    """

    def __init__(
        self,
        matrices: Iterable[torch.nn.Parameter],
        others: Iterable[torch.nn.Parameter],
        *,
        lr: float,
        momentum: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.98),
        eps: float = 1e-8,
        weight_decay: float = 1e-3,
        others_scale: float = 1.0,
    ) -> None:
        defaults: dict[str, Any] = {"lr": lr, "momentum": momentum, "betas": betas, "eps": eps}
        defaults["weight_decay"] = weight_decay
        groups = [
            {"params": list(matrices), "orthogonal": True, "scale": 1.0},
            {"params": list(others), "orthogonal": False, "scale": others_scale},
        ]
        super().__init__([g for g in groups if g["params"]], defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One update of all parameters that have a gradient."""
        for group in self.param_groups:
            update = self._muon if group["orthogonal"] else self._adamw
            for parameter in group["params"]:
                if parameter.grad is not None:
                    lr = group["lr"] * group["scale"]
                    if parameter.ndim > 1:
                        parameter.mul_(1.0 - lr * group["weight_decay"])
                    parameter.sub_(update(parameter, self.state[parameter], group), alpha=lr)

    def _muon(self, parameter: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> torch.Tensor:
        average = state.setdefault("momentum", torch.zeros_like(parameter))
        gradient = parameter.grad
        assert gradient is not None  # the caller skips parameters without one
        average.lerp_(gradient, 1.0 - group["momentum"])
        ahead = gradient.lerp(average, group["momentum"])
        if parameter.ndim == 5:
            # Kernels over time see single frames: only the last slice has a gradient.
            out = torch.zeros_like(parameter)
            flat = ahead[:, :, -1].flatten(1)
            out[:, :, -1] = (orthogonalise(flat) * (0.2 * max(flat.shape) ** 0.5)).view_as(out[:, :, -1])
            return out
        flat = ahead.flatten(1)
        return (orthogonalise(flat) * (0.2 * max(flat.shape) ** 0.5)).view_as(parameter)

    def _adamw(self, parameter: torch.Tensor, state: dict[str, Any], group: dict[str, Any]) -> torch.Tensor:
        first = state.setdefault("first", torch.zeros_like(parameter))
        second = state.setdefault("second", torch.zeros_like(parameter))
        state["count"] = count = state.get("count", 0) + 1
        one, two = group["betas"]
        first.lerp_(parameter.grad, 1.0 - one)
        second.mul_(two).addcmul_(parameter.grad, parameter.grad, value=1.0 - two)
        return (first / (1.0 - one**count)) / ((second / (1.0 - two**count)).sqrt() + group["eps"])
