"""Editors in the dimensions of the released ones, with random weights: nothing is downloaded, and no image means anything.

Only weights are of real size; tokenizers are small ones, which costs nothing, since prompts are padded or short anyway.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKL,
    AutoencoderKLQwenImage,
    FlowMatchEulerDiscreteScheduler,
    FluxKontextPipeline,
    FluxTransformer2DModel,
    QwenImageEditPipeline,
    QwenImageTransformer2DModel,
)
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLImageProcessor,
    Qwen2VLProcessor,
    Qwen2VLVideoProcessor,
    T5Config,
    T5EncoderModel,
)

sys.path.insert(0, str(Path(__file__).parents[1] / "rl_recipes"))
import tiny_editors

from rl_recipes.builtin import components
from rl_recipes.editors import Editor
from rl_recipes.editors.flux_kontext import FluxKontext
from rl_recipes.editors.qwen_image_edit import QwenImageEdit

EDITORS = ("qwen", "kontext")


@contextmanager
def built_on(device: torch.device | str, dtype: torch.dtype) -> Iterator[None]:
    """Modules that are made in the block have their weights on the device, in the dtype."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            yield
    finally:
        torch.set_default_dtype(default)


def qwen_parts(tokenizer: Any) -> dict[str, torch.nn.Module]:
    """Transformer, text encoder (Qwen2.5-VL-7B) and VAE of Qwen-Image-Edit."""
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in components.SPECIAL_TOKENS}
    config = Qwen2_5_VLConfig(
        text_config={
            "vocab_size": 152_064, "hidden_size": 3584, "intermediate_size": 18_944, "num_hidden_layers": 28,
            "num_attention_heads": 28, "num_key_value_heads": 4, "max_position_embeddings": 128_000,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]},
        },
        vision_config={
            "depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "out_hidden_size": 3584,
            "patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2, "window_size": 112,
            "fullatt_block_indexes": [7, 15, 23, 31],
        },
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=False,
    )  # fmt: skip
    return {
        "transformer": QwenImageTransformer2DModel(),  # its defaults are the released sizes
        "text_encoder": Qwen2_5_VLForConditionalGeneration(config),
        "vae": AutoencoderKLQwenImage(),
    }


def kontext_parts() -> dict[str, torch.nn.Module]:
    """Transformer, text encoders (CLIP-L, T5-XXL) and VAE of FLUX.1-Kontext-dev."""
    clip = CLIPTextConfig(
        vocab_size=49_408, hidden_size=768, intermediate_size=3072, num_hidden_layers=12, num_attention_heads=12,
        projection_dim=768, bos_token_id=0, eos_token_id=1, pad_token_id=1,
    )  # fmt: skip
    t5 = T5Config(
        vocab_size=32_128, d_model=4096, d_kv=64, d_ff=10_240, num_layers=24, num_heads=64,
        feed_forward_proj="gated-gelu",
    )  # fmt: skip
    return {
        "transformer": FluxTransformer2DModel(guidance_embeds=True),  # the other defaults are the released sizes
        "text_encoder": CLIPTextModel(clip),
        "text_encoder_2": T5EncoderModel(t5),
        "vae": AutoencoderKL(
            down_block_types=("DownEncoderBlock2D",) * 4, up_block_types=("UpDecoderBlock2D",) * 4,
            block_out_channels=(128, 256, 512, 512), layers_per_block=2, latent_channels=16, scaling_factor=0.3611,
            shift_factor=0.1159, use_quant_conv=False, use_post_quant_conv=False,
        ),
    }  # fmt: skip


def real_parts(name: str, device: torch.device | str, dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.nn.Module]:
    """The modules of an editor of `EDITORS`, on a device; "meta" costs no memory."""
    with built_on(device, dtype):
        return qwen_parts(components.build_tokenizer()) if name == "qwen" else kontext_parts()


def _processor(tokenizer: Any) -> Qwen2VLProcessor:
    """The released processor: patches of 14 pixels, where the built-in editor has 16."""
    sizes: dict[str, Any] = {
        "patch_size": 14, "merge_size": 2, "temporal_patch_size": 2,
        "size": {"shortest_edge": 56 * 56, "longest_edge": 1280 * 28 * 28},
    }  # fmt: skip
    return Qwen2VLProcessor(
        image_processor=Qwen2VLImageProcessor(**sizes),
        tokenizer=tokenizer,
        video_processor=Qwen2VLVideoProcessor(**sizes),
    )


def build(name: str, size: str, device: torch.device, resolution: int) -> Editor:
    """An editor with random weights: `size` is "real" (bfloat16) or "tiny" (float32, for a CPU)."""
    if size == "tiny":
        pipe = tiny_editors.tiny_pipeline() if name == "qwen" else tiny_editors.tiny_flux_pipeline(kontext=True)
        dtype = torch.float32
    else:
        parts, dtype = real_parts(name, device), torch.bfloat16
        if name == "qwen":
            tokenizer = components.build_tokenizer()
            pipe = QwenImageEditPipeline(
                scheduler=FlowMatchEulerDiscreteScheduler(**tiny_editors.REAL_SCHEDULE),
                tokenizer=tokenizer, processor=_processor(tokenizer), **parts,
            )  # fmt: skip
        else:
            pipe = FluxKontextPipeline(
                scheduler=FlowMatchEulerDiscreteScheduler(**tiny_editors.FLUX_SCHEDULE),
                tokenizer=tiny_editors.clip_tokenizer(), tokenizer_2=tiny_editors.t5_tokenizer(), **parts,
            )  # fmt: skip
    if name == "qwen":
        return QwenImageEdit(pipe, device=device, dtype=dtype, resolution=resolution)
    return FluxKontext(pipe, device=device, dtype=dtype, resolution=resolution)
