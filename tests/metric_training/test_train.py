"""Training on a few tiny steps: it learns from its data, resumes to the bit, and exports what load_metric takes."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from metric_training import train
from metric_training.attributes import aspect_weights, attribute_loss, attribute_targets
from metric_training.builtin_model import build_late_fusion
from metric_training.evaluate import compare, held_out_triplets, metric_judge, pixel_judge, score_triplets
from metric_training.export import export
from metric_training.train import TrainConfig, learning_rate_factor, vote_losses
from tpips_reward import Metric, TPIPSError, load_metric
from tpips_reward.scenes import Scene, to_tensor

CLASSES = {"shape": 6, "texture": 4, "pattern": 5, "count": 3}


def tiny(folder: Path) -> TrainConfig:
    return TrainConfig(
        output_dir=str(folder), vision_steps=2, vision_batch_size=2, steps=3, batch_size=1, save_every=1, eval_every=100,
        eval_triplets=1,
    )  # fmt: skip


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    train.main(tiny(folder))
    return folder


def test_a_killed_run_resumes_to_the_bit(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = train.vote_losses, []

    def dies_in_the_second_vote_step(*args: object) -> object:
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(train, "vote_losses", dies_in_the_second_vote_step)
    with pytest.raises(KeyboardInterrupt):
        train.main(tiny(tmp_path))
    monkeypatch.undo()
    train.main(replace(tiny(tmp_path), resume=True))
    one, two = (torch.load(f / "checkpoint.pt", weights_only=True) for f in (finished, tmp_path))
    assert one["step"] == two["step"] == 5
    assert all(torch.equal(one["model"][k], two["model"][k]) for k in one["model"])
    losses = [[json.loads(line)["loss"] for line in (f / "log.jsonl").read_text().splitlines()] for f in (finished, tmp_path)]
    assert losses[0] == losses[1]


def test_a_used_folder_and_a_missing_checkpoint_are_refused(finished: Path, tmp_path: Path) -> None:
    with pytest.raises(TPIPSError, match="--overwrite"):
        train.main(tiny(finished))
    with pytest.raises(TPIPSError, match="checkpoint.pt"):
        train.main(replace(tiny(tmp_path / "new"), resume=True))


def test_export_writes_what_load_metric_takes(finished: Path, tmp_path: Path) -> None:
    figures = export(finished, tmp_path / "metric", triplets=2, edits=4)
    metric = load_metric(tmp_path / "metric", device="cpu")
    assert metric.change_scale == pytest.approx(figures["change_scale"])
    weights = torch.load(finished / "checkpoint.pt", weights_only=True)["model"]
    for name, value in metric.fusion.state_dict().items():
        assert torch.equal(value, weights[f"late.{name}"].to(torch.bfloat16).float()), name
    stored = json.loads((tmp_path / "metric" / "figures.json").read_text())
    # The stored figures are those that evaluation of the stored files gives.
    assert stored["results"]["metric, known wordings"] == compare(metric, 2)["metric, known wordings"]
    assert f"{stored['results']['pixel L2']['agreement']:.3f}" in (tmp_path / "metric" / "README.md").read_text()


def test_training_learns_its_batch() -> None:
    torch.manual_seed(0)
    trainee = train.Trainee(build_late_fusion(0, hidden=96, layers=1, vision_hidden=32))
    triplets = held_out_triplets(2)
    optimizer = torch.optim.AdamW(trainee.parameters(), lr=3e-3)
    losses = []
    for _ in range(12):
        vote_loss, side_loss = vote_losses(trainee, triplets, 0.1)
        optimizer.zero_grad()
        (vote_loss + side_loss).backward()
        optimizer.step()
        losses.append((float(vote_loss.detach()), float(side_loss.detach())))
    assert losses[-1][0] < losses[0][0] and losses[-1][1] < 0.7 * losses[0][1]
    assert all(p.grad is not None and bool(p.grad.abs().sum() > 0) for p in trainee.readout_head.parameters())


def test_shared_aspects_have_the_gradients_of_separate_examples() -> None:
    late = build_late_fusion(0, hidden=96, layers=2, vision_hidden=32)
    triplet = held_out_triplets(1)[0]
    images = [to_tensor(i) for i in triplet.images]
    aspects = list(triplet.wordings)[:3]
    gradients = []
    for groups in ([aspects], [[a] for a in aspects]):
        late.zero_grad()
        total = sum(
            (vectors[0] * vectors[1]).sum() + 0.5 * (vectors[1] * vectors[2]).sum()
            for vectors in (late.embed(images, [names] * 3) for names in groups)
        )
        total.backward()  # type: ignore[union-attr]
        gradients.append({n: p.grad.clone() for n, p in late.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys()
    for name, value in gradients[0].items():
        scale = max(float(value.abs().max()), 1e-3)
        assert torch.allclose(value, gradients[1][name], atol=1e-5 * max(scale, 1.0), rtol=1e-4), name


def test_attribute_targets_mask_what_cannot_be_seen() -> None:
    targets = attribute_targets([Scene(shape="circle", rotation=50.0), Scene(shape="arrow", rotation=90.0)])
    assert targets["mask"][0, -2:].tolist() == [0, 0] and targets["mask"][1].min() == 1
    assert targets["continuous"][1, -2:].tolist() == pytest.approx([0.0, 1.5], abs=1e-6)
    perfect = {"continuous": targets["continuous"]} | {
        n: torch.nn.functional.one_hot(targets[n], k) * 50.0 for n, k in CLASSES.items()
    }
    assert float(attribute_loss(perfect, targets)) < 1e-6


def test_a_read_out_answers_for_its_own_aspect_only() -> None:
    scenes = [Scene(), Scene(color=(0.0, 0.0, 1.0), background_color=(1.0, 1.0, 1.0))]
    right, wrong = (attribute_targets(s) for s in (scenes, scenes[::-1]))
    classes = {n: torch.nn.functional.one_hot(right[n], k) * 50.0 for n, k in CLASSES.items()}
    guess = {"continuous": right["continuous"].clone(), **classes}
    guess["continuous"][:, :3] = wrong["continuous"][:, :3]  # the object's color is wrong, all else right
    assert float(attribute_loss(guess, right, aspect_weights(["object color"] * 2))) > 1
    assert float(attribute_loss(guess, right, aspect_weights(["background color", "lighting"]))) < 1e-6


def test_learning_rate_warms_up_and_falls_to_zero() -> None:
    factors = [learning_rate_factor(s, 100, 0.03) for s in range(100)]
    assert factors[:3] == pytest.approx([1 / 3, 2 / 3, 1.0]) and factors[-1] < 1e-3
    assert all(a >= b for a, b in itertools.pairwise(factors[3:]))


def test_judges_are_scored_by_the_formula() -> None:
    triplets = held_out_triplets(20)
    pixel = score_triplets(pixel_judge, triplets)
    assert pixel["examples"] == sum(len(t.aspects) for t in triplets)
    crowd = sum(float((t.votes**2).sum()) for t in triplets) / pixel["examples"]
    assert pixel["consensus"] == pytest.approx(crowd, rel=1e-5)
    constant = score_triplets(lambda t: torch.zeros(len(t.aspects), 3), triplets)
    assert constant["agreement"] == pytest.approx(1 / 3)
    with pytest.raises(TPIPSError, match="finite"):
        score_triplets(lambda t: torch.full((len(t.aspects), 3), float("nan")), triplets)


def test_metric_judge_orders_pairs_by_the_image_left_out() -> None:
    metric = Metric(build_late_fusion(0, hidden=96, layers=1, vision_hidden=32))
    triplet = held_out_triplets(1)[0]
    images = [to_tensor(i) for i in triplet.images]
    table = metric_judge(metric)(triplet)
    for k, (i, j) in enumerate(((1, 2), (0, 2), (0, 1))):
        expected = metric.similarity(images[i], images[j], list(triplet.wordings))[0]
        assert torch.allclose(table[:, k], expected, atol=1e-5)
