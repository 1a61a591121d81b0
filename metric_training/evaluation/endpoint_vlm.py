"""Answers of a vision-language model behind an OpenAI-compatible endpoint (`tpips_reward.chat`).

Where the server gives log-probabilities they become a distribution over the allowed answers, otherwise the text is
parsed. What has no usable answer in the end is counted and stays without one.
"""

from __future__ import annotations

import math
import re
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor
from torchvision.transforms.functional import to_pil_image

from metric_training.evaluation.vlm import SCORES, Question
from tpips_reward import TPIPSError
from tpips_reward.chat import ChatClient, NoAnswer, Refused

#: Fields of each request: the most likely answer, no longer than one, with its alternatives.
OPTIONS: dict[str, Any] = {"temperature": 0, "max_tokens": 16, "logprobs": True, "top_logprobs": 20}
#: So many failed requests one after the other, and none that worked, are no coincidence.
_GIVE_UP_AFTER = 8
#: The largest share of a distribution that may be unclear (is "1" the answer, or does "10" begin?) before the text counts.
_UNCLEAR = 0.01


class EndpointVLM:
    """A model behind an endpoint.

    Args:
        client: with :data:`OPTIONS`.
        workers: requests at the same time.
    """

    def __init__(self, client: ChatClient, *, workers: int = 8) -> None:
        self.client, self.workers = client, workers
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._failed_in_a_row = 0
        self._works = False  # whether the server has answered any question

    def facts(self) -> dict[str, Any]:
        """Counts of questions, of how they were answered, and of what went wrong; which options were left out."""
        own = ("questions", "from log-probabilities", "from text", "cannot be parsed", "failed")
        return {**{name: self._counts[name] for name in own}, "retries": 0, "time-outs": 0, **self.client.counts}

    def answer(self, questions: Sequence[Question]) -> list[Tensor | None]:
        """Distributions over each question's choices; see `metric_training.evaluation.vlm`.

        A question that is refused, or not answered in all attempts, has None and counts as failed.

        Raises:
            TPIPSError: the server refuses all requests (wrong key, unknown model), or many in a row do not work.
        """
        with ThreadPoolExecutor(self.workers) as pool:
            return list(pool.map(self._answer, questions))

    def _answer(self, question: Question) -> Tensor | None:
        self._count("questions")
        try:
            reply = self.client.complete(question.prompt, to_pil_image(question.image.float().cpu().clamp(0, 1)))
        except (NoAnswer, Refused) as error:  # Refused: a filter, an image that is too large
            self._count("failed")
            if not (self._works and isinstance(error, Refused)):  # all questions about one image may be refused in a row
                self._give_up_after(error)
            return None
        with self._lock:
            self._works = True
            self._failed_in_a_row = 0
        found = from_logprobs(reply.positions, question.choices) if reply.positions else None
        if found is not None:
            self._count("from log-probabilities")
            return found
        choice = parse_answer(reply.text or "", question.choices)
        if choice is None:
            self._count("cannot be parsed")
            return None
        self._count("from text")
        return torch.nn.functional.one_hot(torch.tensor(choice), len(question.choices)).double()

    def _give_up_after(self, error: TPIPSError) -> None:
        """Counts a question without an answer.

        Raises:
            TPIPSError: there were many, and no answer in between.
        """
        with self._lock:
            self._failed_in_a_row += 1
            if self._failed_in_a_row >= _GIVE_UP_AFTER:
                raise TPIPSError(f"{self._failed_in_a_row} questions in a row had no answer. {error}") from None

    def _count(self, name: str) -> None:
        with self._lock:
            self._counts[name] += 1


def from_logprobs(positions: Sequence[Mapping[str, float]], choices: Sequence[str]) -> Tensor | None:
    """A distribution over the choices from the answer's first tokens.

    Args:
        positions: for each generated token the alternatives there, token → log-probability, the generated one first.
        choices: the allowed answers.

    Returns:
        (n,) float64 with sum 1; None where the first token is no allowed answer, or where more than a hundredth of the
        distribution is unclear: with digits as single tokens, "1" may go on to "10", and only the generated answer says
        how likely that is.
    """
    first = list(positions[0].items())
    masses = torch.zeros(len(choices), dtype=torch.float64)
    for token, logprob in first:
        choice = _choice_of(token, choices)
        if choice is not None:
            masses[choice] += math.exp(logprob)
    if not first or _choice_of(first[0][0], choices) is None or masses.sum() <= 0:
        return None
    if tuple(choices) == SCORES and not any(token.strip() == "10" for token, _ in first):
        # "10" is no token here, or too unlikely to be listed: then "1" is unclear unless it was generated
        one = masses[1].clone()
        if first[0][0].strip() == "1" and len(positions) > 1:
            zero = sum(math.exp(logprob) for token, logprob in positions[1].items() if token.strip() == "0")
            masses[10], masses[1] = one * zero, one * (1 - min(zero, 1.0))
        elif first[0][0].strip() != "1" and one / masses.sum() > _UNCLEAR:
            return None
    return masses / masses.sum()


def parse_answer(text: str, choices: Sequence[str]) -> int | None:
    """The one choice that a text names; None where it names none or several.

    A score may be followed by "/10" or "out of 10"; "7.5" and "12" are no score.
    """
    plain = text.casefold()
    if tuple(choices) == SCORES:
        plain = re.sub(r"(?<=\d)\s*(?:/|out of)\s*10\b", "", plain)
        numbers = set(re.findall(r"-?\d+(?:[.,]\d+)?", plain))
        named = {int(number) for number in numbers if number in SCORES} if len(numbers) == 1 else set()
    else:
        words = set(re.findall(r"[a-z]+", plain))
        named = {index for index, choice in enumerate(choices) if choice in words}
    return named.pop() if len(named) == 1 else None


def _choice_of(token: str, choices: Sequence[str]) -> int | None:
    plain = token.strip().casefold()
    return list(choices).index(plain) if plain in choices else None
