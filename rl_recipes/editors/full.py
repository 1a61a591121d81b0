"""Full fine-tuning: all of a transformer's weights train, and a copy of those it began with is the reference policy."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rl_recipes.editors import lora
from rl_recipes.editors.errors import EditorError
from tpips_reward.files import make_readable

FOLDER = "transformer"


class FullWeights:
    """The trained weights of `transformer`; takes as much memory again for the copy.

    Raises:
        EditorError: the transformer is not in float32, where small updates would be rounded away, or has an adapter.
    """

    def __init__(self, transformer: Any) -> None:
        if lora.has_adapter(transformer):
            raise EditorError("The transformer has a LoRA adapter; load the editor anew to train all of its weights.")
        other = next((p.dtype for p in transformer.parameters() if p.dtype != torch.float32), None)
        if other is not None:
            raise EditorError(
                f"Full fine-tuning needs float32 weights, but the transformer's are {other}: updates would be rounded away. "
                "Load the editor with dtype float32; mixed precision (bf16) still computes fast."
            )
        self.transformer = transformer.requires_grad_(True)
        self._reference = [p.detach().clone() for p in transformer.parameters()]

    def parameters(self) -> list[nn.Parameter]:
        """All of the transformer's parameters."""
        return list(self.transformer.parameters())

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """The weights that training began with, for the block; graphs built before stay valid."""
        trained = [p.data for p in self.parameters()]
        self._put(self._reference)
        try:
            yield
        finally:
            self._put(trained)

    def _put(self, values: list[Tensor]) -> None:
        for parameter, value in zip(self.parameters(), values, strict=True):
            parameter.data = value

    def save(self, folder: Path) -> Path:
        """Write `folder`/transformer as diffusers does; `from_pretrained` of the transformer's class takes it."""
        target = folder / FOLDER
        target.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".full-") as scratch:
            self.transformer.save_pretrained(scratch, safe_serialization=True)
            for path in sorted(Path(scratch).iterdir()):
                make_readable(path)
                os.replace(path, target / path.name)
        return target
