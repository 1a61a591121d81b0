"""Judges and the run over a data set: every distinct file once, baselines by their formulas, the command line."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from metric_training import evaluate as command
from metric_training.builtin_model import build_late_fusion
from metric_training.data.comparison import Comparison, Data, DataError, ImageSource, Problems
from metric_training.data.procedural import held_out_triplets, procedural_data
from metric_training.data.triplets import Triplet
from metric_training.evaluation.baselines import (
    load_judge,
    match_sizes,
    pixel_similarity,
    ssim_similarity,
    untrained_metric,
)
from metric_training.evaluation.judges import PairwiseJudge, embedding_judge, metric_judge
from metric_training.evaluation.runner import ImageCache, batches, evaluate
from tpips_reward import Metric, TPIPSError, load_metric
from tpips_reward.errors import NotFinite

PARITY = Path(__file__).parents[1] / "data" / "parity"


def source(name: str, level: int = 0) -> ImageSource:
    return ImageSource(name, np.full((4, 4, 3), level % 256, np.uint8))


def comparison(names: str, votes: list[list[float]], task: Any = "odd_one_out", key: str = "c") -> Comparison:
    images = tuple(source(n, 20 * (ord(n) - ord("a"))) for n in names)
    aspects = tuple(f"aspect {k}" for k in range(len(votes)))
    return Comparison(key, task, images, aspects, np.array(votes, np.float32))  # type: ignore[arg-type]


def brightness_score(images: list[Tensor], pairs: Sequence[tuple[int, int, str]]) -> Tensor:
    means = [float(image.mean()) for image in images]
    return torch.tensor([-abs(means[i] - means[j]) for i, j, _ in pairs])


def test_each_choice_gets_the_similarity_that_speaks_for_it() -> None:
    judge = PairwiseJudge("brightness", brightness_score)
    odd, two = comparison("abd", [[1, 0, 0]]), comparison("abd", [[1, 0], [0, 1]], "two_afc")
    images = {i.key: i.load() for i in odd.images}
    tables = judge([odd, two], images)
    step = 20 / 255
    # a, b and d stand at 0, 1 and 3: d is odd; b is nearer to a
    assert tables[0].tolist() == [pytest.approx([-2 * step, -3 * step, -1 * step])]
    assert tables[1].tolist() == [pytest.approx([-1 * step, -3 * step])] * 2


def test_pairs_are_asked_once_and_bad_scores_score_nothing() -> None:
    asked = []

    def score(images: list[Tensor], pairs: Sequence[tuple[int, int, str]]) -> Tensor:
        asked.append((len(images), list(pairs)))
        return brightness_score(images, pairs)

    group = [comparison("abc", [[1, 0, 0]]), comparison("cba", [[1, 0, 0]]), comparison("abc", [[1, 0]], "two_afc")]
    PairwiseJudge("j", score)(group, {n: source(n).load() for n in "abc"})
    (count, pairs), *_ = asked
    assert len(asked) == 1 and count == 3 and len(pairs) == 3
    nan = PairwiseJudge("broken", lambda images, pairs: torch.full((len(pairs),), float("nan")))
    with pytest.raises(TPIPSError, match="broken gave a similarity that is not finite on c"):
        nan(group, {n: source(n).load() for n in "abc"})

    def raising(images: list[Tensor], pairs: Sequence[tuple[int, int, str]]) -> Tensor:
        raise NotFinite("images[0] and references[1]", len(pairs) - 1)  # as `Metric.similarity_pairs` says it

    by_itself = PairwiseJudge("broken", raising)
    with pytest.raises(TPIPSError, match="broken gave a similarity that is not finite on c"):
        by_itself(group, {n: source(n).load() for n in "abc"})


@pytest.mark.parametrize("raises", [False, True])
def test_a_triplet_without_a_finite_similarity_scores_nothing(raises: bool) -> None:
    """Metrics of ours raise; others answer."""
    triplets = held_out_triplets(2)

    def judge(triplet: Triplet) -> Tensor:
        if triplet is triplets[1] and raises:
            raise NotFinite("images[0] and references[1]", 0)
        return torch.full((len(triplet.aspects), 3), float("nan") if triplet is triplets[1] else 0.0)

    with pytest.raises(TPIPSError, match="not finite on triplet 1; nothing was scored"):
        command.score_triplets(judge, triplets)


def test_comparisons_with_common_files_share_a_call() -> None:
    votes = [[1.0, 0.0, 0.0]]
    group = [comparison(names, votes) for names in ("abc", "xyz", "cde", "uvw", "efg")]
    assert batches(group, 7) == [[0, 2, 4], [1, 3]]
    assert batches(group, 100) == [[0, 2, 4, 1, 3]]
    cut = batches(group, 5)
    assert sorted(i for batch in cut for i in batch) == [0, 1, 2, 3, 4] and cut[0] == [0, 2]
    assert batches(group, 1) == [[0], [2], [4], [1], [3]]  # a comparison is never cut itself


def data_of(*comparisons: Comparison) -> Data:
    return Data("set", comparisons[0].task, list(comparisons), Problems("set"))


def test_files_are_decoded_and_encoded_once(tmp_path: Path, monkeypatch: Any) -> None:
    rng = np.random.default_rng(0)
    sources = {}
    for name in "abcdef":
        path = tmp_path / f"{name}.png"
        Image.fromarray(rng.integers(0, 255, (32, 32, 3)).astype(np.uint8)).save(path)
        sources[name] = ImageSource(str(path), path)
    triples = [(sources[a], sources[b], sources[c]) for a, b, c in ("abc", "cde", "efa")]
    group = [Comparison(f"{k}", "odd_one_out", t, ("pose", "color"), np.eye(3)[:2]) for k, t in enumerate(triples)]
    metric = Metric(build_late_fusion(0, hidden=96, layers=1, vision_hidden=32))
    encoded: list[int] = []
    encode = metric.backbone.encode_images
    monkeypatch.setattr(
        metric.backbone, "encode_images", lambda images: encoded.append(len(images)) or encode(images)
    )
    cache = ImageCache()
    judges = [lambda: metric_judge("ours", metric), lambda: load_judge("pixel_l2")]
    results = evaluate(judges, data_of(*group), cache=cache, draws=20)
    assert sum(encoded) == 6 and cache.decoded == 6  # both judges together
    assert results["data"]["examples"] == 6 and set(results["metrics"]) == {"ours", "pixel_l2"}
    # the same figures as comparison by comparison
    alone = evaluate([lambda: metric_judge("ours", metric)], data_of(*group), images_per_call=1, draws=20)
    assert alone["metrics"]["ours"]["agreement"] == pytest.approx(results["metrics"]["ours"]["agreement"])


def test_the_cache_drops_what_was_not_used_for_long() -> None:
    cache = ImageCache(limit=2 * 4 * 4 * 3 * 4)
    a, b, c = source("a"), source("b"), source("c")
    for image in (a, b, a, c, a, b):
        cache.get(image)
    assert cache.decoded == 4  # a, b, c, and b once more


def test_figures_of_a_judge_are_the_papers() -> None:
    group = [comparison("abd", [[0.2, 0.2, 0.6], [1, 0, 0]]), comparison("dba", [[0.75, 0.25, 0]])]
    results = evaluate([lambda: PairwiseJudge("brightness", brightness_score)], data_of(*group), draws=20)
    row = results["metrics"]["brightness"]
    assert row["agreement"] == pytest.approx((0.6 + 0 + 0.75) / 3)
    assert results["data"]["consensus"] == pytest.approx((0.44 + 1 + 0.625) / 3)
    with pytest.raises(TPIPSError, match="twice"):
        evaluate([lambda: load_judge("pixel_l2")] * 2, data_of(*group), draws=5)


def test_images_that_do_not_decode_leave_their_comparison_out_for_all() -> None:
    broken = ImageSource("broken", b"no picture")
    bad = Comparison("bad", "odd_one_out", (source("a"), source("b"), broken), ("x",), np.eye(3)[:1])
    good = comparison("abd", [[0, 0, 1]])
    judges = [lambda: load_judge("pixel_l2"), lambda: load_judge("ssim")]
    results = evaluate(judges, data_of(bad, good_sized()), draws=5)
    assert results["data"]["undecodable"] == ["broken"] and results["data"]["comparisons"] == 1
    with pytest.raises(DataError, match="the image broken does not open"):
        evaluate([lambda: load_judge("pixel_l2")], data_of(bad, good), strict=True)
    with pytest.raises(DataError, match="no comparison"):
        evaluate([lambda: load_judge("pixel_l2")], data_of(bad))


def good_sized() -> Comparison:
    rng = np.random.default_rng(0)
    images = [ImageSource(f"g{k}", rng.integers(0, 255, (16, 16, 3)).astype(np.uint8)) for k in range(3)]
    return Comparison("good", "odd_one_out", (images[0], images[1], images[2]), ("x",), np.eye(3)[:1])


def test_pixel_l2() -> None:
    a, b = torch.zeros(3, 16, 16), torch.full((3, 16, 16), 0.5)
    assert pixel_similarity(a, b) == pytest.approx(-0.25) and pixel_similarity(a, a) == 0


def test_ssim() -> None:
    a, b = torch.zeros(3, 16, 16), torch.full((3, 16, 16), 0.5)
    pytest.importorskip("skimage", reason="needs the extra metrics: pip install 'tpips-reward[metrics]'")
    # of two flat images only the luminance term is left: c1 / (0.5^2 + c1)
    assert ssim_similarity(a, b) == pytest.approx(1e-4 / (0.25 + 1e-4), rel=1e-4)
    assert ssim_similarity(b, b) == pytest.approx(1)
    with pytest.raises(TPIPSError, match="at least 11 pixels"):
        ssim_similarity(torch.zeros(3, 8, 16), torch.zeros(3, 8, 16))


def test_images_of_two_sizes_meet_at_the_smaller() -> None:
    small, large = torch.rand(3, 12, 20), torch.rand(3, 24, 30)
    for first, second in ((small, large), (large, small)):
        assert [tuple(x.shape) for x in match_sizes(first, second)] == [(3, 12, 20)] * 2
    tall, wide = torch.rand(3, 20, 12), torch.rand(3, 12, 20)
    assert pixel_similarity(tall, wide) == pytest.approx(pixel_similarity(wide, tall))


def test_embeddings_are_made_once_an_image() -> None:
    made = []

    def embed(image: Tensor) -> Tensor:
        made.append(1)
        return torch.stack([image.mean(), torch.tensor(0.2)])

    judge = embedding_judge("e", embed)
    (table,) = judge([comparison("abd", [[1, 0, 0]] * 4)], {n: source(n, 20 * "abcd".index(n)).load() for n in "abd"})
    assert len(made) == 3 and table.shape == (4, 3) and int(table[0].argmax()) == 2


def test_lpips_and_dreamsim_through_their_packages(monkeypatch: Any, tmp_path: Path) -> None:
    """Stand-ins with the packages' own signatures: what they get, and which way round their distances count."""
    got: dict[str, Any] = {}

    class LPIPS(torch.nn.Module):
        def __init__(self, net: str, verbose: bool) -> None:
            super().__init__()
            got["net"] = net

        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            got["range"] = (float(a.min()), float(b.max()), a.shape)
            return (a - b).abs().mean().view(1, 1, 1, 1)

    def dreamsim(pretrained: bool, device: str, cache_dir: str) -> tuple[Any, Any]:
        got["cache"] = cache_dir
        model = SimpleNamespace(embed=lambda x: torch.stack([x.mean(), torch.tensor(0.2)])[None])
        return model, lambda pil: torch.from_numpy(np.asarray(pil) / 255.0).float()[None]

    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    for name, value in (("lpips", {"LPIPS": LPIPS}), ("dreamsim", {"dreamsim": dreamsim})):
        module = ModuleType(name)
        module.__dict__.update(value)
        monkeypatch.setitem(sys.modules, name, module)
    group = [comparison("abm", [[0, 0, 1]])]
    results = evaluate([lambda: load_judge("lpips"), lambda: load_judge("dreamsim")], data_of(*group), draws=5)
    assert {name: row["agreement"] for name, row in results["metrics"].items()} == {"lpips": 1, "dreamsim": 1}
    assert got["net"] == "alex" and got["range"][0] >= -1 and got["range"][2] == (1, 3, 4, 4)
    assert got["cache"] == str(tmp_path / ".cache" / "dreamsim")


