"""The server's routes: right numbers, and for every bad input the right status, JSON, and no harm to the others."""

from __future__ import annotations

import base64
import io
import json
import struct
import time
import zlib
from types import SimpleNamespace
from typing import Any

import pytest
from PIL import Image
from serving_workers import BROKEN_EXIF, LocalWorker, b64, encoded, expected_scores, picture, request_of, with_exif
from starlette.testclient import TestClient

from tpips_reward.aspects import propose
from tpips_reward.errors import TPIPSError
from tpips_reward.serving.app import create_app
from tpips_reward.serving.limits import Limits


@pytest.fixture
def worker():
    return LocalWorker()


@pytest.fixture
def client(worker):
    with TestClient(create_app([worker])) as client:
        yield client


def served(**options: Any) -> TestClient:
    return TestClient(create_app([LocalWorker()], **options))


def assert_error(response: Any, status: int, kind: str, words: str = "") -> None:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert error["status"] == status and error["type"] == kind and words in error["message"], error


# --- answers


def test_scores_are_those_of_the_reward_in_this_process(client):
    answer = client.post("/score", json=request_of(3)).json()
    assert [row["score"] for row in answer["results"]] == pytest.approx(expected_scores(3))
    first = answer["results"][0]
    assert first["error"] is None and set(first["per_aspect"]["preserve"]) == {"background", "lighting"}
    assert set(first["terms"]) == {"preserve", "target", "change", "gate"}


def test_another_reward_may_be_asked_for(client):
    answer = client.post("/score", json={"reward": "tpips:edit", **request_of()}).json()
    assert answer["reward"] == "tpips:edit"
    assert [row["score"] for row in answer["results"]] == pytest.approx(expected_scores(2, "tpips:edit"))


def test_multipart_answers_as_json_does(client):
    body = request_of(2)
    files = [("images", (f"{n}.png", encoded(picture(n)), "image/png")) for n in range(3)]
    answer = client.post("/score", data={"request": json.dumps({"items": body["items"]})}, files=files)
    assert answer.json() == client.post("/score", json=body).json()


def test_a_target_image_counts(client):
    body = request_of(1)
    body["items"][0]["target_image"] = 1
    row = client.post("/score", json={"reward": "tpips:edit", **body}).json()["results"][0]
    assert row["per_aspect"]["target_image"] == {"color": 1.0}


def test_terms_that_were_not_measured_are_null(client):
    body = request_of(1, target=[])
    assert client.post("/score", json=body).json()["results"][0]["terms"]["gate"] is None


def test_formats_and_data_addresses(client):
    body = request_of(1)
    body["images"][1] = "data:image/webp;base64," + b64(picture(1), "WEBP")
    body["images"][0] = b64(picture(0).convert("L"), "JPEG")
    assert client.post("/score", json=body).status_code == 200


def test_health_and_metrics(client, worker):
    client.post("/score", json=request_of(3))
    client.post("/score", json={"items": []})
    health = client.get("/health")
    assert health.status_code == 200
    assert health.json()["status"] == "ok" and health.json()["metric"] == "trouble"
    text = client.get("/metrics").text
    assert 'tpips_reward_requests_total{path="/score",status="200"} 1.0' in text
    assert 'tpips_reward_requests_total{path="/score",status="422"} 1.0' in text
    assert 'tpips_reward_items_total{outcome="scored"} 3.0' in text and "tpips_reward_queued_items 0.0" in text


# --- Flow-Factory and UniRL


def compute_body(count: int = 2, **fields: Any) -> dict[str, Any]:
    return {
        "prompt": ["make it red"] * count,
        "image": [b64(picture(n + 1)) for n in range(count)],
        "condition_images": [[b64(picture(0))]] * count,
        "kwargs": {"preserve": [["background", "lighting"]] * count, "target": [["color"]] * count},
        "video": None,
        **fields,
    }


def test_flow_factorys_shape(client):
    answer = client.post("/compute", json=compute_body())
    assert answer.json() == {"rewards": pytest.approx(expected_scores())}
    metadata = [json.dumps({"preserve": ["background", "lighting"], "target": ["color"]})] * 2
    assert client.post("/compute", json=compute_body(kwargs={"metadata": metadata})).json() == answer.json()
    servers = {k + "s" if k in ("prompt", "image") else k: v for k, v in compute_body().items()}
    servers["extra"] = servers.pop("kwargs")
    assert client.post("/compute", json=servers).json() == answer.json()


