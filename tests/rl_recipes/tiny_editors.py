"""Tiny editors with random weights in every part, shared by the tests of rl_recipes."""

from __future__ import annotations

import string
from functools import cache

import torch
from diffusers import (
    AutoencoderKL,
    AutoencoderKLFlux2,
    FlowMatchEulerDiscreteScheduler,
    Flux2KleinPipeline,
    Flux2Pipeline,
    Flux2Transformer2DModel,
    FluxKontextPipeline,
    FluxPipeline,
    FluxTransformer2DModel,
    QwenImageEditPipeline,
    QwenImageEditPlusPipeline,
    QwenImagePipeline,
)
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTokenizer,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    PixtralImageProcessor,
    PixtralProcessor,
    Qwen3Config,
    Qwen3ForCausalLM,
    T5Config,
    T5EncoderModel,
    T5TokenizerFast,
)

from rl_recipes.builtin import components
from rl_recipes.editors.flux import Flux
from rl_recipes.editors.flux2 import Flux2, Flux2Klein
from rl_recipes.editors.flux_kontext import FluxKontext
from rl_recipes.editors.qwen_image import QwenImage
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
# The schedule of the released FLUX.1-dev and Kontext.
FLUX_SCHEDULE = {
    "use_dynamic_shifting": True,
    "base_shift": 0.5,
    "max_shift": 1.15,
    "base_image_seq_len": 256,
    "max_image_seq_len": 4096,
    "shift": 3.0,
}
FLUX_TEXT_LENGTH = 40
# The VAEs of FLUX.1 and FLUX.2 alike: factor 4, so that sides are multiples of 8.
FLUX_VAE = {
    "down_block_types": ("DownEncoderBlock2D",) * 3,
    "up_block_types": ("UpDecoderBlock2D",) * 3,
    "block_out_channels": (8, 8, 8),
    "layers_per_block": 1,
    "norm_num_groups": 4,
    "latent_channels": 4,
    "mid_block_add_attention": False,
}
# What their transformers share.
FLUX_TRANSFORMER = {
    "in_channels": 16,
    "num_layers": 1,
    "num_single_layers": 1,
    "attention_head_dim": 16,
    "num_attention_heads": 2,
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
    return _quiet((QwenImageEditPlusPipeline if plus else QwenImageEditPipeline)(**parts))


def tiny_editor(resolution: int = 32, **options) -> QwenImageEdit:
    return QwenImageEdit(tiny_pipeline(**options), resolution=resolution)


def tiny_plus_editor(resolution: int = 32, **options) -> QwenImageEditPlus:
    return QwenImageEditPlus(tiny_pipeline(plus=True, **options), resolution=resolution)


@cache
def t5_tokenizer() -> T5TokenizerFast:
    """One token a character."""
    specials = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("\u2581", -2.0)]
    return T5TokenizerFast(vocab=specials + [(c, -4.0) for c in string.printable.strip()], extra_ids=0)


@cache
def clip_tokenizer() -> CLIPTokenizer:
    """One token a character."""
    characters = [c for c in string.printable.strip() if not c.isupper()]
    entries = ["<|startoftext|>", "<|endoftext|>", *characters, *(f"{c}</w>" for c in characters)]
    return CLIPTokenizer(vocab={entry: index for index, entry in enumerate(entries)}, merges=[], model_max_length=77)


def tiny_flux_pipeline(kontext: bool = False, seed: int = 0, **transformer_options):
    """A FLUX.1 pipeline of one double and one single block."""
    with components.seeded(seed):
        vae = AutoencoderKL(
            **FLUX_VAE, scaling_factor=0.36, shift_factor=0.12, use_quant_conv=False, use_post_quant_conv=False
        )
        t5_config = T5Config(
            vocab_size=len(t5_tokenizer()),
            d_model=32,
            d_kv=8,
            d_ff=64,
            num_layers=1,
            num_heads=4,
            feed_forward_proj="gated-gelu",
        )
        clip_config = CLIPTextConfig(
            vocab_size=len(clip_tokenizer()),
            hidden_size=24,
            intermediate_size=48,
            num_hidden_layers=1,
            num_attention_heads=4,
            bos_token_id=0,
            eos_token_id=1,
            pad_token_id=1,
        )
        options = {
            "joint_attention_dim": 32,
            "pooled_projection_dim": 24,
            "guidance_embeds": True,
            "axes_dims_rope": (4, 6, 6),
        }
        transformer = FluxTransformer2DModel(**(FLUX_TRANSFORMER | options | transformer_options))
        text_encoder, text_encoder_2 = CLIPTextModel(clip_config), T5EncoderModel(t5_config)
    return _flux_family_pipeline(
        FluxKontextPipeline if kontext else FluxPipeline,
        torch.Generator().manual_seed(seed),
        vae,
        transformer,
        text_encoder=text_encoder.eval(),
        tokenizer=clip_tokenizer(),
        text_encoder_2=text_encoder_2.eval(),
        tokenizer_2=t5_tokenizer(),
    )


def tiny_flux_editor(resolution: int = 32, **options) -> Flux:
    return Flux(tiny_flux_pipeline(**options), resolution=resolution, max_sequence_length=FLUX_TEXT_LENGTH)


def tiny_kontext_editor(resolution: int = 32, **options) -> FluxKontext:
    pipe = tiny_flux_pipeline(kontext=True, **options)
    return FluxKontext(pipe, resolution=resolution, max_sequence_length=FLUX_TEXT_LENGTH)


