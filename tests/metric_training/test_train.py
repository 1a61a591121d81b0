"""Training on a few tiny steps: it learns from its data, resumes to the bit, and leaves what load_metric takes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.multiprocessing
import yaml
from accelerate.state import AcceleratorState, PartialState
from PIL import Image

from metric_training import train
from metric_training.builtin_model import build_late_fusion
from metric_training.data.triplets import sample_triplet
from metric_training.data.votes import Voters
from metric_training.export import export
from metric_training.training import progress
from metric_training.training.config import TrainConfig, parse_config
from metric_training.training.examples import FreshTriplets, StoredComparisons, permuted
from metric_training.training.model import build_fusion, load_backbone
from metric_training.training.objectives import build_objective
from metric_training.training.schedule import Order, learning_rate_factor
from metric_training.training.setup import build_optimizers
from metric_training.training.state import BEST, STATE
from tpips_reward import Metric, TPIPSError, load_metric
from tpips_reward.files import TEMPORARY
from tpips_reward.scenes import ASPECTS, to_tensor

CONFIGS = Path(train.__file__).parent / "configs"
KINDS = ("late", "mid", "early", "triplet")


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny random metric in a folder: what the runs here start from."""
    folder = tmp_path_factory.mktemp("start")
    Metric(build_late_fusion(0, hidden=96, layers=2, vision_hidden=32)).save_pretrained(folder)
    return str(folder)


def tiny(start: str, folder: Path, **changes: Any) -> TrainConfig:
    settings: dict[str, Any] = {
        "model_name_or_path": start, "output_dir": str(folder), "dataset_name": "procedural", "train_samples": 4,
        "max_aspects": 3, "num_probes": 2, "learning_rate": 1e-3, "save_steps": 1, "eval_samples": 2, "eval_steps": 2,
        "logging_steps": 1, "lora_r": 2,
    }  # fmt: skip
    return TrainConfig(**(settings | changes))


def np_rng(number: int) -> np.random.Generator:
    return np.random.default_rng([5, 5, number])


def losses(folder: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (folder / "log.jsonl").read_text().splitlines()]


def state(folder: Path, name: str = STATE) -> dict[str, Any]:
    return torch.load(folder / name, weights_only=True)


