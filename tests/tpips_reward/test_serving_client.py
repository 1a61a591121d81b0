"""`remote:http://...`: the same answers as here, patience with what may pass, and an error for everything else."""

from __future__ import annotations

import io
import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any

import httpx2 as httpx
import numpy as np
import pytest
import torch
from fake_metrics import RegionMetric
from PIL import Image
from serving_workers import LocalWorker, picture, running, trouble_rewards

from tpips_reward import RemoteReward, TPIPSReward, load_reward
from tpips_reward.errors import TPIPSError
from tpips_reward.serving.client import RemoteRewardError, encode_png, parse_address
from tpips_reward.serving.limits import Limits

KEEP, CHANGE = [["background", "lighting"]], [["color"]]
EDITS, SOURCE = [picture(n) for n in (1, 2, 3)], picture(0)
HEALTH = {"reward": "tpips:preserve", "limits": {"items": 8, "body_bytes": 10**7}}


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with running([LocalWorker()]) as url:
        yield f"remote:{url}"


@contextmanager
def scripted(*answers: Any) -> Iterator[tuple[str, list[bytes]]]:
    """A server that gives these answers to /score, one after the other (the last for ever): (status, body, headers).

    With its address come the bodies that it was sent.
    """
    asked: list[bytes] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.reply(200, json.dumps(HEALTH).encode(), {})

        def do_POST(self) -> None:
            asked.append(self.rfile.read(int(self.headers["Content-Length"])))
            status, body, headers = answers[min(len(asked), len(answers)) - 1]
            if status is None:
                self.connection.close()  # no answer at all
                return
            self.reply(status, body if isinstance(body, bytes) else json.dumps(body).encode(), headers)

        def reply(self, status: int, body: bytes, headers: dict[str, str]) -> None:
            self.send_response(status)
            for name, value in {"Content-Length": str(len(body)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"remote:http://127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        server.server_close()


def good(*scores: Any) -> dict[str, Any]:
    return {"results": [{"score": score, "per_aspect": {}, "terms": {}, "error": None} for score in scores]}


def ask(address: str, count: int = 1, **options: Any) -> torch.Tensor:
    options = {"timeout": 5.0, "patience": 5.0, **options}
    return RemoteReward(address, **options)(EDITS[:count], SOURCE, KEEP, CHANGE).scores


def test_the_answer_is_that_of_the_reward_here(address):
    here = trouble_rewards().of("tpips:edit")
    there = RemoteReward(address, "tpips:edit")
    given = {"preserve": KEEP * 3, "target": [["color"], ["color", "lighting x"], ["color"]]}
    given["target_images"] = [None, picture(9), None]
    expected, found = here(EDITS, SOURCE, **given), there(EDITS, SOURCE, **given)
    torch.testing.assert_close(found.scores, expected.scores)
    assert found.scores.dtype == torch.float32
    for name, values in expected.terms.items():
        torch.testing.assert_close(found.terms[name], values, equal_nan=True)
    assert found.per_aspect == expected.per_aspect
    several = "tpips:preserve=0.7,tpips:target=0.3"
    expected, found = trouble_rewards().of(several)(EDITS, SOURCE, KEEP, CHANGE), RemoteReward(address, several)(EDITS, SOURCE, KEEP, CHANGE)
    assert list(found.parts) == list(expected.parts) == ["tpips:preserve", "tpips:target"]
    for name, values in expected.parts.items():
        torch.testing.assert_close(found.parts[name], values)


def test_images_of_any_kind(address):
    remote = RemoteReward(address)
    arrays = [np.array(edit) for edit in EDITS]
    floats = torch.stack([torch.from_numpy(array).permute(2, 0, 1) / 255 for array in arrays])
    expected = remote(EDITS, SOURCE, KEEP, CHANGE).scores
    for images in (arrays, floats, np.stack(arrays)):
        torch.testing.assert_close(remote(images, [SOURCE] * 3, KEEP, CHANGE).scores, expected)
    signed = RemoteReward(address, value_range=(-1, 1))
    torch.testing.assert_close(signed(floats * 2 - 1, SOURCE, KEEP, CHANGE).scores, expected)


def test_a_large_call_goes_in_parts_that_the_server_takes():
    worker = LocalWorker()
    with running([worker], limits=Limits(items=4, body_bytes=12_000)) as url:
        remote = RemoteReward(f"remote:{url}")
        edits = [picture(n) for n in range(1, 11)]
        found = remote(edits, SOURCE, KEEP, CHANGE).scores
    torch.testing.assert_close(found, trouble_rewards().of("tpips:preserve")(edits, SOURCE, KEEP, CHANGE).scores)


def test_a_source_travels_once():
    with scripted((200, good(0.1, 0.2, 0.3), {})) as (address, asked):
        assert ask(address, 3).tolist() == pytest.approx([0.1, 0.2, 0.3])
    assert len(asked) == 1 and asked[0].count(b"\x89PNG") == 4


def test_it_asks_as_a_reward_does(address):
    remote = RemoteReward(address)
    assert remote.requires("preserve") and not remote.requires("target") and remote.info["metric"] == "trouble"
    assert RemoteReward(address, "tpips:edit").requires("target")
    remote.check_aspects(["background"])
    remote.check_aspects("lighting")  # one aspect, not eight letters of which two are the same
    for kept, changed in (([], ["color"]), (["a", "A"], []), (["a"], ["a"]), ([" "], [])):
        with pytest.raises(TPIPSError):
            remote.check_aspects(kept, changed)


def test_load_reward_takes_both(address):
    assert isinstance(load_reward(address), RemoteReward)
    assert isinstance(load_reward("tpips:edit", metric=RegionMetric()), TPIPSReward)


@pytest.mark.parametrize("status", [408, 429, 502, 503, 504, None])
def test_what_may_pass_is_tried_again(status):
    busy = (status, {"error": {"message": "later"}}, {})
    with scripted(busy, busy, (200, good(0.5), {})) as (address, asked):
        assert ask(address).tolist() == [0.5]
    assert len(asked) == 3


def test_an_item_that_may_be_scored_later_is_asked_for_again():
    """503 of one item comes in an answer of 200 where others have scores."""
    lost = {"score": None, "error": {"status": 503, "type": "unavailable", "message": "The worker cannot be started."}}
    partly = {"results": [*good(0.5)["results"], lost]}
    with scripted((200, partly, {}), (200, good(0.5, 0.25), {})) as (address, asked):
        assert ask(address, 2).tolist() == [0.5, 0.25] and len(asked) == 2
    with scripted((200, partly, {})) as (address, _), pytest.raises(RemoteRewardError, match="503 The worker"):
        ask(address, 2, patience=0.5)


def test_an_item_that_is_lost_ends_the_call_whatever_the_others_wait_for():
    errors = [{"score": None, "error": {"status": status, "message": f"it is {status}"}} for status in (503, 422)]
    with scripted((200, {"results": errors}, {})) as (address, asked), pytest.raises(RemoteRewardError, match="it is 422"):
        ask(address, 2)
    assert len(asked) == 1


def test_retry_after_is_heeded():
    begin = time.monotonic()
    with scripted((429, {}, {"Retry-After": "1"}), (200, good(0.5), {})) as (address, _):
        assert ask(address).tolist() == [0.5]
    assert time.monotonic() - begin >= 1


@pytest.mark.parametrize("status", [400, 401, 404, 413, 415, 422, 500])
def test_what_will_not_pass_raises_at_once(status):
    refusal = (status, {"error": {"message": "because"}}, {})
    with scripted(refusal) as (address, asked), pytest.raises(RemoteRewardError, match=f"{status} because"):
        ask(address)
    assert len(asked) == 1


def test_patience_ends_in_an_error_and_not_in_zeros():
    refusal, words = (503, {"error": {"message": "no worker"}}, {}), "no worker.*No score is made of it"
    with scripted(refusal) as (address, asked), pytest.raises(RemoteRewardError, match=words):
        ask(address, patience=1.0)
    assert len(asked) >= 2


def test_a_server_that_is_not_there():
    with pytest.raises(RemoteRewardError, match=r"no answer for \d+\.\d s"):
        ask("remote:http://127.0.0.1:9", patience=0.5)


class Clock:
    """Time that passes only where somebody sleeps; `attempts` has the moments of a remote reward's attempts."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *outcomes: Any) -> None:
        """Outcomes: a status, (status, headers), or None for no connection; the last for ever."""
        self.now, self.attempts, self.outcomes = 0.0, [], outcomes
        self.each = 0.0  # seconds of an attempt
        monkeypatch.setattr("tpips_reward.serving.client.time", self)
        monkeypatch.setattr("tpips_reward.serving.client.random", SimpleNamespace(uniform=lambda low, high: low))
        monkeypatch.setattr(httpx.Client, "request", self.request)

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def request(self, method: str, path: str, **_: Any) -> httpx.Response:
        self.attempts.append(self.now)
        self.now += self.each
        outcome = self.outcomes[min(len(self.attempts), len(self.outcomes)) - 1]
        if outcome is None:
            raise httpx.ConnectError("refused")
        status, headers = outcome if isinstance(outcome, tuple) else (outcome, {})
        return httpx.Response(status, headers=headers, json=HEALTH)


@pytest.mark.parametrize(
    ("outcome", "attempts"),
    [
        (None, [0, 0.25, 0.75, 1.75, 3.75, 7.75, 15.75, 30.75, 45.75, 60]),
        (503, [0, 0.25, 0.75, 1.75, 3.75, 7.75, 15.75, 30.75, 45.75, 60]),
        ((429, {"Retry-After": "7"}), [0, 7, 14, 21, 28, 35, 42, 49, 56, 60]),
        ((503, {"Retry-After": "3600"}), [0, 60]),
        ((503, {"Retry-After": "Wed, 21 Oct 2026 07:28:00 GMT"}), [*range(61)]),
    ],
)
def test_the_last_attempt_is_made_when_patience_ends(monkeypatch, outcome, attempts):
    clock = Clock(monkeypatch, outcome)
    with pytest.raises(RemoteRewardError, match=r"no answer for 60\.0 s"):
        RemoteReward("remote:http://x", patience=60.0).info  # noqa: B018
    assert clock.attempts == attempts


def test_the_error_says_how_long_it_really_was(monkeypatch):
    clock = Clock(monkeypatch, None)
    clock.each = 8.0
    with pytest.raises(RemoteRewardError, match=r"no answer for 16\.2 s"):
        RemoteReward("remote:http://x", patience=10.0).info  # noqa: B018


def test_pauses_start_short_again_when_the_server_answers_something_else(monkeypatch):
    """It is coming up: who has waited long for a connection asks often again."""
    clock = Clock(monkeypatch, *[None] * 6, 503, 503, (503, {"Retry-After": "2"}), 503, 200)
    assert RemoteReward("remote:http://x", patience=60.0).info == HEALTH
    assert clock.attempts == [0, 0.25, 0.75, 1.75, 3.75, 7.75, 15.75, 16.0, 16.5, 18.5, 20.5]


@pytest.mark.parametrize(
    ("outcomes", "attempts"),
    [
        ([502, 503], [0, 0.25, 0.75, 1.75, 3.75, 7.75, 15.75, 30.75, 45.75, 60]),
        ([None, 503], [0, 0.25, 0.5, 1, 2, 4, 8, 16, 31, 46, 60]),  # short again once
    ],
)
def test_pauses_grow_while_the_failures_alternate(monkeypatch, outcomes, attempts):
    """Two servers behind a balancer, of which each says something else, or one that comes and goes."""
    clock = Clock(monkeypatch, *outcomes * 500)
    with pytest.raises(RemoteRewardError, match=r"no answer for 60\.0 s"):
        RemoteReward("remote:http://x", patience=60.0).info  # noqa: B018
    assert clock.attempts == attempts


def test_nobody_waits_for_anothers_first_contact():
    """Neither the client of another server, nor a thread that shares a reward: their patience passes at one time."""
    inside = threading.Barrier(4, timeout=10)

    class Meeting(RemoteReward):
        def _ask(self, method: str, path: str, **content: Any) -> dict[str, Any]:
            inside.wait()  # all four are there at one time, or nobody gets on
            return HEALTH

    shared = Meeting("remote:http://x")
    rewards = [shared, shared, Meeting("remote:http://x"), Meeting("remote:http://y")]
    with ThreadPoolExecutor(4) as pool:
        assert [info.result() for info in [pool.submit(lambda r=r: r.info) for r in rewards]] == [HEALTH] * 4
    assert shared.info == HEALTH  # asked no more: the barrier would break


@pytest.mark.parametrize(
    "body",
    [
        b"<html>a proxy</html>",
        b"[]",
        {},
        good(),
        good(0.5, 0.5),
        good(None),
        good("0.5"),
        good(True),
        b'{"results": [{"score": NaN, "error": null}]}',
        b'{"results": [{"score": 1e999, "error": null}]}',
        {"results": [{"score": 0.0, "error": {"message": "cannot"}}]},
        {"results": [0.5]},
        {"results": [{"score": 0.5, "error": "cannot"}]},
        {"results": [{"score": 10**400}]},
        {"results": [{"score": 0.5, "terms": [1]}]},
        {"results": [{"score": 0.5, "terms": {"gate": "open"}}]},
        {"results": [{"score": 0.5, "parts": {"tpips:edit": "all"}}]},
        {"results": [{"score": 0.5, "per_aspect": [1]}]},
        b"[" * 100_000,
    ],
)
def test_answers_that_are_none(body):
    with scripted((200, body, {})) as (address, _), pytest.raises(RemoteRewardError):
        ask(address)


def test_an_error_of_one_item_names_it(address):
    with pytest.raises(RemoteRewardError, match="sample 1: The reward failed on this item"):
        RemoteReward(address)(EDITS, SOURCE, [["lighting"], ["explode"], ["lighting"]])


def test_an_error_of_all_items_names_the_sample_too(address):
    """The status is then that of the first error."""
    with pytest.raises(RemoteRewardError, match="cannot score sample 0: The sample has 33 aspects; at most 32"):
        RemoteReward(address)(EDITS, SOURCE, [[f"aspect {n}" for n in range(33)]])
    with scripted((500, good(0.5), {})) as (other, _), pytest.raises(RemoteRewardError, match="refuses: 500"):
        ask(other)  # a score in an error is none


@pytest.mark.parametrize("limits", [{}, {"items": "8", "body_bytes": 10}, {"items": None, "body_bytes": 10}, {"items": 0, "body_bytes": 1}])
def test_limits_that_are_none(monkeypatch, limits):
    monkeypatch.setitem(HEALTH, "limits", limits)
    with scripted((200, good(0.5), {})) as (address, _), pytest.raises(RemoteRewardError, match="no tpips-reward server"):
        ask(address)


def test_another_server_at_that_address():
    class Wrong(RemoteReward):
        def _ask(self, method: str, path: str, **content: Any) -> dict[str, Any]:
            return {"status": "ok"}

    with pytest.raises(RemoteRewardError, match="no tpips-reward server"):
        Wrong("remote:http://x")(EDITS, SOURCE, KEEP)


def test_the_token(monkeypatch):
    with running([LocalWorker()], token="secret") as url:
        for token in (None, "wrong"):
            with pytest.raises(RemoteRewardError, match="401"):
                ask(f"remote:{url}", token=token)
        assert len(ask(f"remote:{url}", token="secret")) == 1
        monkeypatch.setenv("TPIPS_REWARD_TOKEN", "secret")
        assert len(ask(f"remote:{url}")) == 1


def test_bad_input_never_reaches_the_server():
    remote = RemoteReward("remote:http://127.0.0.1:9", patience=0.1)
    with pytest.raises(TPIPSError, match="images is empty"):
        remote([], SOURCE, KEEP)
    with pytest.raises(TPIPSError, match="requires grad"):
        remote([torch.rand(3, 8, 8, requires_grad=True)], SOURCE, KEEP)
    with pytest.raises(TPIPSError, match="both in preserve and in target"):
        remote(EDITS, SOURCE, [["a"]], [["a"]])
    with pytest.raises(TPIPSError, match="NaN"):
        remote([torch.full((3, 8, 8), float("nan"))], SOURCE, KEEP)
    with pytest.raises(TPIPSError, match="references has 2"):
        remote(EDITS, [SOURCE] * 2, KEEP)


@pytest.mark.parametrize(
    "address",
    [
        "http://host",
        "remote:",
        "remote:ftp://x",
        "remote:http://",
        "remote:http://x:99999",
        "remote:http://u:p@x",
        "remote:http://x?y",
    ],
)
def test_addresses_that_are_none(address):
    with pytest.raises(TPIPSError):
        RemoteReward(address)


def test_an_address_may_have_a_path():
    assert parse_address("remote:https://host:8443/rewards/") == "https://host:8443/rewards"


@pytest.mark.parametrize("options", [{"timeout": 0}, {"patience": float("inf")}, {"reward": "tpips:best"}])
def test_options_that_are_none(options):
    with pytest.raises(TPIPSError):
        RemoteReward("remote:http://x", **options)


def test_png_is_lossless_for_eight_bits():
    assert np.array_equal(np.asarray(Image.open(io.BytesIO(encode_png(SOURCE)))), np.asarray(SOURCE))
