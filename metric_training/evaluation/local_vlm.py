"""Answers of a vision-language model on this machine: the probabilities of the allowed answers, read from its logits."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torchvision.transforms.functional import to_pil_image

from metric_training.evaluation.vlm import Question
from tpips_reward import TPIPSError
from tpips_reward.devices import usable_device
from tpips_reward.dtypes import weights_dtype

#: Spellings that count as the same answer: "left", "Left", " left", " Left".
_SPELLINGS = (str, str.capitalize, " {}".format, lambda text: f" {text.capitalize()}")
#: A beginning of answers less likely than this is not followed further.
_NEGLIGIBLE = 1e-4


@dataclass(frozen=True)
class AnswerTree:
    """Allowed answers as tokens, cut where a beginning leaves only one of them.

    Attributes:
        following: beginning → next token → the choice that is settled by it, or None where several go on from there.
        whole: beginnings that are an answer themselves ("1", which begins "10" too) → that choice.
    """

    following: dict[tuple[int, ...], dict[int, int | None]]
    whole: dict[tuple[int, ...], int]


def answer_tree(tokenize: Callable[[str], Sequence[int]], choices: Sequence[str]) -> AnswerTree:
    """The tree of all spellings of the choices.

    Raises:
        TPIPSError: two choices have the same tokens, or one has none.
    """
    spelled: dict[tuple[int, ...], int] = {}
    for index, choice in enumerate(choices):
        for spell in _SPELLINGS:
            tokens = tuple(tokenize(spell(choice)))
            if not tokens or spelled.setdefault(tokens, index) != index:
                raise TPIPSError(f"The model's tokenizer does not tell the answers {', '.join(choices)} apart.")
    tree = AnswerTree({}, {})
    for tokens, whole in spelled.items():
        for length in range(1, len(tokens) + 1):
            begun, token = tokens[: length - 1], tokens[length - 1]
            left = {choice for other, choice in spelled.items() if other[:length] == tokens[:length]}
            settled = left.pop() if len(left) == 1 else None
            tree.following.setdefault(begun, {})[token] = settled
            if settled is not None:
                break
        else:
            tree.whole[tokens] = whole
    return tree


class LocalVLM:
    """A transformers vision-language model (any that `AutoModelForImageTextToText` loads).

    Args:
        model, processor: as `from_pretrained` gives them.
        batch_size: questions in one forward pass.
    """

    def __init__(self, model: Any, processor: Any, batch_size: int = 8) -> None:
        self.model, self.processor, self.batch_size = model.eval(), processor, batch_size
        self.asked, self.mass = 0, 0.0
        processor.tokenizer.padding_side = "left"  # the answer follows the last token
        if processor.tokenizer.pad_token is None:
            processor.tokenizer.pad_token = processor.tokenizer.eos_token
        self._trees: dict[tuple[str, ...], AnswerTree] = {}
        # most models can leave out the logits of the prompt, which are as large as the vocabulary a token
        few = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._options: dict[str, Any] = {"logits_to_keep": 1} if few else {}

    def facts(self) -> dict[str, Any]:
        """How many questions were asked, and the mean share of the model's probability that fell on allowed answers."""
        share = round(self.mass / self.asked, 4) if self.asked else 0.0
        return {"questions": self.asked, "probability on allowed answers": share}

    @torch.no_grad()
    def answer(self, questions: Sequence[Question]) -> list[Tensor | None]:
        """Probabilities of each question's choices, renormalised over them; see `metric_training.evaluation.vlm`.

        An answer of several tokens has the product of their probabilities. Of "1" and "10", where "10" is two tokens,
        the first gets what does not go on to the second.

        Raises:
            TPIPSError: logits that are not finite.
        """
        results: dict[int, Tensor | None] = {}
        groups: dict[tuple[str, ...], list[int]] = {}
        for index, question in enumerate(questions):
            groups.setdefault(question.choices, []).append(index)
        for choices, members in groups.items():
            if choices not in self._trees:
                self._trees[choices] = answer_tree(self._tokenize, choices)
            for start in range(0, len(members), self.batch_size):
                batch = members[start : start + self.batch_size]
                masses = torch.zeros(len(batch), len(choices), dtype=torch.float64)
                inputs = self._inputs([questions[index] for index in batch])
                self._collect(inputs, self._trees[choices], (), torch.ones(len(batch), dtype=torch.float64), masses)
                for index, row in zip(batch, masses, strict=True):
                    self.asked += 1
                    self.mass += float(row.sum())
                    results[index] = row / row.sum() if row.sum() > 0 else None
        return [results[index] for index in range(len(questions))]

    def _collect(
        self, inputs: Mapping[str, Tensor], tree: AnswerTree, begun: tuple[int, ...], reached: Tensor, masses: Tensor
    ) -> None:
        """Adds to each choice the probability of its spellings that begin with the tokens ``begun``.

        Args:
            inputs: ending in ``begun``.
            reached: (B,) probability of ``begun``.
            masses: (B, n), where it is added.
        """
        logits = self.model(**inputs, **self._options).logits[:, -1].double().cpu()
        if not bool(logits.isfinite().all()):
            raise TPIPSError("The language model gave logits that are not finite; use --dtype bfloat16 or float32.")
        following = torch.softmax(logits, dim=-1) * reached[:, None]
        rest = reached.clone()
        for token, choice in tree.following[begun].items():
            share = following[:, token]
            rest = rest - share
            if choice is not None:
                masses[:, choice] += share
            elif float(share.max()) >= _NEGLIGIBLE:
                column = torch.full((len(share), 1), token, device=inputs["input_ids"].device)
                self._collect(_longer(inputs, column), tree, (*begun, token), share, masses)
        if begun in tree.whole:
            masses[:, tree.whole[begun]] += rest.clamp(min=0)

    def _tokenize(self, text: str) -> list[int]:
        return self.processor.tokenizer(text, add_special_tokens=False)["input_ids"]

    def _inputs(self, batch: Sequence[Question]) -> dict[str, Tensor]:
        texts = []
        for question in batch:
            turn = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": question.prompt}]}
            texts.append(self.processor.apply_chat_template([turn], add_generation_prompt=True, tokenize=False))
        pictures = [[to_pil_image(question.image.float().cpu().clamp(0, 1))] for question in batch]
        encoded = self.processor(text=texts, images=pictures, padding=True, return_tensors="pt").to(self.model.device)
        kind = self.model.dtype
        return {key: value.to(kind) if value.is_floating_point() else value for key, value in encoded.items()}