@pytest.fixture(scope="module")
def finished(start: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    train.main(tiny(start, folder / "early", fusion="early", name="tiny"))
    return folder / "early"


def killed_and_resumed(
    config: TrainConfig, monkeypatch: pytest.MonkeyPatch, place: Any, name: str, dies: Callable[..., Any]
) -> None:
    """A run in which a function of a module dies, and its continuation with the real one."""
    monkeypatch.setattr(place, name, dies)
    with pytest.raises(KeyboardInterrupt):
        train.main(config)
    monkeypatch.undo()
    train.main(replace(config, resume=True))


def test_a_killed_run_resumes_to_the_bit(
    start: str, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real, calls = train.learning_rate_factor, []

    def dies_in_the_third_step(*args: Any) -> float:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return real(*args)

    killed_and_resumed(tiny(start, tmp_path, fusion="early", name="tiny"), monkeypatch, train, "learning_rate_factor", dies_in_the_third_step)
    shown = capsys.readouterr().out
    assert "4 items to train on, 1 in each of 4 steps.\n" in shown and "in each of 4 steps, of which 2 are done.\n" in shown
    assert f'Written: load_metric("{tmp_path / "best"}"), load_metric("{tmp_path / "last"}")' in shown
    one, two = state(finished), state(tmp_path)
    assert one["step"] == two["step"] == 4 and len(one["trained"]) > 2
    assert all(torch.equal(one["trained"][k], two["trained"][k]) for k in one["trained"])
    assert losses(finished) == losses(tmp_path)


def test_a_kill_between_the_checkpoint_and_what_follows_it_loses_no_line_of_the_log(
    start: str, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = progress.write_checkpoint

    def dies_after_the_second_step(path: Path, content: dict[str, Any]) -> None:
        real(path, content)
        if content["step"] == 2 and path.name == STATE:
            raise KeyboardInterrupt

    killed_and_resumed(tiny(start, tmp_path, fusion="early", name="tiny"), monkeypatch, progress, "write_checkpoint", dies_after_the_second_step)
    assert losses(tmp_path) == losses(finished) and len(losses(tmp_path)) == 4


def test_a_run_that_is_killed_at_any_time_resumes_to_the_bit(
    start: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    def launch(name: str, *flags: str) -> subprocess.Popen[bytes]:
        config = tiny(start, tmp_path / name, max_steps=30, optim="muon", use_peft=False, save_steps=2, eval_steps=10)
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump({k: v for k, v in asdict(config).items() if v is not None}))
        return subprocess.Popen([sys.executable, train.__file__, "--config", str(tmp_path / f"{name}.yaml"), *flags])

    whole, killed = launch("whole"), launch("killed")
    request.addfinalizer(whole.kill)  # where a line below fails
    request.addfinalizer(killed.kill)
    while not list((tmp_path / "killed").glob(f"{TEMPORARY}*")) or not (tmp_path / "killed" / STATE).exists():
        assert killed.poll() is None, "it ended before a second file was seen half written"
        time.sleep(0.0005)
    killed.kill()  # SIGKILL, while it writes
    assert killed.wait() == -signal.SIGKILL
    done = state(tmp_path / "killed")["step"]
    assert 0 < done < 30 and done % 2 == 0
    assert launch("killed", "--resume").wait() == 0 and whole.wait() == 0
    one, two = state(tmp_path / "whole"), state(tmp_path / "killed")
    assert all(torch.equal(one["trained"][k], two["trained"][k]) for k in one["trained"])
    for name, moments in one["optimizer"]["state"].items():
        assert all(torch.equal(value, two["optimizer"]["state"][name][key]) for key, value in moments.items()), name
    assert losses(tmp_path / "whole") == losses(tmp_path / "killed")
    assert not list((tmp_path / "killed").glob(f"{TEMPORARY}*")), "what the kill left half written is still there"


def test_muon_has_the_matrices_of_the_towers_and_adamw_the_rest(start: str, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"use_peft": False, "freeze_vision": False, "freeze_embeddings": False, "attribute_weight": 1.0}
    config = tiny(start, tmp_path, optim="muon", weight_decay=0.1, **settings)
    model = build_objective(config, build_fusion(config)).model
    adamw, muon = build_optimizers(config, model)
    assert isinstance(adamw, torch.optim.AdamW) and isinstance(muon, torch.optim.Muon)
    names = {parameter: name for name, parameter in model.named_parameters()}
    with_muon, with_adamw = ({names[p] for group in o.param_groups for p in group["params"]} for o in (muon, adamw))
    assert with_muon | with_adamw == {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert not with_muon & with_adamw
    towers = [name for name in with_muon if ".q_proj." in name or ".attn.qkv." in name]
    assert len(towers) == 2 + 4, "two layers of the language tower, four of the vision tower"
    assert all(model.get_parameter(name).ndim == 2 and ".backbone." in name for name in with_muon)
    for end in ("embed_tokens.weight", "pos_embed.weight", "patch_embed.proj.weight"):
        assert [name for name in with_adamw if name.endswith(end)], end
    assert {n for n in with_adamw if "readout_head" in n} and not [n for n in with_adamw if "q_proj" in n]

    settings |= {"use_peft": True, "freeze_vision": True, "freeze_embeddings": True, "attribute_weight": 0.0}
    assert [type(o) for o in build_optimizers(config, build_fusion(replace(config, **settings)))] == [torch.optim.Muon]

    # an orthogonal (A, B) matrix has the RMS 1 / sqrt(max(A, B)), and Muon's factor is 0.2 * sqrt(max(A, B)): the RMS is 0.2 * lr
    weight = model.get_parameter(towers[0])
    before = weight.detach().clone()
    weight.grad = torch.randn(weight.shape, generator=torch.Generator().manual_seed(0)) * 1e-6
    muon.step()
    step = (weight.detach() - before * (1 - 0.1 * config.learning_rate)).square().mean().sqrt()
    assert 0.5 < float(step) / (0.2 * config.learning_rate) < 1.5


def test_the_output_is_what_load_metric_takes(start: str, finished: Path) -> None:
    before, after = load_metric(start, device="cpu"), load_metric(finished / "last", device="cpu")
    assert after.fusion.kind == "early"
    old, new = before.backbone.model.state_dict(), after.backbone.model.state_dict()
    changed = {name for name, value in new.items() if not torch.equal(value, old[name])}
    # LoRA on every linear layer of the language tower, and nothing else
    assert len(changed) == 2 * 7 and all(name.startswith("language_model.layers.") for name in changed)
    card = (finished / "best" / "README.md").read_text()
    step, best = state(finished, BEST)["step"], state(finished, BEST)["best"]
    assert f"| {step} | {best:.4f} |" in card and "# tiny" in card and "; 1 comparison a step" in card


def test_weights_move_at_the_rate_of_the_schedule(finished: Path) -> None:
    groups = state(finished)["optimizer"]["param_groups"]
    assert groups and {group["lr"] for group in groups} == {1e-3 * learning_rate_factor(3, 4, 0.03, "cosine")}


def test_best_is_the_best_validation(finished: Path) -> None:
    records = [json.loads(line) for line in (finished / "log.jsonl").read_text().splitlines()]
    measured = {r["step"]: r["validation_agreement"] for r in records if "validation_agreement" in r}
    best = state(finished, BEST)
    assert set(measured) == {2, 4} and measured[best["step"]] == max(measured.values()) == best["best"]
    register = load_metric(finished / "best", device="cpu").fusion.register_embed.weight
    assert torch.equal(register, best["trained"]["fusion.register_embed.weight"])


@pytest.mark.parametrize("kind", ["late", "mid", "triplet"])
def test_the_other_fusions_train_whole_layers(start: str, tmp_path: Path, kind: str) -> None:
    train.main(tiny(start, tmp_path, fusion=kind, use_peft=False, max_steps=2))
    metric = load_metric(tmp_path / "best", device="cpu")
    old, new = load_metric(start, device="cpu").backbone.model.state_dict(), metric.backbone.model.state_dict()
    changed = {name for name, value in new.items() if not torch.equal(value, old[name])}
    assert changed and not [n for n in changed if "visual" in n or "embed_tokens" in n]
    assert metric.fusion.kind == kind


@pytest.mark.parametrize("kind", KINDS)
def test_shared_aspects_have_the_gradients_of_separate_examples(start: str, tmp_path: Path, kind: str) -> None:
    config = tiny(start, tmp_path, fusion=kind, use_peft=False, freeze_vision=False, temperature=0.1, max_aspects=5)
    objective = build_objective(config, build_fusion(config))
    whole = [objective.examples[0, 0], objective.examples[1, 1]]
    assert [len(example.aspects) for example in whole] == [5, 5]
    separate = [
        [replace(e, aspects=(e.aspects[k],), names=(e.names[k],), votes=e.votes[k : k + 1])] for e in whole for k in range(5)
    ]
    found = []
    for batches in ([whole], separate):
        objective.model.zero_grad()
        weight = sum(objective.weight(batch) for batch in batches)
        for batch in batches:
            (objective.loss(objective.model, batch, 0.0) / weight).backward()
        found.append({n: p.grad for n, p in objective.model.named_parameters() if p.grad is not None})
    assert found[0].keys() == found[1].keys() and any("visual" in name for name in found[0])
    for name, value in found[0].items():
        assert torch.allclose(value, found[1][name], atol=1e-5, rtol=1e-4), name


def test_accumulated_passes_are_one_large_pass(start: str, tmp_path: Path) -> None:
    for name, settings in (("one", (4, 1)), ("two", (1, 4))):
        batch, passes = settings
        config = tiny(
            start, tmp_path / name, lora_dropout=0.0, per_device_train_batch_size=batch, gradient_accumulation_steps=passes
        )
        train.main(replace(config, max_steps=2))
    assert losses(tmp_path / "one") == pytest.approx(losses(tmp_path / "two"), abs=1e-5)
    _assert_close(state(tmp_path / "one"), state(tmp_path / "two"))


def _assert_close(one: dict[str, Any], two: dict[str, Any]) -> None:
    assert one["trained"].keys() == two["trained"].keys()
    for name, value in one["trained"].items():
        assert torch.allclose(value, two["trained"][name], atol=2e-5), name
    for name, moments in one["optimizer"]["state"].items():  # AdamW's steps are those of gradients of any scale, its moments are not
        key = "exp_avg" if "exp_avg" in moments else "momentum_buffer"
        scale = float(moments[key].abs().max())
        assert torch.allclose(moments[key], two["optimizer"]["state"][name][key], rtol=1e-3, atol=1e-2 * scale), name


def _train_as(rank: int, config: TrainConfig, port: int) -> None:
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in names.items()})
    torch.set_num_threads(1)
    AcceleratorState._reset_state(True)
    train.main(config)
    PartialState().destroy_process_group()


@pytest.mark.parametrize("changes", [{"fusion": "early"}, {"optim": "muon", "use_peft": False}], ids=["adamw", "muon"])
def test_two_processes_are_one_with_the_same_global_batch(start: str, tmp_path: Path, changes: dict[str, Any]) -> None:
    settings: dict[str, Any] = {"lora_dropout": 0.0, "max_steps": 2, "max_grad_norm": 1e6, **changes}
    settings["aspect_weights"] = {"position": 4.0, "texture": 0.5}  # the two processes' shares weigh differently in both steps
    train.main(tiny(start, tmp_path / "one", per_device_train_batch_size=2, **settings))
    config = tiny(start, tmp_path / "two", per_device_train_batch_size=1, **settings)
    port = 20000 + os.getpid() % 20000
    torch.multiprocessing.start_processes(_train_as, (config, port), nprocs=2, start_method="spawn")
    one, two = state(tmp_path / "one"), state(tmp_path / "two")
    assert losses(tmp_path / "one") == pytest.approx(losses(tmp_path / "two"), abs=1e-5)
    assert one["best"] == pytest.approx(two["best"], abs=1e-6)
    _assert_close(one, two)


def test_frozen_weights_are_bfloat16_and_trained_ones_are_not(start: str, tmp_path: Path) -> None:
    config = tiny(start, tmp_path, fusion="mid", bf16=True, gradient_checkpointing=True)
    fusion = build_fusion(config)
    kinds = {p.dtype for p in fusion.parameters() if p.requires_grad}, {p.dtype for p in fusion.backbone.model.visual.parameters()}
    assert kinds == ({torch.float32}, {torch.bfloat16})
    objective = build_objective(config, fusion)
    objective.loss(objective.model, [objective.examples[0, 0]], 0.0).backward()
    touched = [n for n, p in fusion.named_parameters() if p.requires_grad and p.grad is not None and bool(p.grad.any())]
    assert any("lora_B" in name for name in touched) and any("head." in name for name in touched)


def test_a_file_of_votes_trains_in_parts_of_its_aspects(start: str, tmp_path: Path) -> None:
    rows = []
    for number in range(3):
        triplet = sample_triplet(np_rng(number), voters=Voters(), max_aspects=4)
        for k, image in enumerate(triplet.images):
            Image.fromarray(image).save(tmp_path / f"{number}_{k}.png")
        factors = [
            {"name": name, "label": f"p{int(v.argmax())}", "probs": [float(p) for p in v]}
            for name, v in zip(triplet.wordings, triplet.votes, strict=True)
        ]
        rows.append({f"p{k}_path": f"{number}_{k}.png" for k in range(3)} | {"factors": factors})
    (tmp_path / "votes.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    votes = str(tmp_path / "votes.jsonl")
    config = tiny(start, tmp_path / "run", dataset_name=votes, eval_dataset_name="procedural", max_aspects=3, max_steps=1)
    objective = build_objective(config, build_fusion(config))
    source = objective.examples.source
    assert isinstance(source, StoredComparisons)
    assert [len(source[k].aspects) for k in range(len(source))] == [3, 1] * 3
    train.main(config)
    assert (tmp_path / "run" / "last" / "tpips_config.json").exists()


def test_a_plain_backbone_is_a_start(start: str, tmp_path: Path) -> None:
    metric = load_metric(start, device="cpu")
    metric.save_pretrained(tmp_path)
    (tmp_path / "tpips_config.json").unlink()  # what is left is a Qwen3-VL's folder
    loaded = load_backbone(str(tmp_path), torch.float32)
    expected = metric.backbone.model.state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in loaded.model.state_dict().items())
    fusion = build_fusion(tiny(str(tmp_path), tmp_path / "run", fusion="mid"))
    assert fusion.kind == "mid" and any(".lora_A." in name for name, _ in fusion.named_parameters())


def test_scenes_and_side_targets_start_from_scratch(start: str, tmp_path: Path) -> None:
    train.main(tiny(start, tmp_path / "vision", objective="scenes", per_device_train_batch_size=2, max_steps=2))
    old = load_metric(start, device="cpu").backbone.model.state_dict()
    new = load_metric(tmp_path / "vision" / "last", device="cpu").backbone.model.state_dict()
    changed = {name for name, value in new.items() if not torch.equal(value, old[name])}
    assert changed and all(name.startswith("visual.") for name in changed)
    config = tiny(str(tmp_path / "vision" / "last"), tmp_path / "late", attribute_weight=0.3, use_peft=False, max_steps=1)
    train.main(config)
    assert any("readout_head" in name for name in state(tmp_path / "late")["trained"])
    with pytest.raises(TPIPSError, match="attribute_weight"):
        train.main(replace(config, fusion="mid", output_dir=str(tmp_path / "no")))


def test_training_learns_its_batch(start: str, tmp_path: Path) -> None:
    config = tiny(start, tmp_path, use_peft=False, freeze_vision=False, attribute_weight=1.0, temperature=0.1)
    objective = build_objective(config, build_fusion(config))
    batch = [objective.examples[k, k] for k in range(2)]
    optimizer = torch.optim.AdamW(objective.model.parameters(), lr=3e-3)
    found = []
    for _ in range(10):
        both, votes = (objective.loss(objective.model, batch, progress) for progress in (0.0, 1.0))
        optimizer.zero_grad()
        both.backward()
        optimizer.step()
        found.append((float(votes.detach()), float((both - votes).detach())))
    assert found[-1][0] < found[0][0] and found[-1][1] < 0.7 * found[0][1]


def test_a_permutation_moves_images_and_votes_together(start: str, tmp_path: Path) -> None:
    example = FreshTriplets(tiny(start, tmp_path))[0]
    other = permuted(example, [2, 0, 1])
    assert torch.equal(other.images[0], example.images[2]) and other.scenes[1] == example.scenes[0]
    assert torch.equal(other.votes, example.votes[:, [2, 0, 1]])
    config = tiny(start, tmp_path, permute_images=True)
    examples = build_objective(config, build_fusion(config)).examples
    orders = {tuple(float(i.sum()) for i in examples[number, 0].images) for number in range(12)}
    assert 3 < len(orders) <= 6 and len({tuple(sorted(order)) for order in orders}) == 1


def test_every_item_comes_once_an_epoch_however_many_processes() -> None:
    order = Order(items=10, batch=2, passes=1, processes=2, seed=3)
    assert order.steps(1.0, -1) == 3 and order.steps(1.0, 7) == 7
    items = [item for step in range(5) for _, item in order.of_step(step)]
    assert sorted(items[:10]) == sorted(items[10:]) == list(range(10)) and items[:10] != items[10:]
    mine = [list(order.batches(0, 5, process)) for process in range(2)]
    alone = Order(items=10, batch=4, passes=1, processes=1, seed=3)
    for step, whole in enumerate(alone.batches(0, 5, 0)):
        assert sorted(mine[0][step] + mine[1][step]) == sorted(whole)


def test_the_learning_rate_warms_up_and_falls_to_zero() -> None:
    factors = [learning_rate_factor(s, 100, 0.03) for s in range(100)]
    assert factors[:3] == pytest.approx([1 / 3, 2 / 3, 1.0]) and factors[-1] < 1e-3
    assert factors[51] == pytest.approx(0.5, abs=0.02)
    assert learning_rate_factor(99, 100, 0.03, "constant") == 1 and 0 < learning_rate_factor(99, 100, 0.03, "linear") < 0.02


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_shipped_settings_can_be_used(path: Path) -> None:
    parse_config(["--config", str(path)])


def test_the_papers_recipe_is_in_the_configs() -> None:
    # learning rate, effective batch in (triplet, aspect) examples, temperature: table 9
    table = {"late": (5e-5, 128, 0.05), "early": (1e-4, 128, 0.05), "mid": (1e-4, 32, 0.0025), "triplet": (3e-5, 32, None)}
    for kind, (rate, batch, temperature) in table.items():
        config = parse_config(["--config", str(CONFIGS / f"{kind}.yaml")])
        assert (config.fusion, config.learning_rate, config.temperature) == (kind, rate, temperature)
        assert 8 * config.per_device_train_batch_size * config.gradient_accumulation_steps * config.max_aspects == batch
        assert (config.lora_r, config.lora_alpha, config.lora_dropout) == (16, 32, 0.05)
        assert (config.weight_decay, config.max_grad_norm, config.warmup_ratio, config.num_train_epochs) == (0.01, 1, 0.03, 1)


def test_a_used_folder_and_a_missing_checkpoint_are_refused(start: str, finished: Path, tmp_path: Path) -> None:
    with pytest.raises(TPIPSError, match="--overwrite"):
        train.main(tiny(start, finished))
    with pytest.raises(TPIPSError, match=r"state\.pt"):
        train.main(tiny(start, tmp_path / "new", resume=True))
    with pytest.raises(TPIPSError, match="learning_rate=0.001, not 0.1"):
        train.main(tiny(start, finished, fusion="early", resume=True, learning_rate=0.1))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"learning_rate": 0.0}, "learning_rate must be a number above 0"),
        ({"fusion": "none"}, "fusion must be one of"),
        ({"train_share": 1.5}, "train_share must be from 0 to 1"),
        ({"max_aspects": 2.5}, "max_aspects must be of type int"),
        ({"bf16": True, "use_peft": False}, "bf16 holds frozen weights"),
        ({"lora_target_modules": ["nothing"]}, "the language tower does not have"),
        ({"model_name_or_path": "no_such_thing"}, "no_such_thing"),
        ({"adam_beta2": 1.0}, "adam_beta2 must be at least 0 and below 1, not 1.0"),
        ({"lora_dropout": 1.0}, "lora_dropout must be at least 0 and below 1, not 1.0"),
        ({"seed": 2**70}, "seed must be at most"),
        ({"aspect_weights": {"rotatoin": 4.0}}, "'rotatoin', which procedural never asks of; did you mean 'rotation'"),
        ({"aspect_weights": dict.fromkeys(ASPECTS, 0.0)}, "gives 0 to every aspect of procedural"),
    ],
)
def test_bad_settings_are_one_sentence(start: str, tmp_path: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(TPIPSError, match=message):
        train.main(tiny(start, tmp_path, **change))


def test_a_loss_that_is_not_finite_stops_the_run(start: str, tmp_path: Path) -> None:
    with pytest.raises(TPIPSError, match="lower --learning_rate"):
        train.main(tiny(start, tmp_path, learning_rate=1e30, use_peft=False))


def test_export_measures_the_files_that_it_wrote(finished: Path, tmp_path: Path) -> None:
    figures = export(finished, tmp_path / "metric", triplets=2, edits=4)
    metric = load_metric(tmp_path / "metric", device="cpu")
    assert metric.change_scale == pytest.approx(figures["change_scale"]) and metric.info["name"] == "builtin:early"
    image = to_tensor(sample_triplet(np_rng(0)).images[0])
    assert float(metric.similarity(image, image, "size")[0]) == pytest.approx(1.0, abs=1e-5)
    card = (tmp_path / "metric" / "README.md").read_text()
    assert f"{figures['results']['metric, known wordings']['agreement']:.3f}" in card
