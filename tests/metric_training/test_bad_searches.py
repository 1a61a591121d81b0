"""Bad spaces and folders of searches: refused before the first trial."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from bad_input import save_start, tiny

from metric_training import search
from tpips_reward import TPIPSError


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_start(tmp_path_factory.mktemp("start"))


SPACES = {
    "low above high": "learning_rate: {low: 1, high: 0.1}",
    "low of 0 and log": "learning_rate: {low: 0, high: 0.1, log: true}",
    "low of another type": "learning_rate: {low: a, high: 0.1}",
    "log of another type": "learning_rate: {low: 0.1, high: 0.2, log: sure}",
    "choices of another type": "lora_r: [[1, 2]]",
    "what no trial may change": "output_dir: [a, b]",
}


@pytest.mark.parametrize("case", SPACES)
def test_spaces_that_are_none(case: str, start: str, tmp_path: Path) -> None:
    (tmp_path / "space.yaml").write_text(SPACES[case])
    with pytest.raises(TPIPSError, match=r"space\.yaml"):
        search.read_space(tmp_path / "space.yaml", tiny(start, tmp_path))


@pytest.mark.parametrize(
    ("space", "message"),
    [
        ({"lora_r": ["a"]}, "lora_r must be of type int"),
        ({"lora_r": {"low": 1.5, "high": 8.0}}, "lora_r must be of type int"),
        ({search.BATCH: ["a"]}, "must be a whole number"),
        ({"learning_rate": [1e-3, -1.0]}, "learning_rate must be a number above 0"),
    ],
)
def test_values_are_checked_before_the_first_trial(space: dict[str, Any], message: str, start: str, tmp_path: Path) -> None:
    with pytest.raises(TPIPSError, match=message):
        search.search(tiny(start, tmp_path), space, 1, tmp_path / "search")
    assert not (tmp_path / "search").exists()


def test_a_search_of_before_a_setting_was_there_goes_on(start: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "finish", lambda config, launcher: Path(config.output_dir))
    monkeypatch.setattr(search, "best_agreement", lambda folder: 0.5)
    real = search.asdict
    monkeypatch.setattr(search, "asdict", lambda config: {k: v for k, v in real(config).items() if k != "probe_layers"})
    config, folder = tiny(start, tmp_path, fusion="mid"), tmp_path / "search"
    search.search(config, {"lora_r": [2, 4]}, 1, folder)
    monkeypatch.setattr(search, "asdict", real)
    search.search(config, {"lora_r": [2, 4]}, 2, folder)
    with pytest.raises(TPIPSError, match=r"was begun with probe_layers=None, not \[1\]"):
        search.search(replace(config, probe_layers=[1]), {"lora_r": [2, 4]}, 2, folder)


def test_trials_of_two_searches_are_not_mixed(start: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "finish", lambda config, launcher: Path(config.output_dir))
    monkeypatch.setattr(search, "best_agreement", lambda folder: 0.5)
    config, folder = tiny(start, tmp_path), tmp_path / "search"
    search.search(config, {"lora_r": [2, 4]}, 1, folder)
    search.search(config, {"lora_r": [2, 4]}, 2, folder)
    for other, space, name in (
        (config, {"lora_r": [2, 8]}, "space"),
        (config, {"learning_rate": [1e-3]}, ""),
        (replace(config, seed=5), {"lora_r": [2, 4]}, "seed=0, not 5"),
    ):
        with pytest.raises(TPIPSError, match=f"was begun with {name}"):
            search.search(other, space, 3, folder)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "study.db").write_text("hello")
    with pytest.raises(TPIPSError, match=r"study\.db holds no search that can be read"):
        search.search(config, {"lora_r": [2, 4]}, 1, tmp_path / "other")
