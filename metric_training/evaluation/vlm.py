"""Vision-language models as judges: pairwise scores from 0 to 10, and the odd one of three (paper, §C.4).

Images are joined side by side, and every order of them is asked, since these models prefer some positions: two orders
of a pair, six of a triplet, two of the candidates. What is averaged are distributions over the allowed answers, mapped
back to the images. Where any of the orders has no usable answer, the example has none: nothing is guessed, and the
report says how many there are.

Who answers is a :class:`Respondent`: `local_vlm.py` reads the probabilities of a model on this machine,
`endpoint_vlm.py` asks a server.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from metric_training.data.comparison import Comparison, Task
from metric_training.evaluation.judges import PairwiseJudge
from tpips_reward.prompts import normalize_aspect

SCORES = tuple(str(score) for score in range(11))
#: The paper's prompts; {c} is " in terms of ASPECT", or what stands there without an aspect.
_SCORE_PROMPT = (
    "I show you two images placed side by side (left and right). Rate how similar these two images are{c} on a scale "
    "of 0 to 10, where 0 means completely different and 10 means identical. Answer with a single number from 0 to 10. "
    "Answer:"
)
_CHOICE_PROMPTS: dict[Task, str] = {
    "odd_one_out": "I provide three horizontally concatenated images (left, middle, right). Which image is the most "
    "different among the three{c}? You need to choose: left, middle, right. Answer:",
    "two_afc": "I provide three horizontally concatenated images. The center image is the reference. Which candidate "
    "(left or right) is more similar to the reference{c}? Answer with one word: left or right. Answer:",
}
#: The allowed answers, in the order of the positions that they name.
_CHOICES: dict[Task, tuple[str, ...]] = {"odd_one_out": ("left", "middle", "right"), "two_afc": ("left", "right")}


@dataclass(frozen=True, eq=False)
class Question:
    """One question about one picture.

    Attributes:
        image: (3, H, W) float in [0, 1].
        prompt: the question.
        choices: the allowed answers.
    """

    image: Tensor
    prompt: str
    choices: tuple[str, ...]


class Respondent(Protocol):
    """Who answers questions."""

    def answer(self, questions: Sequence[Question]) -> list[Tensor | None]:
        """For each question the probabilities of its choices, (n,) float with sum 1; None where there is no answer."""
        ...

    def facts(self) -> dict[str, Any]:
        """Counts for the report."""
        ...


def score_judge(name: str, respondent: Respondent) -> PairwiseJudge:
    """Similarity of two images as the expected score from 0 to 10, mean of both orders.

    Args:
        name: in reports.
        respondent: who answers.
    """

    def score(images: list[Tensor], pairs: Sequence[tuple[int, int, str]]) -> Tensor:
        questions = [
            Question(side_by_side([images[i], images[j]]), score_prompt(aspect), SCORES)
            for first, second, aspect in pairs
            for i, j in ((first, second), (second, first))
        ]
        answers = respondent.answer(questions)
        values = torch.tensor([_expectation(answer) for answer in answers], dtype=torch.float64)
        return values.view(-1, 2).mean(1)  # NaN where an order has no answer

    return PairwiseJudge(name, score, may_abstain=True, facts=respondent.facts)


class ChoiceJudge:
    """The triplet prompt: which of three images is the odd one, or which candidate is nearer to the reference.

    Args:
        name: in reports.
        respondent: who answers.
    """

    may_abstain = True

    def __init__(self, name: str, respondent: Respondent) -> None:
        self.name, self.respondent = name, respondent

    def facts(self) -> dict[str, Any]:
        """Counts of answers."""
        return self.respondent.facts()

    def __call__(self, comparisons: Sequence[Comparison], images: Mapping[str, Tensor]) -> list[Tensor]:
        """Mean probability of each choice over the orders, (A, n) each; NaN in the rows without an answer."""
        questions, orders = [], []
        for comparison in comparisons:
            shown = [images[source.key] for source in comparison.images]
            pictures = {order: side_by_side([shown[k] for k in order]) for order in layouts(comparison.task)}
            for aspect in comparison.aspects:
                prompt = choice_prompt(comparison.task, aspect)
                for order, picture in pictures.items():
                    questions.append(Question(picture, prompt, _CHOICES[comparison.task]))
                    orders.append(order)
        answers = iter(zip(self.respondent.answer(questions), orders, strict=True))
        return [
            torch.stack([_mean_choice(c.task, [next(answers) for _ in layouts(c.task)]) for _ in c.aspects])
            for c in comparisons
        ]


def layouts(task: Task) -> list[tuple[int, ...]]:
    """Orders of a comparison's images from left to right: all six, or both of the candidates around the reference."""
    return list(permutations(range(3))) if task == "odd_one_out" else [(1, 0, 2), (2, 0, 1)]


def score_prompt(aspect: str | None) -> str:
    """The pairwise question; without an aspect "overall" takes its place."""
    name = normalize_aspect(aspect)
    return _SCORE_PROMPT.replace("{c}", " overall" if name is None else f" in terms of {name}")


def choice_prompt(task: Task, aspect: str | None) -> str:
    """The question about three images."""
    name = normalize_aspect(aspect)
    return _CHOICE_PROMPTS[task].replace("{c}", "" if name is None else f" in terms of {name}")


def side_by_side(images: Sequence[Tensor]) -> Tensor:
    """Images joined from left to right, in the height of the lowest.

    Args:
        images: (3, H, W) floats in [0, 1].

    Returns:
        (3, lowest H, sum of the widths).
    """
    height = min(image.shape[-2] for image in images)

    def resized(image: Tensor) -> Tensor:
        if image.shape[-2] == height:
            return image
        width = max(1, round(image.shape[-1] * height / image.shape[-2]))
        return F.interpolate(image[None], (height, width), mode="bicubic", antialias=True)[0].clamp(0, 1)

    return torch.cat([resized(image) for image in images], dim=-1)


def _expectation(answer: Tensor | None) -> float:
    return float("nan") if answer is None else float(answer.double() @ torch.arange(len(answer), dtype=torch.float64))


def _mean_choice(task: Task, answers: list[tuple[Tensor | None, tuple[int, ...]]]) -> Tensor:
    """Probabilities by position and their orders → mean probability of each choice."""
    rows = []
    for answer, order in answers:
        if answer is None:
            return torch.full((len(_CHOICES[task]),), float("nan"), dtype=torch.float64)
        # the image at each named position: all three, or the candidates (numbered from 1) left and right of the reference
        shown = list(order) if task == "odd_one_out" else [order[0] - 1, order[2] - 1]
        row = torch.zeros(len(shown), dtype=torch.float64)
        row[torch.tensor(shown)] = answer.double().cpu()
        rows.append(row)
    return torch.stack(rows).mean(0)
