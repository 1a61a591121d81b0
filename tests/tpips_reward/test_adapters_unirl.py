"""The reward server inside UniRL: the client's half of the wire format, as its remote backend speaks it.

Tencent-Hunyuan/UniRL, at 1a7b501 without identities; test_adapters_installed.py asks the backend itself.
"""

from __future__ import annotations

import io

import pytest
from adapter_samples import EDITS, PROMPTS, ROWS, SOURCES
from PIL import Image
from serving_workers import LocalWorker, TroubleMetric, running

from tpips_reward import TPIPSReward


def test_unirls_remote_backend_gets_its_rewards():
    import base64

    import httpx2 as httpx

    def wire(image: Image.Image) -> str:
        buffer = io.BytesIO()
        image.save(buffer, format="PNG")
        return base64.b64encode(buffer.getvalue()).decode("ascii")

    required = ["tpips:preserve"]
    with running([LocalWorker()]) as address:
        health = httpx.get(f"{address}/health").json()
        assert set(required) <= set(health["rewards"])
        requests = [
            {"history": [{"text": p, "image_b64": wire(s)}, {"text": p, "image_b64": wire(e)}], "required_rewards": required,
             "metadata": row, "request_id": str(n), "sample_id": str(n), "group_id": None, "source_rank": 0,
             "policy_version": 1, "scorer_version": None, "idempotency_key": f"k{n}"}
            for n, (p, s, e, row) in enumerate(zip(PROMPTS, SOURCES, EDITS, ROWS, strict=True))
        ]  # fmt: skip
        answer = httpx.post(f"{address}/score", json={"protocol_version": "1", "requests": requests}).json()
    assert answer["protocol_version"] == "1" and len(answer["results"]) == len(answer["errors"]) == 3
    for sent, echoed in zip(requests, answer["identities"], strict=True):
        for key in ("request_id", "sample_id", "group_id", "source_rank", "policy_version", "idempotency_key"):
            assert echoed[key] == sent[key]
    first = [next(iter(row["tpips:preserve"].values())) for row in answer["results"]]  # "first" is its way to reduce
    wanted = TPIPSReward(metric=TroubleMetric())(
        EDITS, SOURCES, [r["preserve"] for r in ROWS], [r["target"] for r in ROWS]
    )
    assert first == pytest.approx(wanted.scores.tolist())
