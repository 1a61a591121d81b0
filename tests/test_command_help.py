"""What --help says: of each option that has a default, what it is."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from metric_training import benchmark, calibrate, evaluate, export, scaling, search
from metric_training.data import raw_votes
from metric_training.training.config import parse_config
from rl_recipes import evaluate_editor, goals
from rl_recipes.builtin import card, measure_editor
from rl_recipes.parsing import parse_arguments
from tpips_reward import cli
from tpips_reward.arguments import HelpFormatter
from tpips_reward.rewards import effects

#: Of each command, what its help has to hold.
COMMANDS: dict[str, tuple[Callable[[Sequence[str]], Any], str]] = {
    "benchmark": (benchmark.main, "composition of aspects (default: text)"),
    "calibrate": (calibrate.main, "(default: builtin:late)"),
    "evaluate": (evaluate.main, "comparisons in a procedural test set (default: 1000)"),
    "export": (export.main, "which weights (default: best)"),
    "raw_votes": (raw_votes.main, "(default: odd_one_out)"),
    "scaling": (scaling.main, "comparisons in the test (default: 600)"),
    "search": (search.main, "finished trainings in the end (default: 30)"),
    "evaluate_editor": (evaluate_editor.main, "procedural edits (default: 64)"),
    "measure_editor": (measure_editor.main, "held-out edits (default: 300)"),
    "card": (card.main, "where to ship it to (default: "),
    "effects": (effects.main, "pixels a side (default: 64)"),
    "tpips-reward serve": (lambda flags: cli.main(["serve", *flags]), "0 takes a free one (default: 8000)"),
    "tpips-reward evaluate": (lambda flags: cli.main(["evaluate", *flags]), "of the bootstrap (default: 2000)"),
    "tpips-reward index": (lambda flags: cli.main(["index", *flags]), "images in one call of the metric (default: 32)"),
    "tpips-reward search": (lambda flags: cli.main(["search", *flags]), "how many images (default: 10)"),
    "tpips-reward video": (lambda flags: cli.main(["video", *flags]), "take each N-th frame only (default: 1)"),
    "train": (parse_config, "--config FILE reads settings from a YAML file"),
    "grpo_edit": (parse_arguments, "--config FILE reads settings from a YAML file"),
}


def help_of(main: Callable[[Sequence[str]], Any], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as left:
        main(["--help"])
    assert not left.value.code
    return " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("command", COMMANDS)
def test_help_says_the_defaults(command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    main, text = COMMANDS[command]
    seen: list[argparse.ArgumentParser] = []
    real = argparse.ArgumentParser.print_help
    monkeypatch.setattr(argparse.ArgumentParser, "print_help", lambda parser, *args: (seen.append(parser), real(parser, *args)))
    assert text in help_of(main, capsys)
    (parser,) = seen
    shown = [action for action in parser._actions if action.default not in (None, False, [], argparse.SUPPRESS)]
    assert all(action.help for action in shown), [action.dest for action in shown if not action.help]
    if command not in ("train", "grpo_edit"):  # theirs are transformers' parsers
        assert isinstance(parser._get_formatter(), HelpFormatter) and "(default: None)" not in parser.format_help()


def test_goals_has_no_default_to_show(capsys: pytest.CaptureFixture[str]) -> None:
    assert "default" not in help_of(goals.main, capsys)


@pytest.mark.parametrize(("command", "flag"), [("train", "use_peft"), ("grpo_edit", "same_noise")])
def test_a_negation_says_what_it_turns_off(
    command: str, flag: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(f"{flag}: false\n")
    for flags in ([], ["--config", str(config)]):
        shown = help_of(lambda last, flags=flags: COMMANDS[command][0]([*flags, *last]), capsys)  # type: ignore[misc]
        assert f"Turns --{flag} off. --" in shown


def test_a_default_is_said_once_and_only_where_there_is_one() -> None:
    parser = argparse.ArgumentParser(formatter_class=HelpFormatter, description="Two\nlines.")
    parser.add_argument("--size", type=int, default=3, help="of it")
    parser.add_argument("--room", default="", help="for it (default: none)")
    parser.add_argument("--name", help="its name")
    parser.add_argument("--all", action="store_true", help="of them")
    lines = [" ".join(line.split()) for line in parser.format_help().splitlines()]
    assert "--size SIZE of it (default: 3)" in lines and "--room ROOM for it (default: none)" in lines
    assert "--name NAME its name" in lines and "--all of them" in lines and "Two" in lines and "lines." in lines
