"""Qwen-Image-Edit-2509 and -2511, built from the parts of diffusers' `QwenImageEditPlusPipeline`.

Two things differ from Qwen-Image-Edit: a sample may have several condition images, and the text encoder sees them at a
size of its own (about 384 x 384 pixels), each announced as "Picture n" by the pipeline's prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit_plus as plus
from torch import Tensor

from rl_recipes.editors.base import Conditions, Images, check_image, fit_size, resize
from rl_recipes.editors.packed import Text
from rl_recipes.editors.qwen_image_edit import QwenImageEdit, to_uint8

# The pipeline rounds the sides of the text encoder's images to multiples of this.
CONDITION_MULTIPLE = 32


class QwenImageEditPlus(QwenImageEdit):
    """Qwen-Image-Edit-2509/2511: one or several condition images; the last one gives the edit its size."""

    pipeline_class: ClassVar[str] = "QwenImageEditPlusPipeline"
    takes_several: ClassVar[bool] = True

    @torch.no_grad()
    def encode(self, images: Images, instructions: Sequence[str], *, negative_prompt: str | None = None) -> Conditions:
        self._check_batch(images, instructions)
        # The pipeline encodes one sample at a time, since the images of a sample are listed in one prompt.
        parts = [
            self._encode_sample([sample] if isinstance(sample, Tensor) else list(sample), instruction, negative_prompt)
            for sample, instruction in zip(images, instructions, strict=True)
        ]
        return Conditions.cat(parts)

    def _encode_sample(self, images: list[Tensor], instruction: str, negative_prompt: str | None) -> Conditions:
        size = self.output_size(images)
        checked = [check_image(image) for image in images]
        seen = [to_uint8(resize(image, self._condition_size(image))) for image in checked]
        text = self._states([instruction], image=seen)
        negative = Text(None) if negative_prompt is None else self._states([negative_prompt], image=seen)
        fitted = [self.fit(image) for image in checked]
        latents = torch.cat([self._encode_images(image[None]) for image in fitted], dim=1)
        sizes = tuple((image.shape[-2], image.shape[-1]) for image in fitted)
        return self._conditions(text, negative, latents, size, sizes)

    def _condition_size(self, image: Tensor) -> tuple[int, int]:
        height, width = image.shape[-2:]
        return fit_size(height, width, plus.CONDITION_IMAGE_SIZE, CONDITION_MULTIPLE)