def test_the_real_lpips_package_gives_a_distance(monkeypatch: Any) -> None:
    """Its own linear weights, on a network that is random where the download would be."""
    lpips = pytest.importorskip("lpips", reason="the extra 'metrics' is not installed")
    real = lpips.LPIPS
    torch.manual_seed(0)
    monkeypatch.setattr(lpips, "LPIPS", lambda **options: real(pnet_rand=True, **options))
    judge: Any = load_judge("lpips", device="cpu")
    a, b = (torch.rand(3, 64, 64, generator=torch.Generator().manual_seed(k)) for k in range(2))
    same, other, back = judge.similarities([a, b], [(0, 0, "pose"), (0, 1, "pose"), (1, 0, "color")]).tolist()
    assert same == pytest.approx(0, abs=1e-6) and other < -1e-4 and other == pytest.approx(back, rel=1e-5)


@pytest.mark.parametrize("name", ["lpips", "dreamsim"])
def test_weights_that_cannot_be_had_are_one_sentence(name: str, monkeypatch: Any, tmp_path: Path) -> None:
    def offline(*arguments: Any, **options: Any) -> Any:
        raise OSError("Name or service not known")

    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    module = ModuleType(name)
    module.__dict__["LPIPS" if name == "lpips" else "dreamsim"] = offline
    monkeypatch.setitem(sys.modules, name, module)
    with pytest.raises(TPIPSError, match="could not be had .*Name or service not known.*copy the files to"):
        load_judge(name, device="cpu")