def test_without_aspects_rules_propose_them_from_the_instruction(client):
    assert len(client.post("/compute", json=compute_body(kwargs=None)).json()["rewards"]) == 2


def test_flow_factorys_shape_has_no_room_for_holes(client):
    images = [b64(picture(1)), "no base64!"]
    assert_error(client.post("/compute", json=compute_body(image=images)), 400, "bad_base64", "image 1")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"condition_images": None}, "required_fields"),
        ({"prompt": ["one"]}, "1 prompts, 2 images"),
        ({"condition_images": [[], []]}, "condition_images[0] is empty"),
        ({"kwargs": {"preserve": ["background"]}}, "one entry a sample"),
        ({"image": "x"}, "image"),
    ],
)
def test_what_flow_factory_may_forget(client, fields, words):
    assert_error(client.post("/compute", json=compute_body(**fields)), 422, "bad_request", words)


def history(edit: str, source: str, **fields: Any) -> dict[str, Any]:
    turns = [{"text": "make it red", "image_b64": source}, {"text": "make it red", "image_b64": edit}]
    metadata = {"preserve": ["background", "lighting"], "target": ["color"]}
    return {"history": turns, "required_rewards": ["tpips:preserve"], "metadata": metadata, "request_id": "r", **fields}


def test_unirls_shape(client):
    names = ["tpips:preserve", "tpips:edit"]
    rows = [history(b64(picture(n + 1)), b64(picture(0)), required_rewards=names) for n in range(2)]
    answer = client.post("/score", json={"protocol_version": "1", "requests": rows}).json()
    for name in names:
        assert [row[name]["score"] for row in answer["results"]] == pytest.approx(expected_scores(2, name))
    assert answer["errors"] == [{}, {}] and [row["request_id"] for row in answer["identities"]] == ["r", "r"]
    assert set(names) <= set(client.get("/health").json()["rewards"])


def test_unirls_errors_stay_with_their_sample(client):
    rows = [history(b64(picture(1)), b64(picture(0))), history("no base64!", b64(picture(0)))]
    answer = client.post("/score", json={"requests": rows}).json()
    assert answer["results"][1] == {} and "base64" in answer["errors"][1]["tpips:preserve"]
    assert answer["results"][0]["tpips:preserve"]["score"] == pytest.approx(expected_scores(1)[0])


def test_a_long_instruction_fails_its_sample_alone(client):
    """And what reads instructions is linear in their length: nobody else would be answered meanwhile."""
    assert_error(client.post("/compute", json=compute_body(prompt=["make it red", "now " * 501])), 422, "bad_request", "2004 letters")
    begin = time.monotonic()
    assert propose("now " * 400_000 + "remove the dog").kind == "remove" and time.monotonic() - begin < 20
    deep = compute_body(1, kwargs={"metadata": ["[" * 100_000]})
    assert_error(client.post("/compute", json=deep), 422, "bad_request", "no JSON")


def test_unirl_needs_two_turns(client):
    rows = [history(b64(picture(1)), b64(picture(0)))]
    rows[0]["history"].pop()
    assert_error(client.post("/score", json={"requests": rows}), 422, "bad_request", "two turns")


# --- bad input: one item of several


def bomb() -> str:
    """A PNG of a few bytes that says that it has 50,000 x 50,000 pixels."""
    head = struct.pack(">IIBBBBB", 50_000, 50_000, 8, 2, 0, 0, 0)
    chunks = b""
    for kind, data in ((b"IHDR", head), (b"IDAT", zlib.compress(b"\0" * 100)), (b"IEND", b"")):
        chunks += struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
    return base64.b64encode(b"\x89PNG\r\n\x1a\n" + chunks).decode()


BAD_IMAGES = [
    (bomb(), 413, "too_large"),
    (base64.b64encode(b"GIF89a and no image").decode(), 415, "not_an_image"),
    (base64.b64encode(encoded(picture(1))[:200]).decode(), 415, "not_an_image"),
    (base64.b64encode(b"").decode(), 415, "not_an_image"),
    (b64(picture(1), "GIF"), 415, "not_an_image"),  # a decoder that strangers do not need
    ("this is not base64", 400, "bad_base64"),
    ("http://example.org/cat.png", 422, "bad_request"),
    ("file:///etc/passwd", 422, "bad_request"),
    ("/etc/passwd", 422, "bad_request"),
    ("/etc/abc", 422, "bad_request"),  # which base64 could be
    ("photo.jpg", 422, "bad_request"),
    ("C:\\x\\a", 422, "bad_request"),
    (base64.b64encode(b"\xff\xd8\xff and no more").decode(), 415, "not_an_image"),  # /9j/, as JPEGs begin
    ("data:image/png,plain", 422, "bad_request"),
    (base64.b64encode(with_exif(picture(1), BROKEN_EXIF)).decode(), 415, "not_an_image"),
    (b64(picture(1).resize((2100, 10))), 422, "bad_request"),  # too long for the metric
]


