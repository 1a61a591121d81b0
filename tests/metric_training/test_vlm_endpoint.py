"""Answers from an OpenAI-compatible endpoint, against a server on this machine that misbehaves by a script."""

from __future__ import annotations

import base64
import json
import math
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BytesIO
from typing import Any

import pytest
import torch
from PIL import Image

from metric_training.evaluation.baselines import load_judge
from metric_training.evaluation.endpoint_vlm import EndpointVLM, from_logprobs, parse_answer
from metric_training.evaluation.vlm import SCORES, Question
from tpips_reward import TPIPSError
from tpips_reward.aspects.endpoint import api_key

SIDES = ("left", "middle", "right")


def reply(text: str | None, logprobs: list[dict[str, float]] | None = None) -> dict[str, Any]:
    choice: dict[str, Any] = {"message": {"role": "assistant", "content": text}}
    if logprobs is not None:
        choice["logprobs"] = {
            "content": [
                {
                    "token": next(iter(position)),
                    "logprob": next(iter(position.values())),
                    "top_logprobs": [{"token": t, "logprob": v} for t, v in position.items()],
                }
                for position in logprobs
            ]
        }
    return {"choices": [choice]}


class Server:
    """Answers the n-th request with the n-th of its answers (the last again and again): a dict, a (status, text,
    headers) triple, bytes, or a function that returns one."""

    def __init__(self, answers: list[Any]) -> None:
        self.answers, self.requests, self.keys = answers, [], []  # type: ignore[var-annotated]
        lock = threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with lock:
                    answer = outer.answers[min(len(outer.requests), len(outer.answers) - 1)]
                    outer.requests.append((self.path, body))
                    outer.keys.append(self.headers.get("Authorization"))
                answer = answer() if callable(answer) else answer
                status, content, headers = answer if isinstance(answer, tuple) else (200, answer, {})
                payload = content if isinstance(content, bytes) else json.dumps(content).encode()
                try:
                    self.send_response(status)
                    for name, value in headers.items():
                        self.send_header(name, value)
                    self.end_headers()
                    self.wfile.write(payload)
                except OSError:  # the client did not wait
                    pass

            def log_message(self, *arguments: Any) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}/v1"
        threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()


@pytest.fixture
def serve() -> Iterator[Callable[..., Server]]:
    servers: list[Server] = []

    def start(*answers: Any) -> Server:
        servers.append(Server(list(answers)))
        return servers[-1]

    yield start
    for server in servers:
        server.http.shutdown()
        server.http.server_close()


def client(server: Server, **options: Any) -> tuple[EndpointVLM, list[float]]:
    pauses: list[float] = []
    made = EndpointVLM(
        server.url, "m", **{"key": "secret", "timeout": 5.0, "workers": 1, "sleep": pauses.append} | options
    )
    return made, pauses


def question(choices: tuple[str, ...] = SIDES) -> Question:
    return Question(torch.full((3, 4, 6), 0.5), "Which?", choices)


def test_log_probabilities_become_a_distribution(serve: Callable[..., Server]) -> None:
    first = {"left": math.log(0.5), " Right": math.log(0.2), "Left": math.log(0.1), "the": math.log(0.1)}
    server = serve(reply("left", [first]))
    vlm, _ = client(server)
    (answer,) = vlm.answer([question()])
    assert answer is not None and answer.tolist() == pytest.approx([0.75, 0, 0.25])
    (path, body), *_ = server.requests
    assert path == "/v1/chat/completions" and server.keys == ["Bearer secret"]
    assert (body["model"], body["temperature"], body["logprobs"]) == ("m", 0, True)
    picture, text = body["messages"][0]["content"]
    assert text == {"type": "text", "text": "Which?"}
    with Image.open(BytesIO(base64.b64decode(picture["image_url"]["url"].partition("base64,")[2]))) as image:
        assert image.size == (6, 4) and image.getpixel((0, 0)) == (127, 127, 127)


def test_text_counts_where_there_are_no_log_probabilities(serve: Callable[..., Server]) -> None:
    server = serve(reply("The middle one."), reply("7"), reply("left, or right?"), reply(None), {"odd": 1})
    vlm, _ = client(server)
    answers = vlm.answer([question(), question(SCORES), question(), question(), question()])
    assert answers[0] is not None and answers[0].tolist() == [0, 1, 0]
    assert answers[1] is not None and int(answers[1].argmax()) == 7
    assert answers[2:] == [None, None, None]
    facts = vlm.facts()
    assert (facts["questions"], facts["from text"], facts["cannot be parsed"], facts["failed"]) == (5, 2, 3, 0)


