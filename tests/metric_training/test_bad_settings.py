"""Bad config files and flags: one sentence that names the setting and its value."""

from __future__ import annotations

from pathlib import Path

import pytest
from bad_input import save_start, tiny

from metric_training import evaluate
from metric_training.training.config import parse_config
from metric_training.training.runs import finish
from tpips_reward import TPIPSError


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_start(tmp_path_factory.mktemp("start"))


@pytest.mark.parametrize("seed", ["-3", "5"])
def test_the_seed_of_the_four_rows(seed: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[int] = []
    monkeypatch.setattr(evaluate, "load_metric", lambda *_, **__: None)
    monkeypatch.setattr(evaluate, "compare", lambda metric, count, seed: seen.append(seed) or {})
    monkeypatch.setattr(evaluate, "as_markdown", str)
    if seed == "5":
        evaluate.main(["--seed", seed])
        assert seen == [5]
        return
    with pytest.raises(SystemExit):
        evaluate.main(["--seed", seed])
    assert "--seed must be at least 0, not -3" in capsys.readouterr().err


CONFIGS = {
    "a list": ("- 1\n", "it holds a list"),
    "nothing": ("", "it holds nothing"),
    "no YAML": ("a: [1\n", "is not YAML"),
    "bytes": (b"\xff\xfe\x01", "is not YAML"),
    "unknown": ("lora_rr: 3\n", "Unknown setting 'lora_rr' in the config file. Did you mean lora_r?"),
    "a key that is no text": ("3: 4\n", "Unknown setting 3"),
    "text for a number": ("max_aspects: many\n", "invalid int value: 'many'"),
    "a fraction": ("lora_r: 2.5\n", "lora_r must be of type int, not 2.5"),
    "null": ("max_aspects:\n", "max_aspects must be of type int, not None"),
    "NaN": ("learning_rate: .nan\n", "learning_rate must be a number above 0, not nan"),
    "a flag": ("resume: maybe\n", "Argument --resume"),
    "names": ("lora_target_modules: [3]\n", "lora_target_modules must be a list of names; it holds 3"),
    "weights": ("aspect_weights: {lighting: heavy}\n", "a number of at least 0 each; it holds 'heavy'"),
    "a weight below 0": ("aspect_weights: {lighting: -1}\n", "it holds -1"),
}  # fmt: skip


@pytest.mark.parametrize("case", CONFIGS)
def test_config_files_that_are_none(case: str, tmp_path: Path) -> None:
    content, message = CONFIGS[case]
    path = tmp_path / "config.yaml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(TPIPSError) as found:
        parse_config(["--config", str(path)])
    assert message in str(found.value)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--config", "nowhere.yaml"], "nowhere.yaml cannot be read"),
        (["--config", "."], "cannot be read"),
        (["--config"], "--config needs a file name"),
        (["--learning_rat", "1"], "Did you mean --learning_rate?"),
        (["--max_aspects", "x"], "invalid int value: 'x'"),
    ],
)
def test_flags_that_are_none(flags: list[str], message: str) -> None:
    with pytest.raises(TPIPSError) as found:
        parse_config(flags)
    assert message in str(found.value)


@pytest.mark.parametrize("launcher", ["no_such_command", "", "a 'b"])
def test_launchers_that_are_no_command(launcher: str, start: str, tmp_path: Path) -> None:
    with pytest.raises(TPIPSError, match="is no command"):
        finish(tiny(start, tmp_path / "run"), launcher)
