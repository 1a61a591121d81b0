"""The client of chat completions, against a server on this machine that misbehaves by a script."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator
from io import BytesIO
from threading import Event
from typing import Any

import pytest
from chat_server import Server, reply, serving
from PIL import Image

from tpips_reward.chat import ChatClient, NoAnswer, Refused, api_key
from tpips_reward.errors import TPIPSError

Serve = Callable[..., Server]


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Serve]:
    for name in ("TPIPS_API_KEY", "OPENAI_API_KEY", "http_proxy", "HTTP_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with serving() as start:
        yield start


def client(server: Server, **options: Any) -> tuple[ChatClient, list[float]]:
    pauses: list[float] = []
    return ChatClient(server.url, "m", **{"key": "secret", "timeout": 5.0, "wait": pauses.append} | options), pauses


def test_a_request_is_that_of_openai(serve):
    server = serve(reply("yes", [{"yes": -0.1, "no": -3.0}, {".": -0.2}]))
    found = client(server, options={"temperature": 0})[0].complete("Which?", Image.new("RGB", (6, 4), (255, 0, 0)))
    assert found.text == "yes" and found.positions == [{"yes": -0.1, "no": -3.0}, {".": -0.2}]
    ((path, body),) = server.requests
    assert path == "/v1/chat/completions" and server.keys == ["Bearer secret"]
    assert (body["model"], body["temperature"]) == ("m", 0)
    picture, text = body["messages"][0]["content"]
    assert body["messages"][0]["role"] == "user" and text == {"type": "text", "text": "Which?"}
    with Image.open(BytesIO(base64.b64decode(picture["image_url"]["url"].partition("base64,")[2]))) as image:
        assert image.size == (6, 4) and image.getpixel((0, 0)) == (255, 0, 0)
    assert client(server)[0].ask("Which?") == "yes" and len(server.requests[1][1]["messages"][0]["content"]) == 1


def test_keys_of_the_environment(serve, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "other")
    assert api_key("http://localhost:8000/v1") is None and api_key("https://api.example/v1") == "other"
    server = serve(reply("yes"))
    client(server, key=None)[0].ask("x")
    monkeypatch.setenv("TPIPS_API_KEY", "mine")
    client(server, key=None)[0].ask("x")
    assert server.keys == [None, "Bearer mine"], "another program's key does not go over plain http"


def test_passing_failures_are_tried_again_with_growing_pauses(serve):
    busy = (503, {"error": "busy"}, {})
    made, pauses = client(serve(busy, busy, (429, {}, {"Retry-After": "7"}), b"no json", reply("left")), attempts=5)
    assert made.ask("x") == "left" and pauses == [1, 2, 7, 8] and made.counts == {"retries": 4}
    made, pauses = client(serve((500, {"error": "broken"}, {"Retry-After": "999"}), (500, b"broken", {})), attempts=2)
    with pytest.raises(NoAnswer, match=r"did not answer in 2 attempts \(status 500, broken\)"):
        made.ask("x")
    assert pauses == [60]


def test_time_outs_are_counted(serve):
    given_up = Event()

    def late() -> dict[str, Any]:
        given_up.wait(60)
        return reply("left")

    made, _ = client(serve(late, reply("right")), timeout=2.0)
    answer = made.ask("x")
    given_up.set()
    assert answer == "right" and made.counts == {"retries": 1, "time-outs": 1}


def test_options_that_a_server_does_not_take_are_left_out(serve):
    server = serve(
        (400, {"error": {"message": "logprobs is not supported"}}, {}),
        (400, {"error": {"message": "Unsupported parameter: 'max_tokens', use 'max_completion_tokens'"}}, {}),
        reply("right"),
    )
    options = {"temperature": 0, "max_tokens": 16, "logprobs": True, "top_logprobs": 20}
    made, pauses = client(server, options=options)
    assert [made.ask("x"), made.ask("y")] == ["right", "right"] and pauses == [] and len(server.requests) == 4
    last = server.requests[-1][1]
    assert last["temperature"] == 0 and last["max_completion_tokens"] == 16
    assert not {"max_tokens", "logprobs", "top_logprobs"} & set(last)
    assert made.counts == {"without logprobs": 1, "without max_tokens": 1}


def test_a_refusal_that_repeats_the_question_costs_no_option(serve):
    filtered = (400, {"error": "filtered: is the color temperature the same?"}, {})
    server = serve(filtered, filtered, reply("right"))
    made, _ = client(server, options={"temperature": 0})
    with pytest.raises(Refused, match="color temperature"):
        made.ask("is the color temperature the same?")
    assert made.ask("y") == "right" and server.requests[-1][1]["temperature"] == 0 and made.counts == {}


def test_a_limit_of_the_alternatives_leaves_log_probabilities(serve):
    server = serve((400, {"error": "top_logprobs must be <= 5 where logprobs is true"}, {}), reply("right"))
    made, _ = client(server, options={"logprobs": True, "top_logprobs": 20})
    made.ask("x")
    made.ask("y")
    assert len(server.requests) == 3 and made.counts == {"without top_logprobs": 1}
    assert server.requests[-1][1]["logprobs"] is True and "top_logprobs" not in server.requests[-1][1]


@pytest.mark.parametrize(
    "answer",
    [
        b"[" * 900_000,
        b'{"choices": ' + b"1" * 9000 + b"}",
        (503, {"error": "busy"}, {"Retry-After": "nan"}),
        (503, b"cut off", {"Transfer-Encoding": "chunked"}),
    ],
    ids=["deep", "a long number", "no number of seconds", "an error that breaks off"],
)
def test_answers_that_are_odd_are_tried_again(serve, answer):
    made, pauses = client(serve(answer, reply("yes")))
    assert made.ask("x") == "yes" and pauses == [1]


@pytest.mark.parametrize("odd", [{"token": 5, "logprob": -1}, {"token": "yes", "logprob": -(10**400)}])
def test_odd_log_probabilities_are_none(serve, odd):
    answer = reply("yes")
    answer["choices"][0]["logprobs"] = {"content": [odd]}
    found = client(serve(answer))[0].complete("x")
    assert (found.text, found.positions) == ("yes", [])


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ((401, {"error": "bad key"}, {}), "refused the request for 'm' .status 401.*bad key"),
        ((403, {"error": "not yours"}, {}), "status 403"),
        ((404, {"error": "no model"}, {}), "status 404"),
        ({"odd": 1}, "no chat completion"),
        (b"x" * 1_000_001, "more than 1,000,000 bytes"),
    ],
)
def test_what_cannot_pass_stops_at_once_and_without_the_key(serve, answer, message):
    server = serve(answer)
    with pytest.raises(TPIPSError, match=message) as caught:
        client(server)[0].ask("x")
    assert not isinstance(caught.value, NoAnswer | Refused) and "secret" not in str(caught.value) and len(server.requests) == 1


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ((400, {"error": "no images"}, {}), "status 400.*no images"),
        ((422, {"error": "filtered"}, {}), "status 422.*filtered"),
        ((413, {"error": "too large; your key is secret"}, {}), "status 413.*too large; your key is …"),
        ({"choices": [{"message": {}, "finish_reason": "content_filter"}]}, "gave no text .content_filter"),
        (reply(None), "gave no text .its content is null"),
        ({"choices": [{"message": {"content": None, "refusal": "I cannot help"}}]}, "gave no text .I cannot help"),
        ({"choices": [{"message": {"refusal": "I cannot help"}}]}, "gave no text .I cannot help"),
        ({"choices": [{"message": {"content": None}, "finish_reason": "content_filter"}]}, "content_filter"),
    ],
)
def test_one_question_may_be_refused(serve, answer, message):
    server = serve(answer, reply("yes"))
    made = client(server)[0]
    with pytest.raises(Refused, match=message) as caught:
        made.ask("x")
    assert "secret" not in str(caught.value) and made.ask("y") == "yes" and len(server.requests) == 2


def test_keys_that_no_header_carries(serve, monkeypatch):
    server = serve(reply("yes"))
    client(server, key=" secret\r\n")[0].ask("x")
    client(server, key=" \n")[0].ask("x")
    assert server.keys == ["Bearer secret", None]
    for key in ("sec\nret", "sec\u20acret", "sec\x7fret"):
        with pytest.raises(TPIPSError, match="holds a line break or a letter") as caught:
            client(server, key=key)
        assert "sec" not in str(caught.value)
    monkeypatch.setenv("TPIPS_API_KEY", "sec\nret")
    with pytest.raises(TPIPSError, match="holds a line break"):
        client(server, key=None)


def test_a_redirect_is_not_followed(serve):
    target = serve(reply("x"))
    with pytest.raises(TPIPSError, match="status 302"):
        client(serve((302, {}, {"Location": f"{target.url}/chat/completions"})))[0].ask("x")
    assert target.requests == []


def test_no_server():
    with pytest.raises(NoAnswer, match="did not answer in 2 attempts"):
        ChatClient("http://127.0.0.1:9/v1", "m", attempts=2, wait=lambda seconds: None).ask("x")


@pytest.mark.parametrize(
    ("url", "model", "message"),
    [("ftp://x", "m", "no address"), ("http://", "m", "no address"), ("http://u:p@x/v1", "m", "no address"),
     ("http://x/v1?a=b", "m", "no address"), ("http://x/v1", " ", "name of a model")],
)  # fmt: skip
def test_addresses_and_models_that_are_none(url, model, message):
    with pytest.raises(TPIPSError, match=message):
        ChatClient(url, model)
