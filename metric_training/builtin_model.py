"""The small Qwen3-VL backbone of the built-in metrics, from scratch: transformers' own classes with small dimensions."""

from __future__ import annotations

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    PreTrainedTokenizerFast,
    Qwen2VLImageProcessor,
    Qwen3VLConfig,
    Qwen3VLModel,
    Qwen3VLProcessor,
    Qwen3VLVideoProcessor,
)

from tpips_reward.fusion.late import LateFusion
from tpips_reward.prompts import SPECIAL_TOKENS
from tpips_reward.scenes import ASPECTS, wordings

_PATCH, _MERGE, _SIDE = 8, 2, 64

# The turns of Qwen's chat format: role, content, end; images between vision tokens.
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def build_tokenizer(vocab_size: int = 1200) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer learnt from the prompts and the training wordings; any other text splits into pieces."""
    prompts = [
        "Represent the user's input.",
        "Represent the similarity of the image.",
        "Measure the similarity between the two images.",
        "system\n", "user\n", "assistant\n",
    ]  # fmt: skip
    corpus = prompts * 50
    for name in ASPECTS:
        for phrase in wordings(name, "train"):
            corpus += [
                f"Represent the similarity of the image based on {phrase}.",
                f"Measure the similarity between the two images based on {phrase}.",
            ]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<|endoftext|>",
        eos_token="<|im_end|>",
        extra_special_tokens=list(SPECIAL_TOKENS[1:]),
        model_max_length=32768,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def build_processor(tokenizer: PreTrainedTokenizerFast) -> Qwen3VLProcessor:
    """The processor whose config tells the patch size and that every image is brought to about 64 x 64 pixels' area."""
    size = {"shortest_edge": 3 * _SIDE**2 // 4, "longest_edge": 9 * _SIDE**2 // 8}
    shared = {"patch_size": _PATCH, "merge_size": _MERGE, "temporal_patch_size": 2, "size": size}
    mean_std = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    return Qwen3VLProcessor(
        image_processor=Qwen2VLImageProcessor(**shared, **mean_std),
        tokenizer=tokenizer,
        video_processor=Qwen3VLVideoProcessor(**shared, **mean_std),
        chat_template=CHAT_TEMPLATE,
    )


def build_late_fusion(seed: int = 0, *, hidden: int = 128, layers: int = 3, vision_hidden: int = 128) -> LateFusion:
    """A randomly initialised late-fusion model in the built-in size.

    Args:
        seed: of the weights.
        hidden: width of the language tower; layers: its depth.
        vision_hidden: width of the vision tower (four blocks, of which the second and third feed the language tower).
    """
    tokenizer = build_tokenizer()
    ids = {token: tokenizer.convert_tokens_to_ids(token) for token in SPECIAL_TOKENS}
    config = Qwen3VLConfig(
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": hidden,
            "intermediate_size": 2 * hidden,
            "num_hidden_layers": layers,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": hidden // 4,
            "max_position_embeddings": 4096,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "mrope_interleaved": True,
                "mrope_section": [hidden // 8 - 2 * (hidden // 24), hidden // 24, hidden // 24],
            },
            "pad_token_id": ids["<|endoftext|>"],
            "eos_token_id": ids["<|im_end|>"],
        },
        vision_config={
            "depth": 4,
            "hidden_size": vision_hidden,
            "intermediate_size": 2 * vision_hidden,
            "num_heads": 4,
            "patch_size": _PATCH,
            "spatial_merge_size": _MERGE,
            "temporal_patch_size": 2,
            "num_position_embeddings": (_SIDE // _PATCH) ** 2,
            "deepstack_visual_indexes": [1, 2],
            "out_hidden_size": hidden,
        },
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=False,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3VLModel(config)
    processor = build_processor(tokenizer)
    return LateFusion(model, tokenizer, processor, chat_template=CHAT_TEMPLATE, processor=processor)