def tiny_flux2_pipeline(klein: bool = False, distilled: bool = False, seed: int = 0):
    """FLUX.2 dev or klein, one double and one single block.

    The text encoders are thin but deep enough for the layers that the pipelines read.
    """
    text = {
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
    }
    with components.seeded(seed):
        vae = AutoencoderKLFlux2(**FLUX_VAE)
        transformer = Flux2Transformer2DModel(
            **FLUX_TRANSFORMER,
            joint_attention_dim=3 * 16,
            timestep_guidance_channels=16,
            axes_dims_rope=(4, 4, 4, 4),
            guidance_embeds=not klein,
        )
        if klein:
            tokens = components.build_tokenizer()  # one of its own, since the template is set
            tokens.chat_template = (
                "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
                "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
            )
            text_encoder = Qwen3ForCausalLM(Qwen3Config(vocab_size=len(tokens), num_hidden_layers=28, **text))
        else:
            tokens = _pixtral_processor()
            vision = {
                "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 64
            }  # fmt: skip
            text |= {"model_type": "mistral", "num_hidden_layers": 30, "vocab_size": len(tokens.tokenizer)}
            vision["model_type"] = "pixtral"
            config = Mistral3Config(text_config=text, vision_config=vision, image_token_index=tokens.image_token_id)
            text_encoder = Mistral3ForConditionalGeneration(config)
    generator = torch.Generator().manual_seed(seed)
    pipeline = _flux_family_pipeline(
        Flux2KleinPipeline if klein else Flux2Pipeline,
        generator,
        vae,
        transformer,
        text_encoder=text_encoder.eval(),
        tokenizer=tokens,
        **({"is_distilled": distilled} if klein else {}),
    )
    vae.bn.running_mean.copy_(torch.randn(16, generator=generator))
    vae.bn.running_var.copy_(torch.rand(16, generator=generator) + 0.5)
    return pipeline


def _flux_family_pipeline(pipeline, generator: torch.Generator, vae, transformer, **parts):
    """FLUX.1 and FLUX.2 alike: random weights in autoencoder and transformer, and the schedule."""
    for part in (transformer, vae):
        _spread_weights(part, generator)
    schedule = FlowMatchEulerDiscreteScheduler(**FLUX_SCHEDULE)
    return _quiet(pipeline(scheduler=schedule, vae=vae.eval(), transformer=transformer.eval(), **parts))


def _quiet(pipeline):
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def _pixtral_processor() -> PixtralProcessor:
    tokens = components.build_tokenizer()
    tokens.add_special_tokens({"additional_special_tokens": ["[IMG]", "[IMG_BREAK]", "[IMG_END]"]})
    template = "{% for m in messages %}{{ m.role }}: {% for c in m.content %}{{ c.text }}{% endfor %}\n{% endfor %}"
    return PixtralProcessor(PixtralImageProcessor(), tokens, chat_template=template)


def tiny_flux2_editor(resolution: int = 64, **options) -> Flux2:
    return Flux2(tiny_flux2_pipeline(**options), resolution=resolution)


def tiny_klein_editor(resolution: int = 64, **options) -> Flux2Klein:
    pipe = tiny_flux2_pipeline(klein=True, **options)
    return Flux2Klein(pipe, resolution=resolution, max_sequence_length=FLUX_TEXT_LENGTH)


def tiny_qwen_image_pipeline(seed: int = 0) -> QwenImagePipeline:
    parts = tiny_pipeline(seed=seed).components
    pipeline = QwenImagePipeline(**{name: part for name, part in parts.items() if name != "processor"})
    # The released tokenizer has 34 tokens for the system turn, which the pipeline drops; this one has more.
    system = pipeline.prompt_template_encode.split("<|im_start|>user")[0]
    pipeline.prompt_template_encode_start_idx = len(pipeline.tokenizer(system)["input_ids"]) + 3
    return _quiet(pipeline)


def tiny_qwen_image_editor(resolution: int = 32, **options) -> QwenImage:
    return QwenImage(tiny_qwen_image_pipeline(**options), resolution=resolution)


# Families beside Qwen-Image-Edit, by the name of their pipeline: (build a pipeline, build an editor).
FAMILIES = {
    "FluxKontextPipeline": (lambda: tiny_flux_pipeline(kontext=True), tiny_kontext_editor),
    "FluxPipeline": (tiny_flux_pipeline, tiny_flux_editor),
    "Flux2Pipeline": (tiny_flux2_pipeline, tiny_flux2_editor),
    "Flux2KleinPipeline": (lambda: tiny_flux2_pipeline(klein=True), tiny_klein_editor),
    "QwenImagePipeline": (tiny_qwen_image_pipeline, tiny_qwen_image_editor),
    "QwenImageEditPlusPipeline": (lambda: tiny_pipeline(plus=True), tiny_plus_editor),
}


def train_a_little(editor, size: float = 0.1) -> None:
    """Move the adapter away from its start, where it changes nothing."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in editor.lora_parameters():
            parameter.add_(size * torch.randn(parameter.shape, generator=generator))


def at_size(editor, height: int, width: int):
    """The editor, with the resolution at which images of height x width keep their size."""
    editor.resolution = round((height * width) ** 0.5)
    return editor


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
