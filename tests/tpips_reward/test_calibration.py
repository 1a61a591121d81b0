"""The map from raw similarity to probability: its formula, its file, and what rewards make of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from fake_metrics import ChannelMetric, ConstantMetric, flat

from tpips_reward import TPIPSReward, load_metric
from tpips_reward.calibration import CALIBRATION_NAME, CalibratedMetric, Calibration, MonotoneMap, probe_answers
from tpips_reward.errors import NotFinite, TPIPSError
from tpips_reward.metric import Metric

MAP = MonotoneMap((0.2, 0.6, 1.0), (0.1, 0.3, 1.0))
RED = MonotoneMap((0.0, 1.0), (0.5, 1.0))


class Channels(ChannelMetric):
    """Also answers the probe's aspects."""

    def similarity_pairs(self, images, references, pairs, **options):
        known = [(a, b, aspect if aspect in ("red", "green", "blue") else "green") for a, b, aspect in pairs]
        return super().similarity_pairs(images, references, known, **options)


def calibration(metric: object) -> Calibration:
    return Calibration(MAP, {"red": RED}, {"redness": "red"}, tuple(probe_answers(metric)), {"pairs": 7})


def test_the_map_is_linear_between_its_knots_and_constant_beyond():
    raw = torch.tensor([[-1.0, 0.2, 0.4], [0.6, 0.8, 2.0]], requires_grad=True)
    out = MAP(raw)
    assert torch.allclose(out, torch.tensor([[0.1, 0.1, 0.2], [0.3, 0.65, 1.0]])) and out.dtype == torch.float32
    out.sum().backward()
    assert raw.grad is not None
    assert torch.allclose(raw.grad[0], torch.tensor([0.0, 0.5, 0.5])) and raw.grad[1, 1] == pytest.approx(1.75)


def test_the_map_never_falls():
    values = MAP(torch.linspace(-1, 2, 1001, dtype=torch.float64))
    assert bool((values.diff() >= 0).all())


@pytest.mark.parametrize(
    ("raw", "probability"),
    [((0.0,), (0.0,)), ((0.0, 0.0), (0.0, 1.0)), ((0.0, 1.0), (0.6, 0.5)), ((0.0, 1.0), (0.5, 0.5)),
     ((0.0, 1.0), (0.0, 1.1)), ((0.0, float("nan")), (0.0, 1.0)), ((0.0, 1.0), (0.0, 0.5, 1.0))],
)  # fmt: skip
def test_knots_that_are_no_map(raw, probability):
    with pytest.raises(TPIPSError, match="calibration"):
        MonotoneMap(raw, probability)


def test_aspects_have_their_own_maps_and_wordings_share_them():
    found = calibration(Channels())
    raw = torch.tensor([0.6, 0.6, 0.6, 0.6])
    assert found.apply(raw, ["Red ", "redness", "green", None]).tolist() == pytest.approx([0.8, 0.8, 0.3, 0.3])


def test_the_file_says_the_same(tmp_path):
    found = calibration(Channels())
    found.save(tmp_path / "c.json")
    assert Calibration.load(tmp_path / "c.json") == found and not list(tmp_path.glob(".tmp-*"))
    content = json.loads((tmp_path / "c.json").read_text())
    for change, message in [({"format": 2}, "of format 2"), ({"overall": {}}, "damaged"), ({"probe": 3}, "damaged"),
                            ({"overall": {"raw": [1, 0], "probability": [0, 1]}}, "strictly rising")]:  # fmt: skip
        (tmp_path / "c.json").write_text(json.dumps({**content, **change}))
        with pytest.raises(TPIPSError, match=message):
            Calibration.load(tmp_path / "c.json")
    (tmp_path / "c.json").write_text("{")
    with pytest.raises(TPIPSError, match="damaged"):
        Calibration.load(tmp_path / "c.json")
    with pytest.raises(TPIPSError, match="does not exist"):
        Calibration.load(tmp_path / "none.json")


def test_a_reward_with_calibrated_similarities(tmp_path):
    metric = Channels(change_scale=0.4)
    path = tmp_path / "c.json"
    calibration(metric).save(path)
    reward = TPIPSReward("tpips:preserve", metric=metric, calibrated=path)
    source = flat(0.5, 0.5, 0.5)
    edit = flat(0.4, 0.3, 0.5).requires_grad_()  # f: red 0.8, green 0.6
    out = reward([edit, source], source, preserve=[["red"]] * 2, target=[["green"]] * 2)
    assert reward.gate.threshold == pytest.approx(1.0 - 0.3)  # the map at 1 - 0.4
    assert out.per_aspect[0]["preserve"]["red"] == pytest.approx(0.9)
    assert out.per_aspect[0]["target"]["green"] == pytest.approx(0.7)
    assert out.scores.tolist() == pytest.approx([0.9, 0.0]), "a true edit opens the gate, a copy earns nothing"
    out.scores[0].backward()
    assert edit.grad is not None and edit.grad.abs().sum() > 0


def test_a_reward_without_a_calibration():
    with pytest.raises(TPIPSError, match="has no calibration"):
        TPIPSReward("tpips:preserve", metric=Channels(), calibrated=True)


def test_other_weights_are_refused():
    found = calibration(Channels())

    class Other(Channels):
        def similarity_pairs(self, images, references, pairs, **options):
            return super().similarity_pairs(images, references, pairs, **options) - 0.2

    CalibratedMetric(Channels(), found)
    with pytest.raises(TPIPSError, match="made for other weights"):
        CalibratedMetric(Other(), found)
    with pytest.raises(NotFinite, match="no finite number for two images made to try it in 'overall'"):
        CalibratedMetric(ConstantMetric(float("nan")), found)  # NaN differs by no amount that could be too large


def test_it_travels_with_the_metric(metric: Metric, tmp_path: Path):
    saved = Metric(metric.fusion, change_scale=0.1, info=metric.info)
    saved.calibration = calibration(saved)
    saved.save_pretrained(tmp_path / "m")
    assert (tmp_path / "m" / CALIBRATION_NAME).is_file()
    loaded = load_metric(tmp_path / "m", device="cpu")
    assert loaded.calibration == saved.calibration
    wrapped = CalibratedMetric(loaded)
    image = torch.rand(3, 64, 64, generator=torch.Generator().manual_seed(0))
    values = wrapped.similarity_pairs([image], [image, image.flip(2)], [(0, 0, "red"), (0, 1, "red"), (0, 1, "x")])
    raw = loaded.similarity_pairs([image], [image.flip(2)], [(0, 0, "red")])
    assert values[0] == pytest.approx(1.0, abs=1e-4) and values[1] == pytest.approx(float(RED(raw)[0]), abs=1e-5)
    with pytest.raises(TPIPSError):
        wrapped.check_aspect("x" * 5000)
