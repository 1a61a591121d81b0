"""Scoring: what is encoded once, what is cached, controls, and images that go wrong on the way."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
import torch
from evaluation_files import save, write_edits, write_lines
from fake_metrics import ConstantMetric, RegionMetric
from PIL import Image

from tpips_reward.errors import NotFinite, TPIPSError
from tpips_reward.evaluation import read_manifest, score_rows
from tpips_reward.evaluation.cache import ScoreCache, fingerprint
from tpips_reward.evaluation.controls import CONTROLS, COPY, NOISE, OTHER, noise_image
from tpips_reward.evaluation.image_files import decode, resized
from tpips_reward.metric import Metric
from tpips_reward.scenes import Scene


@pytest.fixture
def rows(tmp_path: Path):
    return read_manifest(write_edits(tmp_path, 5)).rows


def image(path: Path) -> torch.Tensor:
    return decode(path.read_bytes(), str(path))


def test_scores_are_the_metrics_own(rows, tmp_path):
    metric = RegionMetric()
    scores = score_rows(rows, metric)
    for row in rows:
        assert set(scores.values[row.key]) == {"good", "drifting", "destroying", *CONTROLS}
        pair = image(tmp_path / f"drifting/{row.key}.png"), image(tmp_path / f"in/{row.key}.png")
        expected = metric.similarity_pairs([pair[0]], [pair[1]], [(0, 0, a) for a in row.aspects]).tolist()
        assert [scores.values[row.key]["drifting"][a] for a in row.aspects] == expected
    assert scores.measured == 5 * 6 * 2 and scores.cached == 0 and scores.problems == []


def test_a_source_is_given_once_for_all_models_and_aspects(rows):
    metric = RegionMetric()
    score_rows(rows, metric, batch_images=1000)
    # five outputs of three models, five noises, and five sources, which are the copies and the neighbours too
    images, references, pairs = map(len, metric.calls[0])
    assert len(metric.calls) == 1 and references == 5 and pairs == 60
    assert images == 5 * 3 + 5 + 5


def test_rows_of_one_source_share_it(tmp_path):
    save(Scene(), tmp_path / "in.png")
    save(Scene(shape="star"), tmp_path / "out.png")
    lines = [
        {"key": str(n), "source": "in.png", "preserve": ["background"], "outputs": {"m": "out.png"}} for n in range(4)
    ]
    metric = RegionMetric()
    scores = score_rows(read_manifest(write_lines(tmp_path / "x.jsonl", lines)).rows, metric)
    images, references, pairs = map(len, metric.calls[0])
    # the output and the copy once for all rows, a noise each, and no other image anywhere
    assert (references, pairs) == (1, 1 + 1 + 4) and OTHER not in scores.values["0"]
    assert images == 1 + 1 + 4 and scores.values["0"]["m"] == scores.values["3"]["m"]


@pytest.mark.parametrize("batch", [2, 7, 15])
def test_batches_change_nothing(rows, batch):
    assert score_rows(rows, RegionMetric(), batch_images=batch).values == score_rows(rows, RegionMetric()).values


def test_controls_show_the_scale(rows):
    scores = score_rows(rows, RegionMetric()).values
    for row in rows:
        assert all(value == 1.0 for value in scores[row.key][COPY].values())
        assert scores[row.key][NOISE]["object color"] < 0.9 and scores[row.key][OTHER]["object color"] < 1.0
    assert torch.equal(noise_image((4, 5), "a", 0), noise_image((4, 5), "a", 0))
    assert not torch.equal(noise_image((4, 5), "a", 0), noise_image((4, 5), "b", 0))
    assert set(score_rows(rows, RegionMetric(), controls=False).values["000"]) == {"good", "drifting", "destroying"}


# --- cache


class Failing(RegionMetric):
    """Breaks at its third call."""

    def similarity_pairs(self, images, references, pairs, *, value_range=(0.0, 1.0)):
        if len(self.calls) == 2:
            raise KeyboardInterrupt
        return super().similarity_pairs(images, references, pairs, value_range=value_range)


def test_an_interrupted_run_goes_on_where_it_stopped(rows, tmp_path):
    folder, whole = tmp_path / "cache", score_rows(rows, RegionMetric())
    with pytest.raises(KeyboardInterrupt):
        score_rows(rows, Failing(), cache=ScoreCache(folder, "x"), batch_images=7)
    metric = RegionMetric()
    second = score_rows(rows, metric, cache=ScoreCache(folder, "x"), batch_images=7)
    assert second.values == whole.values
    assert (second.cached, second.measured) == (2 * 12, 3 * 12) and len(metric.calls) == 3
    third = score_rows(rows, ConstantMetric(float("nan")), cache=ScoreCache(folder, "x"))
    assert third.values == whole.values and third.measured == 0
    assert not list(folder.rglob(".tmp*"))


def test_the_cache_knows_content_and_not_names(rows, tmp_path):
    cache = tmp_path / "cache"
    score_rows(rows, RegionMetric(), cache=ScoreCache(cache, "x"))
    (tmp_path / "good/000.png").write_bytes((tmp_path / "destroying/000.png").read_bytes())
    (tmp_path / "good/001.png").write_bytes((tmp_path / "drifting/002.png").read_bytes())
    scores = score_rows(rows, RegionMetric(), cache=ScoreCache(cache, "x"))
    assert scores.measured == 2  # 001 has new pixels, 000 has an output's that is known for its source
    assert scores.values == score_rows(rows, RegionMetric()).values


def test_other_identities_and_broken_files_are_not_used(rows, tmp_path):
    cache = tmp_path / "cache"
    whole = score_rows(rows, RegionMetric(), cache=ScoreCache(cache, "x"))
    assert score_rows(rows, RegionMetric(), cache=ScoreCache(cache, "y")).cached == 0
    paths = sorted((cache / "x").iterdir())
    content = json.loads(paths[1].read_text())
    next(iter(content["scores"].values()))["background"] = "high"
    for path, text in zip(paths, ["{", json.dumps(content), "[]", paths[0].read_text()], strict=False):
        path.write_text(text)
    scores = score_rows(rows, RegionMetric(), cache=ScoreCache(cache, "x"))
    assert scores.values == whole.values and scores.cached == 12
    assert Counter(problem.kind for problem in scores.problems) == {"unreadable_cache": 4}
    assert score_rows(rows, RegionMetric(), cache=ScoreCache(cache, "x")).problems == []


def test_fingerprints_tell_metrics_apart(metric: Metric):
    first = RegionMetric()
    assert fingerprint(first, "a") == fingerprint(RegionMetric(), "a") != fingerprint(first, "b")

    class Shifted(RegionMetric):
        def _similarity(self, image, reference, aspect):
            return super()._similarity(image, reference, aspect) * 0.9

    Shifted.__name__ = "RegionMetric"
    assert fingerprint(Shifted(), "a") != fingerprint(first, "a")
    assert fingerprint(metric, "a") == fingerprint(metric, "a") != fingerprint(first, "a")


# --- images that go wrong


def test_truncated_images_cost_their_own_scores_only(rows, tmp_path):
    for name in ("good/000.png", "in/001.png"):
        path = tmp_path / name
        path.write_bytes(path.read_bytes()[:-40])
    (tmp_path / "drifting/002.png").unlink()
    scores = score_rows(rows, RegionMetric())
    found = {(problem.kind, problem.key, problem.model) for problem in scores.problems}
    assert found == {("unreadable_output", "000", "good"), ("unreadable_source", "001", ""),
                     ("unreadable_output", "002", "drifting")}  # fmt: skip
    assert set(scores.values) == {"000", "002", "003", "004"} and "good" not in scores.values["000"]
    whole = score_rows([row for row in rows if row.key in ("003", "004")], RegionMetric())
    assert scores.values["003"]["good"] == whole.values["003"]["good"]


def test_other_sizes(rows, tmp_path):
    with Image.open(tmp_path / "good/000.png") as picture:
        picture.resize((48, 36)).save(tmp_path / "good/000.png")
    sizes = []

    class Looking(RegionMetric):
        def similarity_pairs(self, images, references, pairs, *, value_range=(0.0, 1.0)):
            sizes.append({tuple(image.shape[1:]) for image in images})
            return super().similarity_pairs(images, references, pairs, value_range=value_range)

    score_rows(rows, Looking())
    kept = score_rows(rows, Looking(), sizes="keep")
    assert sizes == [{(24, 24)}, {(24, 24), (36, 48)}] and "good" in kept.values["000"]
    with pytest.raises(TPIPSError, match="'resize' or 'keep'"):
        score_rows(rows, RegionMetric(), sizes="stretch")


def test_resizing_is_exact_where_nothing_changes():
    picture = torch.rand(3, 8, 9)
    assert resized(picture, (8, 9)) is picture
    flat = resized(torch.full((3, 8, 9), 0.25), (5, 4))
    torch.testing.assert_close(flat, torch.full((3, 5, 4), 0.25))


class Broken(RegionMetric):
    """Gives NaN for one output (the image, by its pixels) in one aspect; or raises what `tpips_reward.Metric` raises."""

    def __init__(self, output, aspect, raises):
        super().__init__()
        self.output, self.aspect, self.raises = output, aspect, raises

    def similarity_pairs(self, images, references, pairs, *, value_range=(0.0, 1.0)):
        answer = super().similarity_pairs(images, references, pairs, value_range=value_range)
        bad = [k for k, (left, _, aspect) in enumerate(pairs) if aspect == self.aspect and torch.equal(images[left], self.output)]
        if bad and self.raises:
            raise NotFinite(f"images[{pairs[bad[0]][0]}]", bad[0])
        answer[bad] = float("nan")
        return answer


@pytest.mark.parametrize("raises", [False, True])
@pytest.mark.parametrize("name", ["drifting", NOISE])
def test_an_answer_that_is_not_finite_names_source_model_and_aspect(rows, tmp_path, name, raises):
    (row,) = [row for row in rows if row.key == "003"]
    output = noise_image((24, 24), "003", 0) if name == NOISE else image(row.outputs[name].path)
    with pytest.raises(NotFinite) as caught:
        score_rows(rows, Broken(output, "object color", raises), cache=ScoreCache(tmp_path / "cache", "x"))
    where = name if name == NOISE else f"drifting ({tmp_path / 'drifting/003.png'})"
    assert f"for {tmp_path / 'in/003.png'} and {where} in 'object color': weights hold NaN" in str(caught.value)
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("answer", [float("nan"), float("inf")])
def test_an_answer_that_is_no_number_is_an_error(rows, answer):
    with pytest.raises(NotFinite, match="no finite number for"):
        score_rows(rows, ConstantMetric(answer))
    with pytest.raises(NotFinite, match="no finite number for two images made to try it in 'overall'"):
        fingerprint(ConstantMetric(answer))


def test_an_answer_of_the_wrong_shape_is_an_error(rows):
    with pytest.raises(TPIPSError, match="one similarity a pair"):
        score_rows(rows, ConstantMetric(torch.zeros(3)))


def test_aspects_that_the_metric_refuses_cost_their_row(rows):
    class Picky(RegionMetric):
        def check_aspect(self, aspect):
            if aspect == "object color":
                raise TPIPSError("too long")

    scores = score_rows(rows, Picky())
    assert scores.values == {} and [problem.kind for problem in scores.problems] == ["bad_aspects"] * 5


def test_the_real_metric_scores_rows(rows, metric: Metric, tmp_path):
    scores = score_rows(rows[:2], metric)
    row = rows[0]
    pair = [image(tmp_path / f"{name}/{row.key}.png") for name in ("good", "in")]
    expected = metric.similarity(pair[0], pair[1], list(row.aspects))[0].tolist()
    assert [scores.values[row.key]["good"][a] for a in row.aspects] == pytest.approx(expected, abs=1e-5)
    assert all(value == pytest.approx(1.0, abs=1e-5) for value in scores.values[row.key][COPY].values())
