"""Answers of a vision-language model behind an OpenAI-compatible endpoint (`POST …/chat/completions`).

Where the server gives log-probabilities they become a distribution over the allowed answers, otherwise the text is
parsed. Requests that fail for a passing reason are tried again with growing pauses. What has no usable answer in the end
is counted and stays without one.
"""

from __future__ import annotations

import base64
import json
import math
import re
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPException
from io import BytesIO
from typing import Any

import torch
from torch import Tensor
from torchvision.transforms.functional import to_pil_image

from metric_training.evaluation.vlm import SCORES, Question
from tpips_reward import TPIPSError
from tpips_reward.aspects.endpoint import OPENER, api_key

_PASSING = {408, 409, 425, 429, 500, 502, 503, 504, 529}
#: So many failed requests one after the other, and none that worked, are no coincidence.
_GIVE_UP_AFTER = 8
#: The largest share of a distribution that may be unclear (is "1" the answer, or does "10" begin?) before the text counts.
_UNCLEAR = 0.01
_LONGEST_PAUSE = 60.0
#: What servers refuse to take, and what then replaces it.
_OPTIONS: dict[str, dict[str, Any]] = {
    "logprobs": {},
    "top_logprobs": {},
    "temperature": {},
    "max_tokens": {"max_completion_tokens": 16},
}