@pytest.mark.parametrize(("image", "status", "kind"), BAD_IMAGES)
def test_a_bad_image_fails_its_item_alone(client, image, status, kind):
    body = request_of(3)
    body["images"][2] = image
    response = client.post("/score", json=body)
    assert response.status_code == 200
    rows = response.json()["results"]
    assert rows[1]["score"] is None and rows[1]["error"]["status"] == status and rows[1]["error"]["type"] == kind
    expected = expected_scores(3)
    assert [rows[0]["score"], rows[2]["score"]] == pytest.approx([expected[0], expected[2]])
    alone = {"images": [image, b64(picture(0))], "items": [{**body["items"][0], "image": 0, "source": 1}]}
    assert_error(client.post("/score", json=alone), status, kind)


BAD_ITEMS = [
    ({"preserve": ["background", " "]}, 422, "empty aspect"),
    ({"preserve": ["lighting", "Lighting"]}, 422, "twice"),
    ({"preserve": ["color"], "target": ["color"]}, 422, "The sample has 'color' both in preserve and in target"),
    ({"preserve": []}, 422, "The sample has no preserve aspects, which tpips:preserve needs"),
    ({"preserve": ["x" * 201]}, 422, "201 letters"),
    ({"preserve": [f"aspect {n}" for n in range(33)]}, 422, "34 aspects"),
    ({"preserve": ["explode"]}, 500, "The server's log has the reason as error"),
    ({"preserve": ["nan"]}, 500, "The server's log has the reason as error"),  # the weights' fault, not the client's
    ({"image": 7}, 422, "names image 7"),
    ({"source": -1}, 422, "names image -1"),
]


@pytest.mark.parametrize(("fields", "status", "words"), BAD_ITEMS)
def test_a_bad_item_fails_alone(client, fields, status, words):
    body = request_of(3)
    body["items"][1] |= fields
    rows = client.post("/score", json=body).json()["results"]
    assert rows[1]["score"] is None and rows[1]["error"]["status"] == status and words in rows[1]["error"]["message"]
    expected = expected_scores(3)
    assert [rows[0]["score"], rows[2]["score"]] == pytest.approx([expected[0], expected[2]])
    assert_error(client.post("/score", json={**body, "items": [body["items"][1]]}), status, rows[1]["error"]["type"])


# --- bad input: the whole request


@pytest.mark.parametrize(
    ("content", "status", "kind", "words"),
    [
        (b"not json", 400, "bad_body", "not JSON"),
        (b'{"items": NaN}', 400, "bad_body", "NaN"),
        (b"[" * 100_000, 400, "bad_body", ""),
        (b"\xff\xfe", 400, "bad_body", ""),
        (b"[]", 422, "bad_request", ""),
        (b"{}", 422, "bad_request", "items"),
        (b'{"items": []}', 422, "bad_request", "no items"),
        (b'{"items": [{"image": "0", "source": 0}]}', 422, "bad_request", "items.0.image"),
        (b'{"items": [{"image": 0, "source": 0, "path": "/etc/passwd"}]}', 422, "bad_request", "items.0.path"),
        (b'{"items": [{"image": 0, "source": 0}], "reward": "tpips:best"}', 422, "bad_request", "tpips:edit"),
        (b'{"items": [{"image": 0, "source": 0}], "reward": "remote:http://x"}', 422, "bad_request", "Unknown reward"),
    ],
)
def test_bodies_without_a_meaning(client, content, status, kind, words):
    response = client.post("/score", content=content, headers={"Content-Type": "application/json"})
    assert_error(response, status, kind, words)


@pytest.mark.parametrize(
    ("kind", "content", "status"),
    [
        ("text/plain", b"{}", 415),
        ("", b"{}", 415),
        ("multipart/form-data", b"{}", 400),
        ("multipart/form-data; boundary=x", b"--y\r\n\r\n", 400),
        ("multipart/form-data; boundary=x", b"--x\r\nContent-Disposition: form-data\r\n\r\nx\r\n--x--\r\n", 400),
    ],
)
def test_content_types_that_are_none(client, kind, content, status):
    assert client.post("/score", content=content, headers={"Content-Type": kind}).json()["error"]["status"] == status


