"""Tensors that FSDP2 shares out among the processes: their whole, a process's own part, and a whole put back."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._pytree import tree_map_only


def are_shared(tensors: Iterable[Tensor]) -> bool:
    """Whether each process has a part of any of them."""
    return any(isinstance(t, DTensor) for t in tensors)


@torch.no_grad()
def own(tensor: Tensor) -> Tensor:
    """What of a tensor is in this process's memory: a part of a shared one, and any other itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def gathered(values: Any) -> Any:
    """Shared tensors in nested dicts and lists as whole ones in the main process's CPU memory, and as nothing in others.

    All processes must ask. Other tensors stay as they are.
    """

    def gather(tensor: DTensor) -> Tensor:
        whole: Tensor = tensor.full_tensor().detach()
        return whole.cpu() if dist.get_rank() == 0 else torch.empty(0)

    return tree_map_only(DTensor, gather, values)


@torch.no_grad()
def put(tensor: Tensor, whole: Tensor) -> None:
    """Copies a whole tensor, which all processes have, into one that may be shared."""
    if isinstance(tensor, DTensor):
        whole = own(distribute_tensor(whole, tensor.device_mesh, tensor.placements, src_data_rank=None))
    own(tensor).copy_(whole)
