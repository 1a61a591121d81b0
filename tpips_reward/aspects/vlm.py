"""A vision-language model of transformers on this machine, asked one question about one image at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from tpips_reward.errors import TPIPSError

if TYPE_CHECKING:
    from PIL.Image import Image

#: Ten aspects and two headings take about a hundred tokens.
MAX_NEW_TOKENS = 256


class VisionLanguageModel:
    """Any model of `AutoModelForImageTextToText` whose processor has a chat template. Answers are greedy: they repeat.

    Args:
        source: a Hub id or a folder. Weights must be safetensors, and no code of the repository is run.
        device: default: the GPU if there is one.
        dtype: default: bfloat16 on a GPU, float32 on the CPU.
        max_new_tokens: of an answer.

    Raises:
        TPIPSError: it cannot be loaded.
    """

    def __init__(
        self,
        source: str,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        max_new_tokens: int = MAX_NEW_TOKENS,
    ) -> None:
        from transformers import AutoModelForImageTextToText, AutoProcessor

        self.device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        self.dtype = dtype or (torch.float32 if self.device.type == "cpu" else torch.bfloat16)
        self.source, self.max_new_tokens = source, max_new_tokens
        try:
            self.processor: Any = AutoProcessor.from_pretrained(source, trust_remote_code=False)
            model: Any = AutoModelForImageTextToText.from_pretrained(
                source, dtype=self.dtype, use_safetensors=True, trust_remote_code=False
            )
        except Exception as error:  # configs, weights and the Hub's client fail in many ways; each means: not to be had
            reason = " ".join(str(error).split())[:300]
            raise TPIPSError(
                f"The vision-language model {source!r} cannot be loaded ({type(error).__name__}: {reason}); give a Hub id "
                "or a folder of an image-text-to-text model."
            ) from error
        if getattr(self.processor, "chat_template", None) is None:
            raise TPIPSError(f"The vision-language model {source!r} has no chat template; give an instruction-tuned one.")
        self.model = model.to(self.device).eval()

    @torch.no_grad()
    def ask(self, question: str, image: Image | None) -> str:
        """The answer to a question, after the image where there is one."""
        content: list[dict[str, Any]] = [{"type": "image", "image": image}] if image is not None else []
        messages = [{"role": "user", "content": [*content, {"type": "text", "text": question}]}]
        inputs = self.processor.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
        ).to(self.device, self.dtype)
        tokens = self.model.generate(**inputs, max_new_tokens=self.max_new_tokens, do_sample=False)
        answer = tokens[:, inputs["input_ids"].shape[1] :]
        return self.processor.batch_decode(answer, skip_special_tokens=True)[0]
