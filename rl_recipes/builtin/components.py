"""The built-in editor's parts, randomly initialised: a `QwenImageEditPipeline` small enough for a CPU.

Every part is the real class of diffusers or transformers with small dimensions, so that whatever works here works with
Qwen/Qwen-Image-Edit. `build_pipeline()` puts them together; `pipeline.save_pretrained(folder)` writes a folder which a
plain `QwenImageEditPipeline.from_pretrained(folder)` loads.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from diffusers import (
    AutoencoderKLQwenImage,
    FlowMatchEulerDiscreteScheduler,
    QwenImageEditPipeline,
    QwenImageTransformer2DModel,
)
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers import (
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2Tokenizer,
    Qwen2VLImageProcessor,
    Qwen2VLProcessor,
    Qwen2VLVideoProcessor,
)

from tpips_reward.errors import TPIPSError
from tpips_reward.prompts import SPECIAL_TOKENS

VISION_PATCH = 16
VISION_MERGE = 2
# Bounds of the condition image's area in pixels, for the text encoder only: one merged token at least, sixteen at most.
VISION_MIN_PIXELS = 32 * 32
VISION_MAX_PIXELS = 128 * 128

# Common words of edit instructions. They make whole-word tokens for a user's own prompts; other words split into pieces.
INSTRUCTION_WORDS = (
    "make the a an object background shape image picture whole scene red green blue yellow orange purple pink brown black "
    "white gray grey cyan magenta teal navy golden silver color colour circle square triangle diamond star ring cross "
    "hexagon pentagon heart move to left right up down upper lower top bottom corner center middle of side turn into "
    "change replace with set paint recolor give it its is be becomes bigger smaller larger tiny huge size scale shrink "
    "grow enlarge reduce increase decrease darker brighter lighter warmer cooler colder dim lighting light dark bright "
    "warm cool stripes striped dots dotted plain solid checkered pattern texture smooth rough add remove one two three "
    "four five more fewer another copies count number rotate degrees clockwise tilt upright sideways on in at from and "
    "for by that this there so as very slightly much"
)


def build_vae(*, base_dim: int = 12, z_dim: int = 16, num_res_blocks: int = 1, seed: int = 0) -> AutoencoderKLQwenImage:
    """A small `AutoencoderKLQwenImage` with spatial factor 4: an image of H x W pixels gives H/4 x W/4 latents.

    Its `latents_mean` and `latents_std` are 0 and 1; set them with `set_latent_statistics` after training.
    """
    with seeded(seed):
        return AutoencoderKLQwenImage(
            base_dim=base_dim,
            z_dim=z_dim,
            dim_mult=[1, 2, 4],
            num_res_blocks=num_res_blocks,
            temperal_downsample=[False, False],
            latents_mean=[0.0] * z_dim,
            latents_std=[1.0] * z_dim,
        ).eval()


def set_latent_statistics(vae: AutoencoderKLQwenImage, mean: Sequence[float], std: Sequence[float]) -> None:
    """Store the per-channel mean and standard deviation of latents in the VAE's config, where the pipeline reads them."""
    z_dim = vae.config.z_dim
    if len(mean) != z_dim or len(std) != z_dim:
        raise TPIPSError(f"The VAE has {z_dim} latent channels, but {len(mean)} means and {len(std)} stds were given.")
    if min(std) <= 0:
        raise TPIPSError(f"Latent standard deviations must be positive, but the smallest is {min(std)}.")
    vae.register_to_config(latents_mean=[float(m) for m in mean], latents_std=[float(s) for s in std])


def build_transformer(
    *,
    z_dim: int = 16,
    num_layers: int = 4,
    num_heads: int = 4,
    head_dim: int = 32,
    text_dim: int = 96,
    seed: int = 0,
) -> QwenImageTransformer2DModel:
    """A small `QwenImageTransformer2DModel`: tokens of 2 x 2 latents, so `in_channels` is 4 * `z_dim`."""
    quarter = head_dim // 4
    spatial = (head_dim - quarter) // 2
    if quarter % 2 or spatial % 2 or quarter + 2 * spatial != head_dim:
        raise TPIPSError(f"head_dim must be a multiple of 16 so that rope axes are even, but it is {head_dim}.")
    with seeded(seed):
        return QwenImageTransformer2DModel(
            patch_size=2,
            in_channels=4 * z_dim,
            out_channels=z_dim,
            num_layers=num_layers,
            num_attention_heads=num_heads,
            attention_head_dim=head_dim,
            joint_attention_dim=text_dim,
            axes_dims_rope=(quarter, spatial, spatial),
        ).eval()


