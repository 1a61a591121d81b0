"""Mid fusion's tokens learn a late metric's embeddings: what they are drawn to, and what a run leaves."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from metric_training import train
from metric_training.builtin_model import build_late_fusion
from metric_training.export import export
from metric_training.training.config import TrainConfig
from metric_training.training.embeddings import EmbeddingObjective
from metric_training.training.model import build_fusion
from metric_training.training.objectives import build_objective
from tpips_reward import Metric, TPIPSError, load_metric


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("start")
    Metric(build_late_fusion(0, hidden=96, layers=2, vision_hidden=32)).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("teacher")
    Metric(build_late_fusion(1, hidden=96, layers=2, vision_hidden=32)).save_pretrained(folder)
    return str(folder)


def settings(start: str, teacher: str | None, folder: Path, **changes: Any) -> TrainConfig:
    values: dict[str, Any] = {
        "model_name_or_path": start, "teacher": teacher, "objective": "embeddings", "fusion": "mid", "probe_layers": [1, 2],
        "output_dir": str(folder), "dataset_name": "procedural", "train_samples": 4, "max_aspects": 3, "learning_rate": 1e-3,
        "use_peft": False, "logging_steps": 1, "save_steps": 1, "eval_samples": 2, "eval_steps": 2,
    }  # fmt: skip
    return TrainConfig(**(values | changes))


def objective_of(config: TrainConfig) -> EmbeddingObjective:
    found = build_objective(config, build_fusion(config))
    assert isinstance(found, EmbeddingObjective)
    return found


def test_targets_are_what_an_embedding_has_beyond_its_aspects_mean(start: str, teacher: str, tmp_path: Path) -> None:
    objective = objective_of(settings(start, teacher, tmp_path))
    batch = [objective.examples[0, 0], objective.examples[1, 1]]
    found = objective.targets(batch, torch.device("cpu"))
    assert len(found) == 2 * 3 * 3 == objective.weight(batch)
    metric = load_metric(teacher, device="cpu")
    references = [image for k in range(4) for image in objective.examples.source[k].images]  # all there are
    example, name = batch[1], batch[1].names[2]
    expected = metric.embed([example.images[1]], example.aspects[2])[0] - metric.embed(references, name).mean(0)
    # images in the second place, aspects in the last
    assert torch.allclose(found[9 + 3 + 2], F.normalize(expected, dim=-1), atol=1e-5)
    alone = objective_of(settings(start, teacher, tmp_path)).targets(batch[1:], torch.device("cpu"))
    for one, other in zip(found[9:], alone, strict=True):  # a resumed run has not seen the earlier batches
        assert torch.allclose(one, other, atol=1e-6)


def test_the_loss_is_that_of_every_token_of_the_last_probe(start: str, teacher: str, tmp_path: Path) -> None:
    objective = objective_of(settings(start, teacher, tmp_path))
    example = objective.examples[0, 0]
    total = 0.0
    with torch.no_grad():
        found = float(objective.loss(objective.model, [example], 0.0))
        targets = iter(objective.targets([example], torch.device("cpu")))
        fusion: Any = objective.model.fusion
        for image in example.images:
            for aspect in example.aspects:
                tokens = fusion.activations([aspect], fusion.backbone.encode_images([image]))[0].tokens[1]
                total += float(1 - F.cosine_similarity(tokens, next(targets)[None], dim=-1).mean())
    assert found == pytest.approx(total, abs=1e-4)


def test_tokens_come_closer_to_their_embeddings(start: str, teacher: str, tmp_path: Path) -> None:
    objective = objective_of(settings(start, teacher, tmp_path))
    trained = [parameter for parameter in objective.model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=3e-3)
    batch, losses = [objective.examples[k, k] for k in range(2)], []
    for _ in range(15):
        loss = objective.loss(objective.model, batch, 0.0) / objective.weight(batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.8 * losses[0]


def test_votes_go_on_from_such_a_start(start: str, teacher: str, tmp_path: Path) -> None:
    train.main(settings(start, teacher, tmp_path / "tokens", max_steps=2))
    old, first = load_metric(start, device="cpu"), load_metric(tmp_path / "tokens" / "last", device="cpu")
    before, after = old.backbone.model.state_dict(), first.backbone.model.state_dict()
    changed = {name for name, value in after.items() if not torch.equal(value, before[name])}
    assert changed and not [name for name in changed if "visual" in name or "embed_tokens" in name]
    assert first.fusion.kind == "mid" and first.fusion.probe_layers == [1, 2]
    assert f"embeddings of {teacher}" in (tmp_path / "tokens" / "last" / "README.md").read_text()
    votes = settings(str(tmp_path / "tokens" / "last"), None, tmp_path / "votes", objective="votes", probe_layers=None, max_steps=1)
    for name, value in (("probe_layers", [2]), ("num_probes", 1)):
        with pytest.raises(TPIPSError, match=rf"{name} .* was given, but .* is a mid metric with the probe layers \[1, 2\]"):
            train.main(replace(votes, **{name: value}))
    train.main(replace(votes, probe_layers=[1, 2], num_probes=7))
    second = load_metric(tmp_path / "votes" / "last", device="cpu")
    assert second.fusion.probe_layers == [1, 2]
    assert not torch.equal(second.fusion.own_state()["head.layer_logits"], torch.zeros(2))
    export(tmp_path / "votes", tmp_path / "shipped", triplets=2, edits=4)
    card = (tmp_path / "shipped" / "README.md").read_text()
    assert "Training: `tokens` (2 steps, 0 minutes, seed 0), then `votes` (1 steps" in card and f"trained from `{start}`" in card


@pytest.mark.parametrize("use_peft", [False, True])
@pytest.mark.parametrize(("objective", "layers"), [("votes", [1]), ("embeddings", [1]), ("embeddings", [2, 1]), ("votes", [2, 1])])
def test_all_that_is_trained_has_a_gradient(
    start: str, teacher: str, tmp_path: Path, objective: str, layers: list[int], use_peft: bool
) -> None:
    """Without it, several processes would wait for each other."""
    changes: dict[str, Any] = {"objective": objective, "probe_layers": layers, "use_peft": use_peft}
    config = settings(start, teacher if objective == "embeddings" else None, tmp_path, **changes)
    made = build_objective(config, build_fusion(config))
    made.loss(made.model, [made.examples[0, 0]], 0.0).backward()
    parts = {name: part for name, part in made.model.named_parameters() if part.requires_grad}
    assert not [name for name, part in parts.items() if part.grad is None]
    read = {name.partition(".layers.")[2][0] for name in parts if ".layers." in name}
    assert read == ({"0", "1"} if (objective, layers) == ("votes", [2, 1]) else {"0"})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"teacher": None}, "belong together; got objective 'embeddings' with teacher None"),
        ({"objective": "votes"}, "belong together; got objective 'votes'"),
        ({"fusion": "early", "probe_layers": None}, "teacher is for mid fusion; fusion is 'early'"),
        ({"probe_layers": [3]}, r"The probe layers \[3\] do not exist"),
        ({"probe_layers": ["a"]}, "probe_layers must be a list of whole numbers; it holds 'a'"),
        ({"temperature": 0.1}, "temperature is for objective 'votes'; objective is 'embeddings'"),
        ({"attribute_weight": 0.1}, "attribute_weight is for objective 'votes'"),
        ({"aspect_weights": {"lighting": 2.0}}, "aspect_weights is for objective 'votes'"),
        ({"teacher": "builtin:early"}, "The teacher builtin:early is early fusion"),
        ({"teacher": "builtin:late"}, "embeds in 128 numbers, the tokens to be taught have 96"),
    ],
)
def test_what_does_not_fit_is_one_sentence(
    start: str, teacher: str, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(TPIPSError, match=message):
        train.main(settings(start, **{"teacher": teacher, "folder": tmp_path} | changes))
    assert not any(tmp_path.iterdir())
