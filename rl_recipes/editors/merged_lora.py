"""LoRA layers as one matrix product: W + scale B A is formed first and applied once, with low-rank gradients.

peft applies an adapter beside its layer: two thin products and two passes over the activations more, about a third of a
small transformer's time on a CPU. Forming the sum of the weights costs next to nothing there. In bfloat16 the sum would
round small updates away, so only float32 layers take this route; all others keep peft's own.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from peft.tuners.lora.layer import Linear as LoraLinear
from torch import Tensor, nn


class _MergedLinear(torch.autograd.Function):
    """y = x (W + scale B A)^T + bias, with gradients for x, A and B; W and bias are frozen."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, lora_a: Tensor, lora_b: Tensor, scale: float
    ) -> Tensor:
        merged = torch.addmm(weight, lora_b, lora_a, alpha=scale)
        ctx.save_for_backward(x, merged, lora_a, lora_b)
        ctx.scale = scale
        return F.linear(x, merged, bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, merged, lora_a, lora_b = ctx.saved_tensors
        grad_x = grad_a = grad_b = None
        if ctx.needs_input_grad[0]:
            grad_x = grad @ merged
        rows, inputs = grad.reshape(-1, grad.shape[-1]), x.reshape(-1, x.shape[-1])
        if ctx.needs_input_grad[3]:
            grad_a = ctx.scale * ((rows @ lora_b).T @ inputs)
        if ctx.needs_input_grad[4]:
            grad_b = ctx.scale * (rows.T @ (inputs @ lora_a.T))
        return grad_x, None, None, grad_a, grad_b, None


def enable_merged_lora(module: nn.Module) -> None:
    """Let the LoRA layers of `module` take the merged route wherever it applies; outputs agree to float32 rounding."""
    for layer in module.modules():
        if isinstance(layer, LoraLinear):
            layer.forward = MethodType(_forward, layer)


def disable_merged_lora(module: nn.Module) -> None:
    """Undo `enable_merged_lora`."""
    for layer in module.modules():
        if isinstance(layer, LoraLinear):
            layer.__dict__.pop("forward", None)


def _forward(layer: LoraLinear, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    if args or kwargs or not _applies(layer, x):
        return type(layer).forward(layer, x, *args, **kwargs)
    (name,) = layer.active_adapters
    base = layer.base_layer
    lora_a, lora_b = layer.lora_A[name].weight, layer.lora_B[name].weight
    return _MergedLinear.apply(x, base.weight, base.bias, lora_a, lora_b, float(layer.scaling[name]))


def _applies(layer: LoraLinear, x: Tensor) -> bool:
    if layer.disable_adapters or layer.merged or len(layer.active_adapters) != 1:
        return False
    name = layer.active_adapters[0]
    base = layer.base_layer
    plain = (
        name in layer.lora_A
        and name not in layer.lora_variant
        and type(base) is nn.Linear
        and not base.weight.requires_grad
        and isinstance(layer.lora_dropout[name], nn.Identity)
        and layer.lora_B[name].bias is None
    )
    single = x.dtype == base.weight.dtype == layer.lora_A[name].weight.dtype == torch.float32 if plain else False
    return plain and single and not torch.is_autocast_enabled(x.device.type)