def build_tokenizer(instructions: Iterable[str] = (), *, max_vocab: int = 1024) -> Qwen2Tokenizer:
    """A byte-level BPE tokenizer in which the pipeline's prompt template has one token a word.

    The pipeline drops the first 64 tokens of a prompt: exactly its system turn when no word of it is split. The template is
    therefore learned first, and common words of instructions, with those of `instructions`, fill the rest of the vocabulary.
    Any other text is split into pieces, down to bytes.
    """
    template = _prompt_template()
    words = list(dict.fromkeys(INSTRUCTION_WORDS.split()))
    corpus = [template.replace("{}", " ")] * 50
    corpus += [*words, *[word.capitalize() for word in words]] * 2 + [f" {word}" for word in words] * 4
    corpus += sorted(set(instructions))
    for token in SPECIAL_TOKENS:
        corpus = [text.replace(token, "\0") for text in corpus]
    corpus = [piece for text in corpus for piece in text.split("\0") if piece]

    # An empty Qwen2 tokenizer has the normaliser and splitting rules with which the trained one will be used.
    rules = Qwen2Tokenizer().backend_tokenizer
    trained = Tokenizer(models.BPE())
    trained.normalizer = normalizers.NFC()
    trained.pre_tokenizer = rules.pre_tokenizer
    trainer = trainers.BpeTrainer(
        vocab_size=max_vocab,
        min_frequency=2,
        show_progress=False,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    trained.train_from_iterator(corpus, trainer)
    return _as_qwen2(trained)


def _as_qwen2(trained: Tokenizer) -> Qwen2Tokenizer:
    model = json.loads(trained.to_str())["model"]
    tokenizer = Qwen2Tokenizer(
        vocab=model["vocab"],
        merges=[tuple(pair) for pair in model["merges"]],
        unk_token="<|endoftext|>",
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        extra_special_tokens=[t for t in SPECIAL_TOKENS if t not in ("<|endoftext|>", "<|im_end|>")],
        model_max_length=1024,
    )
    if len(tokenizer) != len(model["vocab"]):
        raise TPIPSError(
            f"The tokenizer grew from {len(model['vocab'])} to {len(tokenizer)} entries when it was wrapped."
        )
    return tokenizer


def build_processor(tokenizer: Qwen2Tokenizer) -> Qwen2VLProcessor:
    """The processor that turns prompt and condition image into the text encoder's inputs."""
    sizes: dict[str, Any] = {
        "patch_size": VISION_PATCH,
        "merge_size": VISION_MERGE,
        "temporal_patch_size": 2,
        "size": {"shortest_edge": VISION_MIN_PIXELS, "longest_edge": VISION_MAX_PIXELS},
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }
    return Qwen2VLProcessor(
        image_processor=Qwen2VLImageProcessor(**sizes),
        tokenizer=tokenizer,
        video_processor=Qwen2VLVideoProcessor(**sizes),
    )


def build_text_encoder(
    tokenizer: Qwen2Tokenizer, *, text_dim: int = 96, num_layers: int = 2, vision_dim: int = 64, seed: int = 0
) -> Qwen2_5_VLForConditionalGeneration:
    """A small `Qwen2_5_VLForConditionalGeneration` (about half a million parameters) for `tokenizer`'s vocabulary."""
    heads = 4
    rotary_pairs = text_dim // heads // 2
    third = rotary_pairs // 3
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in SPECIAL_TOKENS}
    config = Qwen2_5_VLConfig(
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": text_dim,
            "intermediate_size": 2 * text_dim,
            "num_hidden_layers": num_layers,
            "num_attention_heads": heads,
            "num_key_value_heads": heads,
            "max_position_embeddings": 2048,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "mrope_section": [rotary_pairs - 2 * third, third, third],
            },
            "bos_token_id": ids["<|endoftext|>"],
            "eos_token_id": ids["<|im_end|>"],
            "pad_token_id": ids["<|endoftext|>"],
        },
        vision_config={
            "depth": 1,
            "hidden_size": vision_dim,
            "intermediate_size": 2 * vision_dim,
            "num_heads": 4,
            "patch_size": VISION_PATCH,
            "spatial_merge_size": VISION_MERGE,
            "temporal_patch_size": 2,
            "window_size": VISION_PATCH * VISION_MERGE * 4,
            "fullatt_block_indexes": [0],
            "out_hidden_size": text_dim,
        },
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        bos_token_id=ids["<|endoftext|>"],
        eos_token_id=ids["<|im_end|>"],
        pad_token_id=ids["<|endoftext|>"],
        tie_word_embeddings=True,
    )
    with seeded(seed):
        model = Qwen2_5_VLForConditionalGeneration(config).eval()
    model.generation_config.bos_token_id = ids["<|endoftext|>"]
    model.generation_config.eos_token_id = ids["<|im_end|>"]
    model.generation_config.pad_token_id = ids["<|endoftext|>"]
    return model


