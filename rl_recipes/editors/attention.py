"""The attention kernel of a transformer, chosen by diffusers' own switch (`transformer.set_attention_backend`)."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from diffusers.models.attention_dispatch import AttentionBackendName

from rl_recipes.editors.errors import EditorError

# These run anywhere; all others need a GPU.
ANYWHERE = ("native", "_native_math", "flex")
TAKE_MASKS = ("native", "_native_math", "_native_efficient")
# Kernels that have no float32.
HALF_ONLY = ("flash", "sage", "cudnn")


def attention_backends() -> list[str]:
    """Names that `set_backend` takes. Those that fetch code from the Hub and run it are left out."""
    return sorted(name.value for name in AttentionBackendName if "hub" not in name.value)


def set_backend(transformer: Any, name: str, device: torch.device, dtype: torch.dtype) -> None:
    """Let `transformer` attend by the kernel `name`, such as "native", "flash" or "xformers".

    diffusers makes it the default of transformers that have no backend of their own, too.

    Raises:
        EditorError: an unknown name, a package that is missing, or a device or dtype that the kernel cannot take.
    """
    if name not in attention_backends():
        raise EditorError(f"There is no attention backend {name!r}; there are {', '.join(attention_backends())}.")
    if device.type == "cpu" and name not in ANYWHERE:
        raise EditorError(f"The attention backend {name!r} needs a GPU, but the editor is on the CPU; use 'native'.")
    if dtype == torch.float32 and any(word in name for word in HALF_ONLY):
        raise EditorError(
            f"The attention backend {name!r} needs bfloat16 weights, but they are float32; use 'native' or another dtype."
        )
    try:
        with _no_warnings():
            transformer.set_attention_backend(name)
    except (RuntimeError, ValueError, ImportError) as error:
        raise EditorError(f"The attention backend {name!r} cannot be used: {' '.join(str(error).split())}") from error


def takes_masks(name: str | None) -> bool:
    """Whether padded prompts may be masked; other kernels are given prompts of one length at a time."""
    return name is None or name in TAKE_MASKS


@contextmanager
def _no_warnings() -> Iterator[None]:
    """diffusers calls the switch experimental at every use."""
    log = logging.getLogger("diffusers.models.modeling_utils")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)
