"""The search and the scaling figure on two tiny trainings each: resumed where they stopped, written as tables."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from metric_training import scaling, search, train
from metric_training.builtin_model import build_late_fusion
from metric_training.data.procedural import procedural_data
from metric_training.training.config import TrainConfig
from metric_training.training.runs import finish
from tpips_reward import Metric, TPIPSError
from tpips_reward.fusion.mid import MidFusion


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> TrainConfig:
    folder = tmp_path_factory.mktemp("start")
    Metric(build_late_fusion(0, hidden=96, layers=1, vision_hidden=32)).save_pretrained(folder)
    return TrainConfig(
        model_name_or_path=str(folder), dataset_name="procedural", train_samples=4, max_aspects=3, eval_samples=2,
        num_probes=1, max_steps=1,
    )  # fmt: skip


SPACE: dict[str, Any] = {"lora_r": [2, 4], "learning_rate": {"low": 1e-4, "high": 1e-2, "log": True}}


def table(path: Path) -> list[dict[str, str]]:
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def test_a_search_goes_on_where_it_was_cut_off(
    config: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, seen = train.main, []

    def dies_in_the_second_trial(settings: TrainConfig) -> None:
        seen.append(settings)
        if len(seen) == 2:
            raise KeyboardInterrupt
        real(settings)

    monkeypatch.setattr(train, "main", dies_in_the_second_trial)
    with pytest.raises(KeyboardInterrupt):
        search.search(config, SPACE, 2, tmp_path)
    assert len(table(tmp_path / "trials.csv")) == 1
    best = search.search(config, SPACE, 2, tmp_path)
    # the trial that was cut off came again, with the same values in the same folder
    assert len(seen) == 3 and seen[1].output_dir == seen[2].output_dir
    assert (seen[1].lora_r, seen[1].learning_rate) == (seen[2].lora_r, seen[2].learning_rate)
    assert seen[0].learning_rate != seen[2].learning_rate
    rows = table(tmp_path / "trials.csv")
    agreements = [float(row["validation_agreement"]) for row in rows]
    assert len(rows) == 2 and agreements == sorted(agreements, reverse=True)
    assert best.learning_rate == float(rows[0]["learning_rate"]) and best.lora_alpha == 2 * best.lora_r
    saved = yaml.safe_load((tmp_path / "best.yaml").read_text())
    # a training with it does not go into the folder of a trial
    assert saved["learning_rate"] == best.learning_rate and "output_dir" not in saved
    search.search(config, SPACE, 2, tmp_path)  # nothing is left to do
    assert len(seen) == 3


def test_the_papers_spaces_and_a_batch_in_examples(config: TrainConfig) -> None:
    for kind, space in search.SPACES.items():
        assert space["lora_r"] == [8, 16, 32, 64] and space["learning_rate"]["high"] == 5e-4
        assert ("temperature" in space) == (kind != "triplet") and ("num_probes" in space) == (kind == "mid")
    found = search.with_values(config, {search.BATCH: 24, "lora_r": 8}, processes=2)
    assert found.gradient_accumulation_steps == 4 and found.lora_alpha == 16
    with pytest.raises(TPIPSError, match="does not divide the batch of 32"):
        search.with_values(config, {search.BATCH: 32}, processes=2)


@pytest.mark.parametrize("launched", [False, True])
def test_a_trial_that_diverges_does_not_end_the_search(
    config: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], launched: bool
) -> None:
    real, seen = train.run, []

    def diverges_at_first(settings: TrainConfig, stop: Any) -> None:
        seen.append(settings)
        if len(seen) == 1:
            raise train.Diverged("The loss became nan at step 1; start anew with a lower --learning_rate.")
        real(settings, stop)

    def launch(words: list[str], **_: Any) -> Any:
        settings = TrainConfig(**yaml.safe_load(Path(words[-1]).read_text()))
        try:
            train.main(settings)
        except TPIPSError:
            return SimpleNamespace(returncode=1)
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(train, "run", diverges_at_first)
    monkeypatch.setattr("subprocess.run", launch)
    best = search.search(config, SPACE, 2, tmp_path, launcher="false" if launched else None)
    assert f"{tmp_path / 'trial_0'}: The loss became nan" in capsys.readouterr().err
    first, second = table(tmp_path / "trials.csv")
    assert float(first["validation_agreement"]) >= 0 and second["validation_agreement"] == "diverged"
    assert (first["folder"], second["folder"]) == ("trial_1", "trial_0") and best.learning_rate == float(first["learning_rate"])
    search.search(config, SPACE, 2, tmp_path)  # nothing is left to do
    assert len(seen) == 2


def test_a_search_whose_trials_all_diverge_says_so(config: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def diverges(settings: TrainConfig, stop: Any) -> None:
        raise train.Diverged("The loss became nan at step 1.")

    monkeypatch.setattr(train, "run", diverges)
    with pytest.raises(TPIPSError, match="All 3 trials in .* diverged"):
        search.search(config, SPACE, 3, tmp_path)


def test_a_loss_that_is_no_number_is_a_divergence(config: TrainConfig, tmp_path: Path) -> None:
    run = replace(config, output_dir=str(tmp_path / "run"), temperature=1e-45)
    with pytest.raises(train.Diverged, match="became"):
        train.main(run)
    assert "at step 1" in (tmp_path / "run" / "diverged.txt").read_text()


def test_probe_layers_that_no_trial_could_have(config: TrainConfig, tmp_path: Path) -> None:
    Metric(MidFusion(build_late_fusion(0, hidden=96, layers=1, vision_hidden=32).backbone, num_probes=1)).save_pretrained(tmp_path / "mid")
    mid = replace(config, fusion="mid")
    for settings, message in (
        (mid, "3 probe layers do not fit a backbone of 1 layers"),
        (replace(mid, model_name_or_path=str(tmp_path / "mid")), "keeps its probe layers"),
        (replace(mid, probe_layers=[1]), "num_probes is searched, which only mid fusion without probe_layers has"),
        (config, "num_probes is searched, which only mid fusion"),
    ):
        with pytest.raises(TPIPSError, match=message):
            search.search(settings, {"num_probes": [1, 3]}, 1, tmp_path / "search")
    assert not (tmp_path / "search").exists()


def test_a_search_that_goes_on_loads_no_start_of_its_own(config: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "finish", lambda settings, launcher: Path(settings.output_dir))
    monkeypatch.setattr(search, "best_agreement", lambda folder: 0.5)
    real, loaded = search.load_start, []
    monkeypatch.setattr(search, "load_start", lambda settings: loaded.append(settings) or real(settings))
    mid = replace(config, fusion="mid")
    search.search(mid, {"num_probes": [1]}, 1, tmp_path / "search")
    search.search(mid, {"num_probes": [1]}, 2, tmp_path / "search")
    with pytest.raises(TPIPSError, match="was begun with space"):
        search.search(mid, {"num_probes": [1, 3]}, 3, tmp_path / "search")
    (tmp_path / "file").touch()
    with pytest.raises(TPIPSError, match="cannot be a folder"):
        search.search(mid, {"num_probes": [1]}, 1, tmp_path / "file")
    assert len(loaded) == 1 and len(table(tmp_path / "search/trials.csv")) == 2


@pytest.mark.parametrize(
    "text",
    ["- a", "no_setting: [1]", "lora_r: 3", "lora_r: {low: 1}", "lora_r: []", "a: [", "", "max_aspects: {low: 1, high: 8}",
     "effective_batch_size: {low: 8, high: 64}", "bf16: {low: 0, high: 1}"],
)  # fmt: skip
def test_a_space_that_is_none_is_one_sentence(config: TrainConfig, tmp_path: Path, text: str) -> None:
    path = tmp_path / "space.yaml"
    path.write_text(text)
    with pytest.raises(TPIPSError, match="space"):
        search.read_space(path, config)


def test_scaling_measures_every_share_once(config: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, seen = train.main, []

    def counted(settings: TrainConfig) -> None:
        seen.append(settings.train_share)
        real(settings)

    monkeypatch.setattr(train, "main", counted)
    test = procedural_data("procedural", 3)
    rows = scaling.measure_scaling(config, [0.5, 1.0], test, tmp_path)
    text = scaling.write_scaling(rows, tmp_path)
    assert scaling.measure_scaling(config, [0.5, 1.0], test, tmp_path) == rows
    assert seen == [0.5, 1.0]
    assert f"| 50% | {rows[0]['agreement']:.3f} |" in text and (tmp_path / "scaling.png").stat().st_size > 1000
    assert [float(row["share"]) for row in table(tmp_path / "scaling.csv")] == [0.5, 1.0]


def test_what_a_search_and_a_scaling_do_with_settings_is_said(
    config: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(search, "finish", lambda settings, launcher: Path(settings.output_dir))
    monkeypatch.setattr(search, "best_agreement", lambda folder: 0.5)
    space = tmp_path / "space.yaml"
    space.write_text("effective_batch_size: [24]\nlearning_rate: [2e-3]\n")  # a text to YAML
    flags = [f"--model_name_or_path={config.model_name_or_path}", "--dataset_name=procedural", "--max_aspects=3", "--max_steps=1"]
    search.main([*flags, "--trials=1", f"--space={space}", f"--output-dir={tmp_path / 'search'}", "--launcher=torchrun -x"])
    shown = capsys.readouterr()
    assert "trial_0: effective_batch_size 24, learning_rate 0.002 (gradient_accumulation_steps 8)" in " ".join(shown.err.split())
    assert "of 1 steps, as the trials" in shown.out
    assert shown.out.strip().endswith(f": torchrun -x metric_training/train.py --config {tmp_path / 'search' / 'best.yaml'}")
    row = {"share": 1.0, "agreement": 0.5, "standard_error": 0.1, "consensus": 0.7}
    monkeypatch.setattr(scaling, "measure_scaling", lambda *_: [row])
    scaling.main([*flags, "--test_samples=1", f"--output-dir={tmp_path / 'scaling'}"])
    assert "max_steps 1: each share trains for as many steps" in capsys.readouterr().err and (tmp_path / "scaling" / "scaling.md").is_file()


def test_shares_that_would_share_a_folder(config: TrainConfig, tmp_path: Path) -> None:
    with pytest.raises(TPIPSError, match="Two shares are 33 %"):
        scaling.measure_scaling(config, [0.5, 0.333, 0.334], procedural_data("procedural", 3), tmp_path)
    assert not any(tmp_path.iterdir())


def test_a_launcher_that_fails_is_one_sentence(config: TrainConfig, tmp_path: Path) -> None:
    with pytest.raises(TPIPSError, match="failed"):
        finish(replace(config, output_dir=str(tmp_path / "run")), "false")
    assert yaml.safe_load((tmp_path / "run.yaml").read_text())["train_samples"] == 4
