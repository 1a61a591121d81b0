"""Settings: where they come from, which one wins, and what a wrong one says."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from rl_recipes.config import (
    ALGORITHMS,
    BUILTIN_MINUTES,
    LORA_EMA_DECAY,
    Algorithm,
    BackpropArguments,
    ConfigError,
    GRPOArguments,
    NFTArguments,
)
from rl_recipes.parsing import PRESETS, parse_arguments


def test_the_main_job_needs_one_flag() -> None:
    args = parse_arguments(["--reward", "tpips:preserve"])
    assert (args.editor.editor, args.reward.metric, args.run.data) == ("builtin", "builtin:late", None)
    assert args.time_limit() == BUILTIN_MINUTES * 60


def test_flags_win_over_the_config_and_the_config_over_the_preset(tmp_path: Path) -> None:
    config = tmp_path / "run.yaml"
    config.write_text("editor: org/some-editor\nlearning_rate: 2e-4\nnum_inference_steps: 12\n")
    args = parse_arguments(["--config", str(config), "--num_inference_steps", "9"])
    preset = yaml.safe_load((PRESETS / "qwen_image_edit.yaml").read_text())
    assert (args.run.num_inference_steps, args.run.learning_rate) == (9, 2e-4)
    assert args.editor.resolution == preset["resolution"]
    assert args.time_limit() == float("inf")
    assert parse_arguments([f"--config={config}", "--preset", "none"]).editor.resolution is None


@pytest.mark.parametrize("name", sorted(p.stem for p in PRESETS.glob("*.yaml")))
def test_every_preset_is_valid(name: str) -> None:
    settings = yaml.safe_load((PRESETS / f"{name}.yaml").read_text())
    assert settings.keys() <= {k for algorithm in ALGORITHMS for k in parse_arguments(["--preset", name], algorithm).to_dict()}


def test_what_was_tuned_on_the_built_in_editor_is_not_for_others() -> None:
    built_in, others = ([parse_arguments(flags, recipe) for recipe in (NFTArguments, BackpropArguments)]
                        for flags in ([], ["--preset", "qwen_image_edit"]))  # fmt: skip
    assert [args.algorithm.kl_weight for args in built_in] == [0.1, 0.0]
    assert [args.run.max_grad_norm for args in built_in] == [1.0, 0.05]
    assert all(args.algorithm.kl_weight == 0 and args.run.max_grad_norm == 1 for args in others)
    assert [(args.run.num_generations, args.run.prompts_per_iteration) for args in others] == [(16, 8), (1, 8)]


def test_help_shows_the_defaults_for_the_editor(capsys: pytest.CaptureFixture[str]) -> None:
    for flags, rate in (([], "0.0016"), (["--editor", "Qwen/Qwen-Image-Edit-2511"], "0.0003")):
        with pytest.raises(SystemExit):
            parse_arguments([*flags, "--help"])
        assert f"Learning rate of AdamW. (default: {rate})" in " ".join(capsys.readouterr().out.split())


def test_what_is_saved_is_read_back(tmp_path: Path) -> None:
    args = parse_arguments(["--eta", "0.31", "--on_bad_row", "error", "--max_minutes", "3"])
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(args.to_dict()))
    assert parse_arguments(["--config", str(path)]) == args


def test_resume_takes_the_settings_of_the_run(tmp_path: Path) -> None:
    started = parse_arguments(["--output_dir", str(tmp_path), "--eta", "0.31", "--max_steps", "7"])
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(started.to_dict()))
    args = parse_arguments(["--resume", "--output_dir", str(tmp_path), "--max_steps", "9", "--offload_text_encoders", "true"])
    assert args.editor.offload_text_encoders, "it changes no result, and may be what a GPU's memory lacks"
    assert (args.algorithm.eta, args.run.max_steps, args.run.resume) == (0.31, 9, True)
    with pytest.raises(ConfigError, match=r"eta = 0\.31, but 0\.5 was given"):
        parse_arguments(["--resume", "--output_dir", str(tmp_path), "--eta", "0.5"])
    with pytest.raises(ConfigError, match="eval_data = None, but .* was given"):
        parse_arguments(["--resume", "--output_dir", str(tmp_path), "--eval_data", __file__])
    with pytest.raises(ConfigError, match="Nothing to resume"):
        parse_arguments(["--resume", "--output_dir", str(tmp_path / "other")])


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--learning_rat", "1"], r"Unknown flag --learning_rat\. Did you mean --learning_rate\?"),
        (["--zzz=3"], r"Unknown flag --zzz"),
        (["--num_inference_steps", "many"], "num_inference_steps.*invalid int value: 'many'"),
        (["--on_bad_row", "maybe"], "on_bad_row.*maybe"),
        (["--num_generations", "1"], "num_generations must be a number of at least 2, not 1"),
        (["--eta", "0"], "eta must be a number above 0"),
        (["--learning_rate", "nan"], "learning_rate must be a number of at least 0, not nan"),
        (["--sde_window", "9"], "sde_window is 9, but there are only 6 steps"),
        (["--window", "slide", "--window_stride", "3"], "window_stride is 3, but the window has 2 steps"),
        (["--window_limit", "1"], "sde_window is 2, but window_limit leaves 1 steps"),
        (["--sde_kind", "cps", "--sde_window", "6"], "With sde_kind 'cps'"),
        (["--skip_saturated"], "needs prompts that come again"),
        (["--push_to_hub"], "needs a repository"),
        (["--train", "full", "--editor_dtype", "bfloat16"], "--train full needs --editor_dtype float32"),
        (["--ema_decay", "1"], "ema_decay must be at least 0 and below 1"),
        (["--train_steps", "5"], "train_steps is 5, but only 2"),
        (["--overwrite", "--resume", "--output_dir", "{run}"], "contradict"),
        (["--preset", "huge"], "no preset 'huge'; there are .*qwen_image_edit"),
        (["--data", "missing.jsonl"], r"--data missing\.jsonl is no file"),
        (["--eval_data", "missing.jsonl"], r"--eval_data missing\.jsonl is no file"),
        (["--data", "{run}/config.yaml", "--eval_data", "{run}/../{run.name}/config.yaml"], "is the file of --data, whose rows are"),
        (["--config", "missing.yaml"], r"missing\.yaml cannot be read"),
        (["--config"], "needs a file name"),
        (["--editor", " "], "editor is empty"),
        (["--gate", "soft"], "gate.*soft"),
        (["--antithetic", "maybe"], r"got maybe .*\(case insensitive\)\. --help lists all flags\.$"),
    ],
)
def test_bad_flags_are_named(argv: list[str], message: str, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(parse_arguments([]).to_dict()))
    with pytest.raises(ConfigError, match=message):
        parse_arguments([arg.format(run=tmp_path) for arg in argv])


def test_help_says_that_own_edits_are_evaluated_on_what_was_trained_on(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_arguments(["--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert text.count("With --data and without --eval_data") == 2
    assert "the first rows of --data, which are trained on" in text and "the rows are those that are trained on" in text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("learning_rte: 1\n", r"Unknown setting 'learning_rte' in .*bad\.yaml\. Did you mean learning_rate\?"),
        ("- a\n- b\n", "must hold 'setting: value' lines"),
        ("a: [1\n", "is not YAML"),
        ("num_inference_steps: [8]\n", r"num_inference_steps in .*bad\.yaml must be of type int, not \[8\]"),
        ("num_inference_steps: 8.5\n", r"num_inference_steps in .*bad\.yaml must be of type int, not 8\.5"),
        ("report_to: nowhere\n", r"report_to in .*bad\.yaml must be one of 'none'.*not 'nowhere'"),
        ("num_inference_steps: many\n", r"^num_inference_steps in .*bad\.yaml: invalid int value: 'many'\.$"),
        ("seed: true\n", r"seed in .*bad\.yaml must be of type int, not True"),
    ],
)
def test_bad_config_files_are_named(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        parse_arguments(["--config", str(path)])


def test_a_bad_flag_over_a_config_file_is_not_blamed_on_the_file(tmp_path: Path) -> None:
    path = tmp_path / "good.yaml"
    path.write_text("max_steps: 3\nreport_to: none\n")
    with pytest.raises(ConfigError, match="^Argument --max_steps.*: invalid int value: 'many'"):
        parse_arguments(["--config", str(path), "--max_steps", "many"])
    with pytest.raises(ConfigError, match="^Argument --report_to.*nowhere"):
        parse_arguments(["--config", str(path), "--report_to=nowhere"])


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda a: a.recipe)
def test_every_recipe_has_defaults_a_folder_of_its_own_and_takes_every_preset(algorithm: type) -> None:
    args = parse_arguments([], algorithm)
    assert args.run.output_dir == f"runs/{algorithm.recipe}"
    for preset in PRESETS.glob("*.yaml"):
        settings = yaml.safe_load(preset.read_text())
        found = parse_arguments(["--preset", preset.stem], algorithm).to_dict()
        used = [name for name in settings if name in found and name not in algorithm.whatever_editor]
        assert {name: found[name] for name in used} == {name: settings[name] for name in used}


@pytest.mark.parametrize(
    ("algorithm", "argv", "message"),
    [
        (0, ["--nft_beta", "1"], "Unknown flag --nft_beta"),
        (1, ["--min_count", "40"], "min_count is 40, which a buffer_size of 32 never reaches"),
        (2, ["--noise_levels", "9"], "noise_levels is 9, but the schedule has 6"),
        (2, ["--nft_beta", "0"], "nft_beta must be a number above 0"),
        (3, ["--last_steps", "9"], "last_steps is 9, but there are only 6 steps"),
        (3, ["--num_generations", "0"], "num_generations must be a number of at least 1"),
    ],
)
def test_bad_settings_of_each_algorithm_are_named(algorithm: int, argv: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_arguments(argv, ALGORITHMS[algorithm])


def test_a_run_of_another_recipe_is_not_resumed(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(parse_arguments([]).to_dict()))
    with pytest.raises(ConfigError, match=r"of another recipe .* which nft_edit\.py cannot resume"):
        parse_arguments(["--resume", "--output_dir", str(tmp_path)], NFTArguments)


@pytest.mark.parametrize(
    ("recipe", "flags", "decay"),
    [
        (GRPOArguments, [], LORA_EMA_DECAY),
        (GRPOArguments, ["--ema_decay", "0"], 0.0),
        (GRPOArguments, ["--train", "full"], 0.0),
        (GRPOArguments, ["--train", "full", "--ema_decay", "0.9"], 0.9),
        (NFTArguments, [], LORA_EMA_DECAY),
    ],
)
def test_the_average_of_an_adapter_is_handed_out_unless_told_otherwise(
    recipe: type[Algorithm], flags: list[str], decay: float
) -> None:
    assert parse_arguments(flags, recipe).ema_decay() == decay