def build_scheduler(*, shift: float = 1.0) -> FlowMatchEulerDiscreteScheduler:
    """The flow-matching scheduler with a fixed shift: at this size the schedule need not depend on the resolution."""
    return FlowMatchEulerDiscreteScheduler(num_train_timesteps=1000, shift=shift, use_dynamic_shifting=False)


def build_pipeline(
    instructions: Iterable[str] = (),
    *,
    vae: AutoencoderKLQwenImage | None = None,
    transformer: QwenImageTransformer2DModel | None = None,
    text_encoder: Qwen2_5_VLForConditionalGeneration | None = None,
    tokenizer: Qwen2Tokenizer | None = None,
    seed: int = 0,
) -> QwenImageEditPipeline:
    """A complete pipeline of small parts; parts that are given are used, the others are built from `seed`.

    Args:
        instructions: edit instructions whose words get tokens of their own (see `build_tokenizer`).
        vae, transformer, text_encoder, tokenizer: parts to use; a text encoder needs its own tokenizer beside it.
        seed: seed of the random weights; the global random state is left as it was.

    Raises:
        TPIPSError: a text encoder without its tokenizer, or parts whose dimensions do not fit together.
    """
    if text_encoder is not None and tokenizer is None:
        raise TPIPSError("A text encoder was given without its tokenizer; give both, since its vocabulary must match.")
    tokenizer = tokenizer or build_tokenizer(instructions)
    text_encoder = text_encoder or build_text_encoder(tokenizer, seed=seed)
    vae = vae or build_vae(seed=seed)
    text_dim = text_encoder.config.text_config.hidden_size
    transformer = transformer or build_transformer(z_dim=vae.config.z_dim, text_dim=text_dim, seed=seed)
    if transformer.config.joint_attention_dim != text_dim:
        raise TPIPSError(
            f"The transformer expects text states of width {transformer.config.joint_attention_dim}, but the text encoder "
            f"gives {text_dim}; build the transformer with text_dim={text_dim}."
        )
    if transformer.config.in_channels != 4 * vae.config.z_dim:
        raise TPIPSError(
            f"The transformer takes {transformer.config.in_channels} channels, but the VAE's {vae.config.z_dim} latent "
            f"channels give {4 * vae.config.z_dim}; build the transformer with z_dim={vae.config.z_dim}."
        )
    pipeline = QwenImageEditPipeline(
        scheduler=build_scheduler(),
        vae=vae,
        text_encoder=text_encoder,
        tokenizer=tokenizer,
        processor=build_processor(tokenizer),
        transformer=transformer,
    )
    check_prompt_prefix(pipeline)
    return pipeline


def check_prompt_prefix(pipeline: QwenImageEditPipeline) -> None:
    """Raise TPIPSError unless the tokens that the pipeline drops are exactly its prompt template's system turn."""
    prefix = pipeline.prompt_template_encode.split("<|vision_start|>")[0]
    count = len(pipeline.tokenizer(prefix)["input_ids"])
    if count != pipeline.prompt_template_encode_start_idx:
        raise TPIPSError(
            f"The tokenizer splits the prompt template's system turn into {count} tokens, but the pipeline drops "
            f"{pipeline.prompt_template_encode_start_idx}; raise max_vocab in build_tokenizer."
        )


def _prompt_template() -> str:
    """The prompt template of QwenImageEditPipeline, read from the class so that no copy of it can go stale."""
    parts = ("scheduler", "vae", "text_encoder", "tokenizer", "processor", "transformer")
    return QwenImageEditPipeline(**dict.fromkeys(parts)).prompt_template_encode


class seeded:
    """Seeds torch for the block and restores the state afterwards: module constructors take no generator."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def __enter__(self) -> None:
        self.state = torch.random.get_rng_state()
        torch.random.manual_seed(self.seed)

    def __exit__(self, *error: object) -> None:
        torch.random.set_rng_state(self.state)