def test_multipart_with_other_parts(client):
    files = [("images", ("0.png", encoded(picture(0)), "image/png"))]
    assert_error(client.post("/score", files=files), 422, "bad_request", "`request`")
    assert_error(client.post("/score", data={"request": "{}", "more": "x"}, files=files), 400, "bad_body", "Too many")
    other = [("pictures", ("0.png", b"", "image/png"))]
    assert_error(client.post("/score", data={"request": "{}"}, files=other), 422, "bad_request", "'pictures'")
    both = json.dumps(request_of(1))
    assert_error(client.post("/score", data={"request": both}, files=files), 422, "bad_request", "as files")


def test_multipart_that_is_too_much():
    files = [("images", (f"{n}.png", b"", "image/png")) for n in range(4)]
    with served(limits=Limits(items=1, queue=1)) as client:
        assert_error(client.post("/score", data={"request": "{}"}, files=files), 413, "too_large", "more than 3 images")
        long = {"request": " " * (2**22 + 1)}
        assert_error(client.post("/score", data=long, files=files[:1]), 413, "too_large", "`request`")


def test_what_the_client_sent_is_not_repeated_without_an_end(client):
    """Names of fields, rewards, parts, paths ...: what is said of them is short, and ends with the remedy."""
    long = "x" * 50_000
    bodies = [request_of(1, **{long: 1}), {"reward": f"tpips:{long}", **request_of(1)}, request_of(1, preserve=[long, long]),
              request_of(1, preserve=[long], target=[long])]  # fmt: skip
    answers = [client.post("/score", json=body) for body in bodies]
    answers += [client.post("/compute", json=compute_body(1, kwargs={"preserve": [[long, 1]]}))]
    answers += [client.post("/score", data={"request": "{}"}, files=[(long, ("0.png", b"", "image/png"))])]
    answers += [client.post("/score", content=b"{}", headers={"Content-Type": long}), client.get(f"/{long}")]
    for answer in answers:
        assert 400 <= answer.status_code < 500 and len(answer.json()["error"]["message"]) <= 400 and len(answer.text) < 2000
    assert answers[1].json()["error"]["message"].endswith("tpips:edit.") and "POST /score" in answers[-1].text


def test_bad_aspects_name_their_sample_where_one_fails_all(client):
    kwargs = {"preserve": [["background"], [f"aspect {n}" for n in range(33)]]}
    assert_error(client.post("/compute", json=compute_body(kwargs=kwargs)), 422, "bad_request", "Image 1: The sample has 33 aspects")


def test_methods_and_slashes(client):
    assert client.get("/score").headers["allow"] == "POST"
    assert_error(client.post("/score/", json={}, follow_redirects=False), 404, "not_found")


def test_unknown_paths_and_methods_are_json_too(client):
    assert_error(client.get("/docs"), 404, "not_found", "POST /score")
    assert_error(client.get("/score"), 405, "wrong_method")


# --- limits and the token


def test_a_body_over_the_limit_is_refused_unread():
    with served(limits=Limits(body_bytes=2000)) as client:
        assert_error(client.post("/score", json=request_of(3)), 413, "too_large", "2000 bytes")
        chunks = (b"x" * 500 for _ in range(10))  # no Content-Length
        response = client.post("/score", content=chunks, headers={"Content-Type": "application/json"})
        assert_error(response, 413, "too_large", "2000 bytes")
        assert client.post("/score", json={"items": []}).status_code == 422  # the next request is read as ever


def test_too_many_items_and_pixels():
    with served(limits=Limits(items=2, queue=2, pixels=24 * 24)) as client:
        assert client.post("/score", json=request_of(2)).status_code == 200
        assert_error(client.post("/score", json=request_of(3)), 413, "too_large", "3 items")
        body = request_of(1)
        body["images"][1] = b64(picture(1, 25))
        assert_error(client.post("/score", json=body), 413, "too_large", "25x25")
        assert_error(client.post("/compute", json=compute_body(3)), 413, "too_large", "3 items")


def test_a_wrong_content_length():
    with served() as client:
        headers = {"Content-Type": "application/json", "Content-Length": "-5"}
        assert_error(client.post("/score", content=b"{}", headers=headers), 400, "bad_body", "Content-Length")


