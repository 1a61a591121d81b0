"""Data and gradients that turn out bad in a training: one sentence, and no step is lost."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from bad_input import draw_pictures, row, save_start, tiny, written

from metric_training import train
from metric_training.training.state import STATE
from tpips_reward import TPIPSError


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


def test_a_device_that_is_full_in_a_validation_costs_no_step(start: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr("metric_training.training.validation.Validation.__call__", full)
    with pytest.raises(TPIPSError, match="full in the validation after step 1"):
        train.main(tiny(start, tmp_path / "run", save_steps=99, eval_steps=1))
    assert torch.load(tmp_path / "run" / STATE, weights_only=True)["step"] == 1


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
