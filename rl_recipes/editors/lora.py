"""LoRA on a diffusers transformer: add, switch off, save. The adapter's weights are float32 whatever the base is."""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import get_peft_model_state_dict
from torch import nn

from rl_recipes.editors.errors import EditorError
from rl_recipes.editors.merged_lora import enable_merged_lora
from tpips_reward.files import make_readable

ADAPTER = "default"
FILE_NAME = "pytorch_lora_weights.safetensors"


def add(
    transformer: Any, targets: Sequence[str], rank: int, alpha: float, generator: torch.Generator
) -> list[nn.Parameter]:
    """Inject the adapter; A is drawn from `generator` as peft does (Kaiming uniform, a = sqrt 5), B is zero."""
    if rank < 1 or alpha <= 0:
        raise EditorError(
            f"LoRA needs a rank of at least 1 and a positive alpha, but got rank {rank} and alpha {alpha}."
        )
    if has_adapter(transformer):
        raise EditorError("The transformer already has a LoRA adapter; load the editor anew to start another one.")
    config = LoraConfig(
        r=rank, lora_alpha=alpha, target_modules=list(targets), init_lora_weights=True, lora_dropout=0.0
    )
    transformer.add_adapter(config, adapter_name=ADAPTER)
    for name, parameter in _named(transformer):
        parameter.data = parameter.data.float()
        if ".lora_A." in name:
            drawn = torch.empty(parameter.shape, dtype=torch.float32)
            nn.init.kaiming_uniform_(drawn, a=math.sqrt(5), generator=generator)
            parameter.data.copy_(drawn)
    enable_merged_lora(transformer)
    return parameters(transformer)


def has_adapter(transformer: nn.Module) -> bool:
    """Whether any layer of the transformer is adapted."""
    return any(isinstance(module, BaseTunerLayer) for module in transformer.modules())


def parameters(transformer: nn.Module) -> list[nn.Parameter]:
    """The adapter's parameters."""
    return [parameter for _, parameter in _named(transformer)]


@contextmanager
def disabled(transformer: nn.Module) -> Iterator[None]:
    """Switch the adapter off for the block. Parameters keep `requires_grad`, so graphs built before stay valid."""
    layers = [module for module in transformer.modules() if isinstance(module, BaseTunerLayer)]
    trained = parameters(transformer)
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)
        for parameter in trained:
            parameter.requires_grad_(True)


def save(pipe: Any, folder: Path) -> Path:
    """Write the adapter so that `pipe.load_lora_weights(folder)` restores it, rank and alpha included."""
    transformer = pipe.transformer
    if not has_adapter(transformer):
        raise EditorError("There is no LoRA adapter to save; call add_lora first.")
    folder.mkdir(parents=True, exist_ok=True)
    config = transformer.peft_config[ADAPTER].to_dict()
    with tempfile.TemporaryDirectory(dir=folder, prefix=".lora-") as scratch:
        type(pipe).save_lora_weights(
            save_directory=scratch,
            transformer_lora_layers=get_peft_model_state_dict(transformer, adapter_name=ADAPTER),
            weight_name=FILE_NAME,
            transformer_lora_adapter_metadata=config,
        )
        make_readable(Path(scratch) / FILE_NAME)
        os.replace(Path(scratch) / FILE_NAME, folder / FILE_NAME)
    return folder / FILE_NAME


def _named(transformer: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return [(name, p) for name, p in transformer.named_parameters() if ".lora_A." in name or ".lora_B." in name]
