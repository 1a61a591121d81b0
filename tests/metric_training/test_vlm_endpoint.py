"""Answers from an OpenAI-compatible endpoint; how it is asked is in tests/tpips_reward/test_chat.py."""

from __future__ import annotations

import base64
import math
import sys
from collections.abc import Callable, Iterator
from io import BytesIO
from pathlib import Path

import pytest
import torch
from PIL import Image

from metric_training.evaluation.baselines import load_judge
from metric_training.evaluation.endpoint_vlm import OPTIONS, EndpointVLM, from_logprobs, parse_answer
from metric_training.evaluation.vlm import SCORES, Question
from tpips_reward import TPIPSError
from tpips_reward.chat import ChatClient

sys.path.insert(0, str(Path(__file__).parents[1] / "tpips_reward"))
from chat_server import Server, reply, serving

SIDES = ("left", "middle", "right")


@pytest.fixture
def serve() -> Iterator[Callable[..., Server]]:
    with serving() as start:
        yield start


def answers_of(server: Server, workers: int = 1, attempts: int = 2) -> EndpointVLM:
    made = ChatClient(server.url, "m", key="secret", options=OPTIONS, attempts=attempts, wait=lambda seconds: None)
    return EndpointVLM(made, workers=workers)


def question(choices: tuple[str, ...] = SIDES) -> Question:
    return Question(torch.full((3, 4, 6), 0.5), "Which?", choices)


def test_log_probabilities_become_a_distribution(serve: Callable[..., Server]) -> None:
    first = {"left": math.log(0.5), " Right": math.log(0.2), "Left": math.log(0.1), "the": math.log(0.1)}
    server = serve(reply("left", [first]))
    (answer,) = answers_of(server).answer([question()])
    assert answer is not None and answer.tolist() == pytest.approx([0.75, 0, 0.25])
    ((_, body),) = server.requests
    assert (body["temperature"], body["max_tokens"], body["logprobs"]) == (0, 16, True)
    picture, text = body["messages"][0]["content"]
    assert text["text"] == "Which?"
    with Image.open(BytesIO(base64.b64decode(picture["image_url"]["url"].partition("base64,")[2]))) as image:
        assert image.size == (6, 4) and image.getpixel((0, 0)) == (127, 127, 127)


def test_text_counts_where_there_are_no_log_probabilities(serve: Callable[..., Server]) -> None:
    server = serve(reply("The middle one."), reply("7"), reply("left, or right?"), reply(None), {"odd": 1})
    vlm = answers_of(server)
    answers = vlm.answer([question(), question(SCORES), question(), question(), question()])
    assert answers[0] is not None and answers[0].tolist() == [0, 1, 0]
    assert answers[1] is not None and int(answers[1].argmax()) == 7
    assert answers[2:] == [None, None, None]
    facts = vlm.facts()
    assert (facts["questions"], facts["from text"], facts["cannot be parsed"], facts["failed"]) == (5, 2, 3, 0)


def test_what_fails_to_the_end_has_no_answer(serve: Callable[..., Server]) -> None:
    server = serve((500, {}, {}), (500, {}, {}), reply("left"))
    vlm = answers_of(server)
    first, second = vlm.answer([question(), question()])
    assert first is None and second is not None
    assert vlm.facts()["failed"] == 1 and vlm.facts()["retries"] == 1


def test_a_question_that_is_refused_has_no_answer(serve: Callable[..., Server]) -> None:
    filtered = (400, {"error": "filtered"}, {})
    vlm = answers_of(serve((400, {"error": "temperature is not supported"}, {}), reply("left"), filtered, reply("left")))
    first, second, third = vlm.answer([question()] * 3)
    assert first is not None and second is None and third is not None
    assert vlm.facts()["failed"] == 1 and vlm.facts()["without temperature"] == 1 and vlm.facts()["time-outs"] == 0
    with pytest.raises(TPIPSError, match="8 questions in a row had no answer.*filtered"):
        answers_of(serve(filtered)).answer([question()] * 20)


def test_a_server_that_works_may_refuse_all_questions_about_an_image(serve: Callable[..., Server]) -> None:
    filtered = (400, {"error": "filtered"}, {})
    vlm = answers_of(serve(reply("left"), *[filtered] * 12, reply("left")))
    answers = vlm.answer([question()] * 14)
    assert [answer is not None for answer in answers] == [True, *[False] * 12, True] and vlm.facts()["failed"] == 12


def test_a_server_that_is_down_stops_the_run(serve: Callable[..., Server]) -> None:
    server = serve(reply("left"))
    server.http.server_close()
    vlm = answers_of(server)
    with pytest.raises(TPIPSError, match="8 questions in a row had no answer.*is the server running"):
        vlm.answer([question()] * 20)


def test_judges_by_address(serve: Callable[..., Server], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "for https alone")
    monkeypatch.setenv("TPIPS_API_KEY", "from the environment")
    server = serve(reply("8"))
    judge = load_judge(f"vlm-score:{server.url}#owner/model")
    scores = judge.similarities([torch.zeros(3, 4, 4), torch.ones(3, 4, 4)], [(0, 1, "pose")])  # type: ignore[attr-defined]
    assert scores.tolist() == [8] and len(server.requests) == 2
    assert server.requests[0][1]["model"] == "owner/model" and server.keys[0] == "Bearer from the environment"
    for bad, message in (("vlm-score:http://#m", "no address"), (f"vlm-triplet:{server.url}", "#MODEL")):
        with pytest.raises(TPIPSError, match=message):
            load_judge(bad)


def logs(**shares: float) -> dict[str, float]:
    return {token.lstrip("t"): math.log(share) for token, share in shares.items()}


def test_one_and_ten_are_told_apart_or_left_open() -> None:
    def mean(positions: list[dict[str, float]]) -> float | None:
        found = from_logprobs(positions, SCORES)
        return None if found is None else float(found @ torch.arange(11, dtype=torch.float64))

    assert mean([logs(t8=0.6, t10=0.4)]) == pytest.approx(8.8)  # "10" is one token
    assert mean([logs(t1=0.5, t4=0.5), logs(t0=0.8)]) == pytest.approx(0.4 * 10 + 0.1 * 1 + 0.5 * 4)
    assert mean([logs(t1=0.5, t4=0.5)]) == pytest.approx(2.5)  # it ended after "1"
    assert mean([logs(t8=0.995, t1=0.005)]) == pytest.approx(0.995 * 8 + 0.005)
    assert mean([logs(t8=0.6, t1=0.4)]) is None  # 1, or the beginning of 10?
    assert mean([{"Sure": -0.1, "8": -3.0}]) is None  # the answer begins with something else


@pytest.mark.parametrize(
    ("text", "score"),
    [("7", 7), ("Rating: 10.", 10), ("8/10", 8), ("3 out of 10", 3), ("**0**", 0), ("7.5", None), ("12", None), ("-3", None),
     ("between 6 and 8", None), ("6, yes 6", 6), ("seven", None), ("", None)],
)  # fmt: skip
def test_scores_in_texts(text: str, score: int | None) -> None:
    assert parse_answer(text, SCORES) == score


@pytest.mark.parametrize(
    ("text", "side"), [("Left.", 0), ("the RIGHT image", 2), ("left or middle", None), ("leftmost", None), ("", None)]
)
def test_sides_in_texts(text: str, side: int | None) -> None:
    assert parse_answer(text, SIDES) == side