def _longer(inputs: Mapping[str, Tensor], column: Tensor) -> dict[str, Tensor]:
    """The inputs with one more text token at their end."""
    shape = inputs["input_ids"].shape
    more = {"input_ids": column, "attention_mask": torch.ones_like(column)}
    return {
        # whatever else has one entry a token (types of tokens) is 0 for text
        name: torch.cat([value, more.get(name, torch.zeros_like(column)).to(value.dtype)], 1)
        if value.shape == shape
        else value
        for name, value in inputs.items()
    }


def load_local_vlm(
    source: str, *, device: str | None = None, dtype: str | None = None, revision: str | None = None
) -> LocalVLM:
    """A vision-language model from a Hub id or a folder, in safetensors, without remote code.

    Args:
        source: such as "Qwen/Qwen3-VL-8B-Instruct".
        device: default: the GPU if there is one.
        dtype: default: bfloat16 on a GPU, else float32.
        revision: of a Hub repository.

    Raises:
        TPIPSError: it cannot be had, is no vision-language model, or has no chat template.
    """
    from transformers import AutoModelForImageTextToText, AutoProcessor

    target = usable_device(device)
    kind = weights_dtype(dtype, target)
    try:
        processor: Any = AutoProcessor.from_pretrained(source, revision=revision)
        model: Any = AutoModelForImageTextToText.from_pretrained(
            source, revision=revision, dtype=kind, use_safetensors=True
        ).to(target)
    except Exception as error:  # transformers raises many kinds for what is missing, damaged or of another type
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise TPIPSError(
            f"The vision-language model {source!r} cannot be loaded ({reason}); give a Hub id or a folder of a model "
            "that AutoModelForImageTextToText knows, with its processor."
        ) from error
    tokenizer = getattr(processor, "tokenizer", None)
    if tokenizer is None or not (
        getattr(processor, "chat_template", None) or getattr(tokenizer, "chat_template", None)
    ):
        raise TPIPSError(f"{source!r} has no chat template, so it cannot be asked; use an instruction-tuned model.")
    return LocalVLM(model, processor)