def test_the_token():
    with served(token="secret") as client:
        for headers in (
            {},
            {"Authorization": "Bearer wrong"},
            {"Authorization": "Basic secret"},
            {"Authorization": "secret"},
        ):
            for response in (
                client.post("/score", json=request_of(), headers=headers),
                client.get("/metrics", headers=headers),
            ):
                assert_error(response, 401, "unauthorized")
                assert response.headers["WWW-Authenticate"] == "Bearer"
        good = {"Authorization": "Bearer secret"}
        assert client.post("/score", json=request_of(), headers=good).status_code == 200
        assert client.get("/metrics", headers=good).status_code == 200


def test_what_a_server_with_a_token_tells_others():
    """A balancer sees whether it can score, and nothing else; there is no schema to read."""
    with served(token="secret") as client:
        health = client.get("/health")
        assert health.status_code == 200 and health.json() == {"status": "ok", "token": "required"}
        assert_error(client.get("/health", headers={"Authorization": "Bearer wrong"}), 401, "unauthorized")
        assert client.get("/health", headers={"Authorization": "Bearer secret"}).json()["metric"] == "trouble"
        for path in ("/openapi.json", "/docs", "/redoc"):
            for headers in ({}, {"Authorization": "Bearer secret"}):
                assert_error(client.get(path, headers=headers), 404, "not_found")
    with served() as client:
        assert client.get("/openapi.json").status_code == 200 and client.get("/health").json()["metric"] == "trouble"


SECRET = "/srv/models/private/model.safetensors"


def test_the_text_of_an_exception_stays_on_the_server(monkeypatch, caplog):
    """Of a reward, of a route and of the server itself: clients get an id, the log has the rest."""

    def broken(*_: Any, **__: Any) -> Any:
        raise OSError(f"cannot read {SECRET}")

    with TestClient(create_app([LocalWorker()]), raise_server_exceptions=False) as client:
        places = ["serving_workers.TroubleMetric.similarity_pairs", "tpips_reward.serving.app.parse_score",
                  "tpips_reward.serving.app.served_rewards"]  # fmt: skip
        for place in places:
            with monkeypatch.context() as patch:
                patch.setattr(place, broken)
                answer = client.get("/health") if "served" in place else client.post("/score", json=request_of(1))
            assert_error(answer, 500, "failed", "error ")
            assert SECRET not in answer.text and "OSError" not in answer.text
            number = answer.json()["error"]["message"].rstrip(".").split()[-1]
            (record,) = [record for record in caplog.records if number in record.getMessage()]
            assert record.exc_info is not None and SECRET in str(record.exc_info[1])


@pytest.mark.parametrize("options", [{"reward": "tpips:best"}, {"token": " "}])
def test_a_server_that_cannot_be(options):
    with pytest.raises(TPIPSError):
        served(**options)


def test_a_server_without_workers():
    with pytest.raises(TPIPSError, match="at least one worker"):
        create_app([])


@pytest.mark.parametrize(
    "fields", [{"batch": 0}, {"pixels": float("inf")}, {"queue": 3, "items": 4}, {"open_bytes": 5}]
)
def test_limits_that_are_none(fields):
    with pytest.raises(TPIPSError, match=next(iter(fields))):
        Limits(**fields)


def test_animations_and_turned_photographs(client):
    """The first frame, upright."""
    turned = picture(1).transpose(Image.Transpose.ROTATE_90)
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned clockwise
    buffer = io.BytesIO()
    turned.save(buffer, "PNG", exif=exif)
    frames = io.BytesIO()
    picture(1).save(frames, "WEBP", save_all=True, append_images=[picture(5)], lossless=True)
    body = request_of(1)
    for content in (buffer.getvalue(), frames.getvalue()):
        body["images"][1] = base64.b64encode(content).decode()
        assert client.post("/score", json=body).json()["results"][0]["score"] == pytest.approx(expected_scores(1)[0])


def test_a_small_body_of_many_values_is_refused_before_it_is_looked_at(monkeypatch):
    with served(limits=Limits(items=2)) as client:
        crowd = {**request_of(1), "images": [""] * 7}
        assert_error(client.post("/score", json=crowd), 413, "too_large", "7 images")
        parser = SimpleNamespace(loads=lambda *_, **__: pytest.fail("it was parsed"))
        monkeypatch.setattr("tpips_reward.serving.wire.json", parser)
        for path, name in (("/score", "items"), ("/score", "requests"), ("/compute", "image")):
            body = b'{"%s":[' % name.encode() + b"{}," * 5000 + b"{}]}"
            response = client.post(path, content=body, headers={"Content-Type": "application/json"})
            assert_error(response, 413, "too_large", "values")
