"""The Qwen3-VL backbone: the vision tower once an image, one language pass over packed sequences."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from tpips_reward.attention import Section, choose_kernel, set_kernel
from tpips_reward.errors import TPIPSError
from tpips_reward.preprocess import ImageSettings, target_size, to_patches

DEFAULT_PATCH_BUDGET = 65536
# One long aspect among short ones would otherwise make all of them as long, at the square of that in attention.
MAX_PADDING = 2


@dataclass(frozen=True)
class ImageFeatures:
    """What the language tower needs of one image.

    Attributes:
        tokens: (N, D) merged visual tokens.
        deepstack: per injected decoder layer (N, D), added to the hidden states at the image's positions.
        grid: (rows, columns) in merged tokens; N = rows * columns.
    """

    tokens: Tensor
    deepstack: tuple[Tensor, ...]
    grid: tuple[int, int]


class Backbone(nn.Module):
    """A transformers `Qwen3VLModel` (any size), with the tokenizer and image settings that belong to it.

    Args:
        model: a `Qwen3VLModel`, pre-trained or built from a config.
        tokenizer: the transformers tokenizer.
        settings: `ImageSettings`, or a processor / image processor / config dict to read them from.
        chat_template: overrides the tokenizer's own.
        processor: kept only so that it can be saved along with the weights.
    """

    def __init__(
        self, model: nn.Module, tokenizer: Any, settings: Any, chat_template: str | None = None, processor: Any = None
    ) -> None:
        super().__init__()
        self.model = model
        self.tokenizer = tokenizer
        self.settings = ImageSettings.from_processor(settings)
        self.chat_template = chat_template
        self.processor = processor
        self.patch_budget = DEFAULT_PATCH_BUDGET
        vision = self.config.vision_config
        for name, ours in (("patch_size", "patch_size"), ("spatial_merge_size", "merge_size"),
                           ("temporal_patch_size", "temporal_patch_size")):  # fmt: skip
            if getattr(vision, name) != getattr(self.settings, ours):
                raise TPIPSError(
                    f"The backbone's vision {name} is {getattr(vision, name)}, the processor's {ours} "
                    f"{getattr(self.settings, ours)}; use the processor that belongs to the backbone."
                )
        set_kernel(self.model, "sdpa")

    @property
    def config(self) -> Any:
        """The backbone's `Qwen3VLConfig`."""
        return self.model.config

    @property
    def hidden_size(self) -> int:
        return int(self.config.text_config.hidden_size)

    @property
    def device(self) -> torch.device:
        return self.model.language_model.embed_tokens.weight.device  # type: ignore[union-attr, return-value]

    @property
    def dtype(self) -> torch.dtype:
        return self.model.language_model.embed_tokens.weight.dtype  # type: ignore[union-attr, return-value]

    def count_tokens(self, height: int, width: int) -> int:
        """How many tokens of the language tower an image of this size takes."""
        rows, columns = target_size(height, width, self.settings)
        return rows * columns // self.settings.factor**2

    def encode_images(self, images: list[Tensor]) -> list[ImageFeatures]:
        """Vision tower, each image once: (3, H, W) floats in [0, 1] of any sizes -> their features, differentiable."""
        patched = to_patches([image.to(self.device) for image in images], self.settings)
        features: list[ImageFeatures] = []
        for chunk in split_by_budget([len(patches) for patches, _ in patched], self.patch_budget):
            features += self._encode_patches([patched[index] for index in chunk])
        return features

    def _encode_patches(self, patched: list[tuple[Tensor, tuple[int, int]]]) -> list[ImageFeatures]:
        grid = torch.tensor([[1, *grid] for _, grid in patched], device=self.device)
        output = self.model.get_image_features(  # type: ignore[operator]
            torch.cat([patches for patches, _ in patched]), grid, return_dict=True
        )
        merge = self.settings.merge_size
        return [
            ImageFeatures(
                tokens=output.pooler_output[index],
                deepstack=tuple(level[index] for level in output.deepstack_features),
                grid=(rows // merge, columns // merge),
            )
            for index, (_, (rows, columns)) in enumerate(patched)
        ]

    def run_language(
        self,
        ids: Tensor,
        positions: Tensor,
        sections: tuple[Section, ...] | None,
        features: list[ImageFeatures],
        *,
        mask: Tensor | None = None,
        tail: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """One pass of the language tower; the i-th image placeholder of the batch takes the i-th visual token.

        Args:
            ids: (B, L) token ids, image placeholders already repeated.
            positions: (3, B, L) M-RoPE positions (t, h, w).
            sections: which queries see which keys, see `tpips_reward.attention`; None: causal.
            features: the images in the order in which their placeholders occur.
            mask: (B, 1, L, L) boolean instead of sections, True where the query (row) sees the key (column).
            tail: (B, R, D) embeddings that follow the tokens and have no ids; L then counts them too, save in `ids`.

        Returns:
            The transformers output; `last_hidden_state` (B, L, D) is after the final norm.
        """
        embeds = self.model.language_model.embed_tokens(ids)  # type: ignore[union-attr, operator]
        visual = ids == self.config.image_token_id
        tokens = torch.cat([feature.tokens for feature in features]).to(embeds.dtype)
        embeds = embeds.masked_scatter(visual.unsqueeze(-1), tokens)
        if tail is not None:
            embeds = torch.cat([embeds, tail.to(embeds.dtype)], dim=1)
            visual = F.pad(visual, (0, tail.shape[1]))
        levels = [torch.cat(level) for level in zip(*(feature.deepstack for feature in features), strict=True)]
        return self.model.language_model(  # type: ignore[operator]
            inputs_embeds=embeds,
            position_ids=positions,
            attention_mask=mask,
            sections=sections,
            visual_pos_masks=visual,
            deepstack_visual_embeds=levels,
            use_cache=False,
            **kwargs,
        )

    @property
    def attention(self) -> str:
        """The kernel in use: "sdpa" or "flash"."""
        return str(self.model.language_model.config._attn_implementation).removeprefix("tpips_")  # type: ignore[union-attr]

    def choose_attention(self, wanted: str | None) -> None:
        """Use an attention kernel from now on; None: the fastest that runs on the device.

        Raises:
            TPIPSError: an unknown name, or a kernel that does not run here.
        """
        set_kernel(self.model, choose_kernel(wanted, self.device, self.dtype))

    def compile_layers(self) -> None:
        """Compile what repeats: the decoder layers, and the vision blocks' MLPs, each once for all of its copies.

        Whole towers would be compiled anew for every number of images. The first call of each kind takes a minute.
        """
        for layer in self.model.language_model.layers:  # type: ignore[union-attr]
            layer.compile(dynamic=True)
        for block in self.model.visual.blocks:  # type: ignore[union-attr]
            block.mlp.compile(dynamic=True)

    def enable_checkpointing(self) -> None:
        """Recompute the layers' activations in the backward pass, in eval mode too."""
        self.model.activation_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
        for module in self.model.modules():
            if isinstance(module, GradientCheckpointingLayer):
                # transformers checkpoints training layers only; the flag is set on the layer itself, not on the
                # attention inside it, so no dropout comes on
                module.training = True

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Backbone:
        # `.to(bfloat16)` would round the rotary frequencies too, which moves far positions; they stay float32.
        kept = {name: buffer for name, buffer in self.named_buffers() if "inv_freq" in name and not buffer.is_meta}
        super()._apply(fn, recurse)
        for name, buffer in kept.items():
            owner = self.get_submodule(name.rpartition(".")[0])
            leaf = name.rpartition(".")[2]
            if getattr(owner, leaf).dtype != buffer.dtype:
                setattr(owner, leaf, buffer.to(getattr(owner, leaf).device))
        return self


def split_by_budget(lengths: list[int], budget: int, padded: bool = False) -> list[list[int]]:
    """Group indices in order so that no group exceeds `budget` tokens (a single longer item is a group of its own).

    With `padded` the cost of a group is its size times its longest member, and no member is padded to more than
    `MAX_PADDING` times its length.
    """
    groups: list[list[int]] = []
    shortest = longest = total = 0
    for index, length in enumerate(lengths):
        shortest, longest, total = min(shortest, length), max(longest, length), total + length
        cost = longest * (len(groups[-1]) + 1) if padded and groups else total
        if not groups or cost > budget or (padded and longest > MAX_PADDING * shortest):
            groups.append([])
            shortest = longest = total = length
        groups[-1].append(index)
    return groups