@pytest.mark.parametrize("name", ["lpips", "dreamsim"])
def test_without_the_package_the_message_says_what_to_install(name: str, monkeypatch: Any) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(TPIPSError, match=rf"needs the package {name}.*tpips-reward\[metrics\]"):
        load_judge(name)


def test_untrained_is_random_where_training_was_from_scratch() -> None:
    ours, again = untrained_metric("builtin:late", device="cpu"), untrained_metric("builtin:late", device="cpu")
    fresh = build_late_fusion(seed=0).state_dict()
    for name, value in ours.fusion.state_dict().items():
        assert torch.equal(value, fresh[name]), name  # the same as `compare` shows
    assert all(torch.equal(a, b) for a, b in zip(ours.fusion.parameters(), again.fusion.parameters(), strict=True))


@pytest.mark.parametrize("kind", ["embedding", "activation_dist", "early_fusion"])
def test_untrained_is_the_backbone_where_a_checkpoint_has_adapters(kind: str) -> None:
    trained = load_metric(PARITY / kind, device="cpu", merge_lora=False)
    untrained = untrained_metric(str(PARITY / kind), device="cpu")
    own = set(untrained.fusion.own_state())
    weights = trained.fusion.state_dict()
    for name, value in untrained.fusion.state_dict().items():
        if "lora_B" in name:
            assert not value.any(), name
        elif name not in own:
            assert torch.equal(value, weights[name]), name
    images = [torch.rand(3, 40, 40, generator=torch.Generator().manual_seed(k)) for k in range(2)]
    scores = [float(m.similarity(images[0], images[1], "color")[0]) for m in (trained, untrained)]
    assert scores[0] != scores[1] and np.isfinite(scores).all()


