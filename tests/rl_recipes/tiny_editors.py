"""Tiny editors with random weights in every part, shared by the tests of rl_recipes."""

from __future__ import annotations

from functools import cache

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, QwenImageEditPipeline, QwenImageEditPlusPipeline

from rl_recipes.builtin import components
from rl_recipes.editors.qwen_image_edit import QwenImageEdit
from rl_recipes.editors.qwen_image_edit_plus import QwenImageEditPlus

# The schedule of the released Qwen-Image-Edit: shifted with the number of tokens and stretched to a last value of 0.02.
REAL_SCHEDULE = {
    "use_dynamic_shifting": True,
    "base_shift": 0.5,
    "max_shift": 0.9,
    "base_image_seq_len": 256,
    "max_image_seq_len": 8192,
    "shift_terminal": 0.02,
}


@cache
def tokenizer():
    return components.build_tokenizer()


def tiny_pipeline(plus: bool = False, real_schedule: bool = True, seed: int = 0, **transformer_options):
    """A pipeline with two layers, whose random weights are large enough that every input shows in the output."""
    vae = components.build_vae(base_dim=8, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    spread = torch.rand(2, 16, generator=generator)
    components.set_latent_statistics(vae, (spread[0] - 0.5).tolist(), (spread[1] + 0.5).tolist())
    text_encoder = components.build_text_encoder(tokenizer(), seed=seed)
    transformer = components.build_transformer(num_layers=2, seed=seed)
    if transformer_options:
        config = dict(transformer.config) | transformer_options
        transformer = type(transformer).from_config(config).eval()
    _spread_weights(transformer, generator)
    pipe = components.build_pipeline(
        vae=vae, transformer=transformer, text_encoder=text_encoder, tokenizer=tokenizer(), seed=seed
    )
    parts = dict(pipe.components)
    if real_schedule:
        parts["scheduler"] = FlowMatchEulerDiscreteScheduler(**REAL_SCHEDULE)
    pipeline = (QwenImageEditPlusPipeline if plus else QwenImageEditPipeline)(**parts)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def tiny_editor(resolution: int = 32, **options) -> QwenImageEdit:
    return QwenImageEdit(tiny_pipeline(**options), resolution=resolution)


def tiny_plus_editor(resolution: int = 32, **options) -> QwenImageEditPlus:
    return QwenImageEditPlus(tiny_pipeline(plus=True, **options), resolution=resolution)


def images(count: int, height: int = 32, width: int = 32, seed: int = 0) -> list[torch.Tensor]:
    """Random images of uint8 precision, so that the route through PIL loses nothing."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 256, (3, height, width), generator=generator).float() / 255.0 for _ in range(count)]


def generators(count: int, seed: int = 0) -> list[torch.Generator]:
    return [torch.Generator().manual_seed(seed + index) for index in range(count)]


@torch.no_grad()
def _spread_weights(module: torch.nn.Module, generator: torch.Generator) -> None:
    for parameter in module.parameters():
        if parameter.ndim > 1:
            fan_in = parameter[0].numel()
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / fan_in**0.5)
        else:
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