def test_passing_failures_are_tried_again_with_growing_pauses(serve: Callable[..., Server]) -> None:
    busy = (503, {"error": "busy"}, {})
    server = serve(busy, busy, (429, {}, {"Retry-After": "7"}), b"no json", reply("left"))
    vlm, pauses = client(server)
    (answer,) = vlm.answer([question()])
    assert answer is not None and pauses == [1, 2, 7, 8] and vlm.facts()["retries"] == 4


def test_what_fails_to_the_end_has_no_answer(serve: Callable[..., Server]) -> None:
    server = serve((500, {}, {}), (500, {}, {}), reply("left"))
    vlm, _ = client(server, retries=1)
    first, second = vlm.answer([question(), question()])
    assert first is None and second is not None
    assert vlm.facts()["failed"] == 1 and vlm.facts()["retries"] == 1


def test_time_outs_are_counted(serve: Callable[..., Server]) -> None:
    def late() -> dict[str, Any]:
        time.sleep(0.5)
        return reply("left")

    server = serve(late, reply("right"))
    vlm, _ = client(server, timeout=0.15)
    (answer,) = vlm.answer([question()])
    assert answer is not None and answer.tolist() == [0, 0, 1]
    assert vlm.facts()["time-outs"] == 1 and vlm.facts()["retries"] == 1


def test_options_that_a_server_does_not_take_are_left_out(serve: Callable[..., Server]) -> None:
    server = serve(
        (400, {"error": {"message": "logprobs is not supported"}}, {}),
        (400, {"error": {"message": "Unsupported parameter: 'max_tokens', use 'max_completion_tokens'"}}, {}),
        reply("right"),
    )
    vlm, pauses = client(server)
    answers = vlm.answer([question(), question()])
    assert all(answer is not None for answer in answers) and pauses == [] and len(server.requests) == 4
    last = server.requests[-1][1]
    assert "logprobs" not in last and "max_tokens" not in last and last["max_completion_tokens"] == 16


def test_a_refusal_stops_with_the_servers_words_and_without_the_key(serve: Callable[..., Server]) -> None:
    vlm, _ = client(serve((401, {"error": "wrong key"}, {})))
    with pytest.raises(TPIPSError, match="refused a request for 'm' .status 401.*wrong key") as caught:
        vlm.answer([question()])
    assert "secret" not in str(caught.value)


def test_a_server_that_is_down_stops_the_run(serve: Callable[..., Server]) -> None:
    server = serve(reply("left"))
    server.http.server_close()
    vlm, _ = client(server, retries=1)
    with pytest.raises(TPIPSError, match="failed 8 times in a row.*is the server up"):
        vlm.answer([question()] * 20)


def test_judges_by_address(serve: Callable[..., Server], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "for https alone")
    monkeypatch.setenv("TPIPS_API_KEY", "from the environment")
    server = serve(reply("8"))
    judge = load_judge(f"vlm-score:{server.url}#owner/model")
    scores = judge.similarities([torch.zeros(3, 4, 4), torch.ones(3, 4, 4)], [(0, 1, "pose")])  # type: ignore[attr-defined]
    assert scores.tolist() == [8] and len(server.requests) == 2
    assert server.requests[0][1]["model"] == "owner/model" and server.keys[0] == "Bearer from the environment"
    for bad in ("vlm-score:http://#m", f"vlm-triplet:{server.url}"):
        with pytest.raises(TPIPSError, match="#MODEL"):
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


def test_a_key_for_other_programs_never_travels_unencrypted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TPIPS_API_KEY", raising=False)
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    assert api_key("http://localhost:8000/v1") is None and api_key("https://api.example/v1") == "secret"


def test_a_redirect_is_not_followed(serve: Callable[..., Server]) -> None:
    target = serve((200, {}, {}))
    vlm, _ = client(serve((307, {}, {"Location": f"{target.url}/chat/completions"})))
    with pytest.raises(TPIPSError, match="status 307"):
        vlm.answer([question()])
    assert target.requests == []