def test_unknown_metrics_are_named_with_the_baselines() -> None:
    with pytest.raises(TPIPSError, match="pixel_l2, ssim, lpips, dreamsim, untrained:SOURCE"):
        load_judge("psnr")


def test_the_command_compares_metrics_on_procedural_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "report"
    arguments = ["--metric", "pixel_l2", "--metric", "ssim", "--data", "procedural-2afc", "--triplets", "5"]
    command.main([*arguments, "--output_dir", str(out), "--output", str(tmp_path / "r.json"), "--bootstrap", "20"])
    text = capsys.readouterr().out
    assert "2AFC on procedural-2afc: 5 comparisons" in text
    assert "| pixel_l2 |" in text and "| *chance* | 0.500 |" in text
    stored = json.loads((tmp_path / "r.json").read_text())
    assert stored == json.loads((out / "report.json").read_text())
    votes = np.concatenate([c.votes for c in procedural_data("procedural-2afc", 5).comparisons])
    assert stored["data"]["consensus"] == pytest.approx(float((votes.astype(float) ** 2).sum(1).mean()))


def test_the_command_reads_files_and_lists_bad_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for k in range(3):
        Image.new("RGB", (16, 16), (0, 0, (0, 20, 200)[k])).save(tmp_path / f"{k}.png")
    row = {f"p{k}_path": f"{k}.png" for k in range(3)}
    row |= {"factors": [{"name": "color", "label": "p2", "probs": [0.2, 0.0, 0.8]}]}  # type: ignore[dict-item]
    (tmp_path / "set.jsonl").write_text(json.dumps(row | {"p1_path": "9.png"}) + "\n" + json.dumps(row) + "\n")
    arguments = ["--metric", "pixel_l2", "--data", str(tmp_path / "set.jsonl")]
    command.main(arguments)
    printed = capsys.readouterr()
    assert "line 1: the image" in printed.err and "| pixel_l2 | 0.800 |" in printed.out
    for more, message in (
        (["--strict"], "line 1"),
        (["--columns", "photo"], "role=column"),
        (["--images_per_call", "0"], "at least 1"),
        (["--image_root", str(tmp_path / "none")], "no folder"),
        (["--output_dir", str(tmp_path / "set.jsonl")], "is a file; give another path"),
        (["--output", str(tmp_path)], "is a folder; name a file"),
        (["--device", "gpu7"], "The device 'gpu7' is unknown"),
        (["--data", ""], "No data is named"),
        (["--data", "procedural", "--seed", "-1"], "must be at least 0, not -1"),
        (["--metric", "vlm-score:"], "names no model"),
    ):
        with pytest.raises(SystemExit) as stop:
            command.main([*arguments, *more])
        assert stop.value.code == 2 and message in capsys.readouterr().err


def test_one_metric_without_data_gives_the_four_rows(monkeypatch: Any, capsys: pytest.CaptureFixture[str]) -> None:
    seen = {}

    def compare(metric: Metric, count: int, seed: int) -> dict[str, Any]:
        seen.update(count=count, seed=seed)
        row = {"agreement": 0.5, "standard_error": 0.1, "consensus": 0.7, "examples": 9, "per_aspect": {}}
        return {name: row for name in ("metric, known wordings", "metric, wordings never trained on", "pixel L2")}

    monkeypatch.setattr(command, "compare", compare)
    command.main(["--metric", "builtin:late", "--triplets", "7", "--seed", "3"])
    assert seen == {"count": 7, "seed": 3} and "| pixel L2 | 0.500 | 0.100 | 0.700 | 9 |" in capsys.readouterr().out
