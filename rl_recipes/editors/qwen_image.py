"""Qwen-Image, text to image, built from the parts of diffusers' `QwenImagePipeline`."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from rl_recipes.editors.packed import Text
from rl_recipes.editors.qwen_image_edit import QwenImageEdit


class QwenImage(QwenImageEdit):
    """Qwen-Image: the image of a sample is a reference for the reward; neither text encoder nor transformer sees it."""

    pipeline_class: ClassVar[str] = "QwenImagePipeline"
    sees_image: ClassVar[bool] = False

    def _encode_text(self, prompts: list[str], sources: Tensor) -> Text:
        return self._states(prompts)