class EndpointVLM:
    """A model behind an endpoint.

    Args:
        url: of the API, such as "http://localhost:8000/v1".
        model: as the server calls it.
        key: sent as a bearer token; default: the environment's TPIPS_API_KEY, or its OPENAI_API_KEY over https. Never
            printed.
        timeout: seconds for one request.
        retries: further tries of a request that fails for a passing reason.
        workers: requests at the same time.
        sleep: waits so many seconds; tests pass their own.

    Raises:
        TPIPSError: the address is none.
    """

    def __init__(
        self,
        url: str,
        model: str,
        *,
        key: str | None = None,
        timeout: float = 120.0,
        retries: int = 5,
        workers: int = 8,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        if not re.match(r"https?://[^/\s]+", url) or not model:
            raise TPIPSError(f"The endpoint {url!r} with the model {model!r} is none; write http://HOST:PORT/v1#MODEL.")
        self.url, self.model = url.rstrip("/") + "/chat/completions", model
        self.timeout, self.retries, self.workers, self._sleep = timeout, retries, workers, sleep
        self._key = api_key(url) if key is None else key
        self._options: dict[str, Any] = {"temperature": 0, "max_tokens": 16, "logprobs": True, "top_logprobs": 20}
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._failed_in_a_row = 0

    def facts(self) -> dict[str, Any]:
        """Counts of questions, of how they were answered, and of what went wrong."""
        return {name: self._counts[name] for name in
                ("questions", "from log-probabilities", "from text", "cannot be parsed", "failed", "retries", "time-outs")}  # fmt: skip

    def answer(self, questions: Sequence[Question]) -> list[Tensor | None]:
        """Distributions over each question's choices; see `metric_training.evaluation.vlm`.

        Raises:
            TPIPSError: the server refuses the requests (wrong key, unknown model), or none of them works.
        """
        with ThreadPoolExecutor(self.workers) as pool:
            return list(pool.map(self._answer, questions))

    def _answer(self, question: Question) -> Tensor | None:
        self._count("questions")
        reply = self._request(question)
        if reply is None:
            self._count("failed")
            return None
        text, positions = reply
        found = from_logprobs(positions, question.choices) if positions else None
        if found is not None:
            self._count("from log-probabilities")
            return found
        choice = parse_answer(text, question.choices)
        if choice is None:
            self._count("cannot be parsed")
            return None
        self._count("from text")
        return torch.nn.functional.one_hot(torch.tensor(choice), len(question.choices)).double()

    def _request(self, question: Question) -> tuple[str, list[dict[str, float]]] | None:
        """Text and log-probabilities of the answer; None where all tries failed."""
        picture = base64.b64encode(_png(question.image)).decode()
        content = [
            {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{picture}"}},
            {"type": "text", "text": question.prompt},
        ]
        reason, tries = "", 0
        while True:
            with self._lock:
                options = dict(self._options)
            try:
                reply = self._post({"model": self.model, "messages": [{"role": "user", "content": content}], **options})
            except urllib.error.HTTPError as error:
                said = " ".join(error.read(4096).decode("utf-8", "replace").split())[:300]
                reason = f"status {error.code}: {said}"
                if error.code in (400, 422) and self._drop_option(said, options):
                    continue
                if error.code not in _PASSING:
                    raise TPIPSError(f"{self.url} refused a request for {self.model!r} ({reason}).") from None
                pause = _pause(error.headers.get("Retry-After"), tries)
            except (OSError, HTTPException, json.JSONDecodeError, UnicodeDecodeError) as error:
                late = any(isinstance(cause, TimeoutError) for cause in (error, getattr(error, "reason", None)))
                self._count("time-outs", int(late))
                reason = f"no answer within {self.timeout:g} s" if late else " ".join(str(error).split())[:300]
                pause = _pause(None, tries)
            else:
                with self._lock:
                    self._failed_in_a_row = 0
                return _read(reply)
            if tries == self.retries:
                self._give_up_after(reason)
                return None
            tries += 1
            self._count("retries")
            self._sleep(pause)

    def _post(self, body: Mapping[str, Any]) -> Any:
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {self._key}"} if self._key else {})
        request = urllib.request.Request(self.url, json.dumps(body).encode(), headers)
        with OPENER.open(request, timeout=self.timeout) as response:
            return json.loads(response.read().decode())

    def _drop_option(self, said: str, sent: Mapping[str, Any]) -> bool:
        """Leaves out what the server says it does not take; False where it names nothing of that kind."""
        for name, instead in _OPTIONS.items():
            if name in sent and name in said:
                with self._lock:
                    self._options.pop(name, None)
                    if name == "logprobs":
                        self._options.pop("top_logprobs", None)
                    self._options.update(instead)
                return True
        return False

    def _give_up_after(self, reason: str) -> None:
        """Counts a request that failed for good.

        Raises:
            TPIPSError: many failed, and none in between worked.
        """
        with self._lock:
            self._failed_in_a_row += 1
            if self._failed_in_a_row >= _GIVE_UP_AFTER:
                raise TPIPSError(
                    f"{self.url} failed {self._failed_in_a_row} times in a row ({reason}); is the server up?"
                )

    def _count(self, name: str, by: int = 1) -> None:
        with self._lock:
            self._counts[name] += by


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


def _read(reply: Any) -> tuple[str, list[dict[str, float]]]:
    """Text and log-probabilities of a reply; an empty text where it has another form, which no parser takes."""
    try:
        choice = reply["choices"][0]
        text = choice["message"]["content"]
    except (KeyError, IndexError, TypeError):
        return "", []
    try:
        tokens = choice["logprobs"]["content"]
        positions = [{token["token"]: float(token["logprob"])} for token in tokens]
        for own, token in zip(positions, tokens, strict=True):
            for other in token.get("top_logprobs") or []:
                own.setdefault(other["token"], float(other["logprob"]))
    except (KeyError, TypeError, ValueError, AttributeError):
        positions = []
    if any(not logprob <= 1e-6 for own in positions for logprob in own.values()):
        positions = []  # NaN, or no log-probabilities at all
    return text if isinstance(text, str) else "", positions


def _pause(wanted: str | None, tries: int) -> float:
    try:
        return min(max(float(wanted or ""), 0.0), _LONGEST_PAUSE)
    except ValueError:
        return min(2.0**tries, _LONGEST_PAUSE)


def _png(image: Tensor) -> bytes:
    target = BytesIO()
    to_pil_image(image.float().cpu().clamp(0, 1)).save(target, format="PNG")
    return target.getvalue()
