"""Calibration from votes: maps that are known are found again, and the file makes rewards use them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from metric_training import calibrate
from metric_training.calibrate import Votes, cross_fitted, fit, fit_map, reliability
from tpips_reward import TPIPSError, TPIPSReward
from tpips_reward.calibration import Calibration

pytest.importorskip("sklearn", reason="scikit-learn is not installed: no map can be fitted (extra: calibrate)")


class Known:
    """Stands for a metric: its range, and constant answers to the probe."""

    range = (-1.0, 1.0)

    def similarity_pairs(self, images, references, pairs):
        import torch

        return torch.full((len(pairs),), 0.5)


def known_votes(count: int = 6000, seed: int = 0) -> Votes:
    """Five voters a pair; people's probability is 2 (raw - 0.5) for "size", and its square for "shape"."""
    rng = np.random.default_rng(seed)
    raw = rng.uniform(0.5, 1.0, count)
    names = tuple(np.where(np.arange(count) % 2, "size", "shape"))
    chance = np.where(np.arange(count) % 2, 2 * (raw - 0.5), (2 * (raw - 0.5)) ** 2)
    share = rng.binomial(5, chance) / 5
    return Votes(raw, share, names, tuple(f"the {name}" for name in names), (np.arange(count) // 3) % 2)


def test_a_known_map_is_found():
    votes = known_votes()
    size = np.array([name == "size" for name in votes.names])
    found = fit_map(votes.raw[size], votes.share[size], 1.0)
    import torch

    raw = torch.linspace(0.55, 0.98, 50, dtype=torch.float64)
    assert (found(raw) - 2 * (raw - 0.5)).abs().max() < 0.06
    assert found.raw[-1] == 1.0 and found.probability[-1] == 1.0, "equal images are the same"


def test_aspects_get_maps_of_their_own_where_they_have_enough_votes():
    import torch

    votes = known_votes()
    found = fit(Known(), votes, per_aspect=1000)  # type: ignore[arg-type]
    assert found.aspects.keys() == {"size", "shape"} and found.phrases == {"the size": "size", "the shape": "shape"}
    at = torch.tensor([0.75, 0.75, 0.75], dtype=torch.float64)
    values = found.apply(at, ["size", "the shape", "something"]).tolist()
    assert values == pytest.approx([0.5, 0.25, 0.375], abs=0.05)
    assert fit(Known(), votes).aspects == {} and fit(Known(), votes, per_aspect=5000).aspects == {}  # type: ignore[arg-type]


def test_predictions_on_comparisons_that_were_not_fitted_to():
    votes = known_votes()
    shared, own = (reliability(cross_fitted(Known(), votes, n), votes.share) for n in (0, 1000))  # type: ignore[arg-type]
    raw = reliability(votes.raw, votes.share)
    assert own["error"] < 0.03 < raw["error"] and own["brier"] < shared["brier"] < raw["brier"]


def test_reliability_is_zero_for_the_truth_and_what_it_is_otherwise():
    share = np.array([0.0, 1.0, 0.5, 0.5])
    assert reliability(share, share)["error"] == 0 == reliability(share, share)["brier"]
    found = reliability(np.full(4, 0.7), share)
    assert found["error"] == pytest.approx(0.2) and found["bins"] == [{"predicted": pytest.approx(0.7), "share": 0.5, "count": 4}]


def test_votes_that_say_nothing():
    rng = np.random.default_rng(0)
    raw = np.sort(rng.uniform(0, 1, 300))
    with pytest.raises(TPIPSError, match="do not rise"):
        fit_map(raw, np.linspace(1, 0, 300), 1.0)
    with pytest.raises(TPIPSError, match="10 pairs with votes, but a calibration needs 120"):
        fit_map(raw[:10], raw[:10], 1.0)


@pytest.mark.parametrize(("data", "count"), [("procedural", "24"), ("procedural-2afc", "72")])
def test_the_command(data: str, count: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--metric", "builtin:late", "--data", data, "--count", count, "--output", str(tmp_path), "--device", "cpu"]
    calibrate.main(flags)
    shown = capsys.readouterr().out
    found = Calibration.load(tmp_path / "tpips_calibration.json")
    assert found.facts["task"] == ("two_afc" if data.endswith("2afc") else "odd_one_out")
    assert found.facts["pairs"] >= 120 and found.facts["error"] < found.facts["error_raw"] and "| raw |" in shown
    with Image.open(tmp_path / "calibration.png") as picture:
        assert picture.width > 1000
    with pytest.raises(SystemExit):
        calibrate.main(flags)
    assert "is there already; give --overwrite" in capsys.readouterr().err
    reward = TPIPSReward("tpips:edit", "builtin:late", device="cpu", calibrated=tmp_path / "tpips_calibration.json")
    assert reward.metric.range == (0.0, 1.0) and 0 < reward.gate.threshold < 1


def test_where_it_belongs(capsys: pytest.CaptureFixture[str]) -> None:
    for flags, message in [([], "say with --output"), (["--count", "0"], "--count must be"), (["--per_aspect", "-1"], "at least 0")]:
        with pytest.raises(SystemExit):
            calibrate.main(flags)
        assert message in capsys.readouterr().err
