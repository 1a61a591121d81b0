"""Data and gradients that turn out bad in a training: one sentence, and no step is lost."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from bad_input import detailed_picture, draw_pictures, row, save_start, tiny, written
from PIL import ImageOps

from metric_training import scaling, train
from metric_training.data.procedural import procedural_data
from metric_training.export import export
from metric_training.training.config import TrainConfig
from metric_training.training.examples import FreshTriplets, StoredComparisons
from metric_training.training.state import STATE
from tpips_reward import TPIPSError, load_metric


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_start(tmp_path_factory.mktemp("start"))


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pictures")
    draw_pictures(folder)
    return folder


@pytest.mark.parametrize("workers", [0, 1])
def test_an_image_that_breaks_off_in_training_costs_no_step(start: str, pictures: Path, tmp_path: Path, workers: int) -> None:
    data = written(pictures, row(0, 1, 2), row("cut.png", 3, 4), name=f"cut_{workers}.jsonl")
    # with this seed the broken row comes second
    config = tiny(start, tmp_path / "run", dataset_name=data, eval_dataset_name="procedural", save_steps=99,
                  dataloader_num_workers=workers, seed=SEED_OF_THE_ORDER)  # fmt: skip
    with pytest.raises(TPIPSError, match=r"cut\.png does not open.*Mend it and go on with --resume") as found:
        train.main(config)
    assert "Traceback" not in str(found.value)
    assert torch.load(tmp_path / "run" / STATE, weights_only=True)["step"] == 1
    shutil.copy(pictures / "5.png", pictures / "whole.png")
    Path(data).write_text(Path(data).read_text().replace("cut.png", "whole.png"))
    train.main(replace(config, resume=True))
    assert torch.load(tmp_path / "run" / STATE, weights_only=True)["step"] == 2


SEED_OF_THE_ORDER = 0


def test_training_lists_bad_rows_and_strict_stops_at_the_first(
    start: str, pictures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = written(pictures, row(0, 1, 2), row("nowhere.png"), name="strict.jsonl")
    config = tiny(start, tmp_path / "run", dataset_name=data, eval_dataset_name="procedural")
    with pytest.raises(TPIPSError, match=r"strict\.jsonl, line 2: the image .*nowhere\.png does not exist"):
        train.main(replace(config, strict=True))
    train.main(config)
    assert "strict.jsonl, line 2: the image" in capsys.readouterr().err


def test_the_rows_that_are_trained_on_are_no_validation(start: str, pictures: Path, tmp_path: Path) -> None:
    data = written(pictures, row(0, 1, 2), name="alone.jsonl")
    for changes in ({}, {"eval_dataset_name": str(pictures / ".." / pictures.name / "alone.jsonl")}):
        with pytest.raises(TPIPSError, match=r"alone\.jsonl is one file, without splits, so that a validation would be of the rows"):
            train.main(tiny(start, tmp_path / "run", dataset_name=data, **changes))
    assert not (tmp_path / "run" / "config.yaml").exists()
    with pytest.raises(SystemExit):
        scaling.main([f"--dataset_name={data}", f"--model_name_or_path={start}", f"--output_dir={tmp_path / 'scaling'}"])
    assert not (tmp_path / "scaling").exists()


def test_a_run_on_other_data_is_not_exported_as_a_built_in(start: str, pictures: Path, tmp_path: Path) -> None:
    data = written(pictures, row(0, 1, 2), name="own.jsonl")
    train.main(tiny(start, tmp_path / "run", dataset_name=data, eval_dataset_name="procedural", max_steps=1))
    with pytest.raises(TPIPSError, match=r"was trained on .*own\.jsonl from .*best is what load_metric takes"):
        export(tmp_path / "run", tmp_path / "out", triplets=1, edits=1)
    assert not (tmp_path / "out").exists()


def test_a_gradient_that_is_not_finite_reaches_no_weight(start: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("accelerate.Accelerator.clip_grad_norm_", lambda *_, **__: torch.tensor(float("inf")))
    with pytest.raises(TPIPSError, match="gradient's norm became inf at step 1; start anew with a lower"):
        train.main(tiny(start, tmp_path / "run"))
    assert not (tmp_path / "run" / STATE).exists()


def test_a_full_device_costs_no_step(start: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = train.accumulate_gradients, []

    def full_in_the_second_step(*args: Any) -> float:
        calls.append(1)
        if len(calls) == 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")
        return real(*args)

    config = tiny(start, tmp_path / "run", save_steps=99)
    monkeypatch.setattr(train, "accumulate_gradients", full_in_the_second_step)
    with pytest.raises(TPIPSError, match=r"memory of the device was full in step 2\. Give --gradient_checkpointing or a lower"):
        train.main(config)
    assert torch.load(tmp_path / "run" / STATE, weights_only=True)["step"] == 1
    # the remedies that the message names are no other run
    train.main(replace(config, resume=True, gradient_checkpointing=True, token_budget=100))
    assert (tmp_path / "run" / "last").is_dir()


def full(*_: object, **__: object) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory.")


@pytest.mark.parametrize("step", [1, 2])
def test_a_device_that_is_full_in_a_validation_costs_neither_a_step_nor_the_validation(
    start: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: int
) -> None:
    config = tiny(start, tmp_path / "run", save_steps=99, eval_steps=step)
    monkeypatch.setattr("metric_training.training.validation.Validation.__call__", full)
    for again in (False, True):
        with pytest.raises(TPIPSError, match=f"full in the validation after step {step}.*go on with --resume"):
            train.main(replace(config, resume=again))
        assert torch.load(tmp_path / "run" / STATE, weights_only=True)["step"] == step
    monkeypatch.undo()
    train.main(replace(config, resume=True))
    train.main(replace(config, output_dir=str(tmp_path / "whole")))
    assert logged(tmp_path / "run") == logged(tmp_path / "whole") and len(logged(tmp_path / "run")) == 2
    assert load_metric(tmp_path / "run" / "best", device="cpu")


def logged(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "log.jsonl").read_text().splitlines()
    return [{name: value for name, value in json.loads(line).items() if name != "seconds"} for line in lines]


def test_a_device_that_is_full_before_anything_is_saved_is_told_what_works(
    start: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for place, name, flags in ((train, "build_fusion", {}), (train, "accumulate_gradients", {"overwrite": True})):
        monkeypatch.setattr(place, name, full)
        message = "outside of a step" if name == "build_fusion" else "in step 1"
        with pytest.raises(TPIPSError, match=f"memory of the device was full {message}.* start again with --overwrite"):
            train.main(tiny(start, tmp_path / "run", **flags))
        monkeypatch.undo()
    (tmp_path / "run" / STATE).write_bytes(b"of an earlier run")
    monkeypatch.setattr(train, "build_fusion", full)
    with pytest.raises(TPIPSError, match="outside of a step.* start again with --overwrite"):
        train.main(tiny(start, tmp_path / "run", overwrite=True))


def test_a_device_that_is_full_while_gradients_are_clipped_costs_no_step(
    start: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []

    def full_in_the_second_step(*_: object, **__: object) -> torch.Tensor:
        calls.append(1)
        return torch.tensor(1.0) if len(calls) != 2 else full()  # type: ignore[return-value]

    monkeypatch.setattr("accelerate.Accelerator.clip_grad_norm_", full_in_the_second_step)
    with pytest.raises(TPIPSError, match="full in step 2"):
        train.main(tiny(start, tmp_path / "run", save_steps=99))
    assert torch.load(tmp_path / "run" / STATE, weights_only=True)["step"] == 1


def test_an_optimizer_for_which_the_device_has_no_room_leaves_the_checkpoint_before(
    start: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = torch.optim.AdamW.step, []

    def full_in_the_second_step(self: Any, *args: Any) -> Any:
        calls.append(1)
        return real(self, *args) if len(calls) != 2 else full()

    config = tiny(start, tmp_path / "run")
    monkeypatch.setattr(torch.optim.AdamW, "step", full_in_the_second_step)
    with pytest.raises(TPIPSError, match=r"full in step 2, where the optimizer was at work\..*go on with --resume"):
        train.main(config)
    monkeypatch.undo()
    assert torch.load(tmp_path / "run" / STATE, weights_only=True)["step"] == 1
    train.main(replace(config, resume=True))
    train.main(replace(config, output_dir=str(tmp_path / "whole")))
    assert logged(tmp_path / "run") == logged(tmp_path / "whole")


def test_a_step_of_aspects_without_weight_gives_no_gradient(start: str, tmp_path: Path) -> None:
    config = tiny(start, tmp_path / "run", train_samples=1, weight_decay=0.0)
    names = FreshTriplets(config)[0].names
    train.main(replace(config, aspect_weights=dict.fromkeys(names, 0.0)))
    assert [line["loss"] for line in logged(tmp_path / "run")] == [0.0]
    trained = torch.load(tmp_path / "run" / STATE, weights_only=True)["trained"]
    assert not any(bool(value.any()) for name, value in trained.items() if "lora_B" in name)


def test_the_learning_rate_that_is_logged_is_the_towers(start: str, tmp_path: Path) -> None:
    train.main(tiny(start, tmp_path / "run", fusion="early", optim="muon", head_learning_rate_factor=5.0, warmup_ratio=0.0, max_steps=1))
    assert logged(tmp_path / "run")[0]["learning_rate"] == TrainConfig.learning_rate


def test_another_photograph_in_a_folder_makes_other_rows(tmp_path: Path) -> None:
    def digest() -> str:
        comparisons = procedural_data("photographs", 2, size=32, folder=str(tmp_path)).comparisons
        return StoredComparisons(comparisons, 8, frozenset()).digest

    whole = detailed_picture()
    whole.save(tmp_path / "a.png")
    first = digest()
    assert digest() == first
    ImageOps.flip(whole).save(tmp_path / "a.png")  # the same votes of other images
    assert digest() != first


@pytest.mark.parametrize("change", ["votes", "aspect", "order", "fewer"])
def test_other_rows_are_no_continuation(start: str, pictures: Path, tmp_path: Path, change: str) -> None:
    rows = [row(0, 1, 2), row(3, 4, 5, factor={"probs": [0.6, 0.4, 0.0], "label": "p0"})]
    data = Path(written(pictures, *rows, name=f"{change}.jsonl"))
    config = tiny(start, tmp_path / "run", dataset_name=str(data), eval_dataset_name="procedural", max_steps=1)
    train.main(config)
    before = data.read_text()
    first, second = before.splitlines()
    data.write_text(
        {
            "votes": before.replace("0.2", "0.1", 1).replace("0.2", "0.3", 1),
            "aspect": before.replace("lighting", "light", 1),
            "order": f"{second}\n{first}\n",
            "fewer": f"{first}\n",
        }[change]
    )
    assert data.read_text() != before
    with pytest.raises(TPIPSError, match="are not those that the checkpoint .* was made with"):
        train.main(replace(config, resume=True))
    data.write_text(before)
    train.main(replace(config, resume=True))
