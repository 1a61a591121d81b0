"""The backbone as an embedding model of its own: an image, or an image and a text, under an instruction → a vector.

Qwen3-VL-Embedding reads a system turn (the instruction), a user turn (image, then text) and pools the last token. Late
fusion asks the same model about one aspect; here it gets any text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tpips_reward import Metric, TPIPSError
from tpips_reward.fusion.late import LateFusion
from tpips_reward.prompts import SplitPrompts

#: Of what is looked for; the model's own default.
DEFAULT_INSTRUCTION = "Represent the user's input."


class InstructionPrompts(SplitPrompts):
    """Late fusion's prompts with an instruction in the system turn, and any text (or none) after the image.

    Args:
        instruction: the system turn.
        tokenizer, image_token_id, vision_end_token_id, chat_template: as `SplitPrompts`.
    """

    def __init__(
        self,
        instruction: str,
        tokenizer: Any,
        image_token_id: int,
        vision_end_token_id: int,
        chat_template: str | None = None,
    ) -> None:
        self.instruction = instruction
        super().__init__(tokenizer, "late", image_token_id, vision_end_token_id, chat_template)

    def full(self, aspect: str | None) -> tuple[int, ...]:
        """Ids of the conversation; ``aspect`` is the text after the image, None for none.

        Raises:
            TPIPSError: a text that contains a control token such as <|im_end|>.
        """
        text = (aspect or "").strip()
        control = {
            *self.tokenizer.all_special_tokens,
            *(t for t in self.tokenizer.get_added_vocab() if t.startswith("<")),
        }
        if bad := next((token for token in sorted(control) if token and token in text), None):
            raise TPIPSError(f"The text {text[:80]!r} contains the control token {bad!r}; leave it out.")
        parts: list[dict[str, str]] = [{"type": "image"}, *([{"type": "text", "text": text}] if text else [])]
        turns = [
            {"role": "system", "content": [{"type": "text", "text": self.instruction}]},
            {"role": "user", "content": parts},
        ]
        template = {} if self.chat_template is None else {"chat_template": self.chat_template}
        chat = self.tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True, **template)
        return tuple(self.tokenizer(chat)["input_ids"])


def composed_embeddings(
    metric: Metric, images: list[Tensor], texts: Sequence[str | None], instruction: str = DEFAULT_INSTRUCTION
) -> Tensor:
    """Unit vectors of images, each with a text or without.

    Args:
        metric: of late fusion.
        images: B of (3, H, W) floats in [0, 1].
        texts: one an image; None for the image alone.
        instruction: the system turn.

    Returns:
        (B, D) float32.

    Raises:
        TPIPSError: another fusion, or a text with a control token.
    """
    if not isinstance(metric.fusion, LateFusion):
        raise TPIPSError(f"{metric.fusion.kind} fusion has no embedding of image and text; give a late-fusion metric.")
    backbone = metric.backbone
    config = backbone.config
    fusion = LateFusion(backbone)  # shares the weights; only the prompts are others
    fusion.token_budget = metric.fusion.token_budget
    fusion.prompts = InstructionPrompts(
        instruction, backbone.tokenizer, config.image_token_id, config.vision_end_token_id, backbone.chat_template
    )
    with torch.no_grad():
        return torch.cat(fusion.eval().embed(images, [[text] for text in texts])).float()
