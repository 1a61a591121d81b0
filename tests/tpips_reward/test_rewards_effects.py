"""What the gate does on the built-in metric: copy, black, noise and another image against a true edit."""

from pathlib import Path

import pytest
import torch
from fake_metrics import ChannelMetric, ConstantMetric

from tpips_reward.checkpoints import load_metric
from tpips_reward.errors import TPIPSError
from tpips_reward.rewards.effects import (
    BEGIN,
    COLUMNS,
    CONTROLS,
    END,
    main,
    markdown_table,
    measure_change_scale,
    measure_effects,
    replace_between_marks,
)

DOCUMENT = Path(__file__).parents[2] / "docs" / "rewards.md"

CHEATS = ("copy of the source", "another image", "black", "noise")


@pytest.fixture(scope="module")
def table():
    return measure_effects(load_metric("builtin:late", device="cpu"), samples=48, seed=1)


@pytest.mark.parametrize("column", ["tpips:preserve", "tpips:edit"])
@pytest.mark.parametrize("cheat", CHEATS)
def test_a_true_edit_is_worth_more_than_any_cheat(table, column, cheat):
    assert table["true edit"][column] > table[cheat][column] + 0.1
    wins = "wins" if column == "tpips:preserve" else "wins (edit)"
    assert table[cheat][wins] >= 0.9


@pytest.mark.parametrize("column", ["p", "tpips:preserve", "tpips:edit"])
def test_drift_in_other_aspects_costs(table, column):
    assert table["true edit, drifted"][column] < table["true edit"][column] - 0.005
    assert column == "p" or table["true edit, drifted"]["wins" if column == "tpips:preserve" else "wins (edit)"] > 0.85


def test_without_the_gate_copying_is_the_best_that_one_can_do(table):
    assert table["copy of the source"]["p"] == pytest.approx(1.0, abs=1e-4)
    assert all(table["copy of the source"]["p"] > values["p"] for row, values in table.items() if row[:4] != "copy")


def test_with_the_gate_a_copy_is_worth_nothing(table):
    for column in ("t", "g", "tpips:preserve", "tpips:edit"):
        assert table["copy of the source"][column] == pytest.approx(0.0, abs=1e-3)


def test_the_default_threshold_lets_true_edits_pass(table):
    assert table["true edit"]["g"] > 0.75


def test_the_command_prints_the_table(capsys):
    assert main(["--samples", "4"]) == 0
    printed = capsys.readouterr().out
    assert "`builtin:late`, 4 held-out procedural edits" in printed and all(row in printed for row in CONTROLS)


def test_the_document_holds_the_table():
    block = DOCUMENT.read_text(encoding="utf-8").partition(BEGIN)[2].partition(END)[0]
    measured = measure_effects(load_metric("builtin:late", device="cpu"), samples=64, seed=0)
    rows = {line.split("|")[1].strip(): line.split("|")[2:-1] for line in block.splitlines() if line.startswith("| ")}
    for name, values in measured.items():
        assert [float(cell) for cell in rows[name]] == pytest.approx(list(values.values()), abs=0.02)


def test_change_scale_is_the_measured_one():
    metric = load_metric("builtin:late", device="cpu")
    assert metric.change_scale == pytest.approx(measure_change_scale(metric), rel=0.02)


class RedMetric(ChannelMetric):
    """Compares the red channel, whatever the aspect."""

    def similarity_pairs(self, images, references, pairs, **options):
        return super().similarity_pairs(images, references, [(i, j, "red") for i, j, _ in pairs], **options)


def test_effects_on_a_metric_with_known_answers():
    table = measure_effects(RedMetric(change_scale=0.1), samples=6, size=16)
    assert list(table) == list(CONTROLS) and all(list(row) == list(COLUMNS) for row in table.values())
    copy = table["copy of the source"]
    assert (copy["p"], copy["t"], copy["g"], copy["tpips:preserve"], copy["tpips:edit"]) == (1, 0, 0, 0, 0)
    assert table["true edit"]["wins"] == 0  # nothing is above itself
    for row in table.values():  # this metric sees one number in every aspect
        assert row["p"] == pytest.approx(1 - row["t"])
        assert row["tpips:preserve"] == pytest.approx(row["p"] - (1 - row["g"]), abs=1e-6)


class RampMetric(ConstantMetric):
    """Similarities 0, 1/4, 1/2 ... in the order of the pairs, whatever they are."""

    def similarity_pairs(self, images, references, pairs, **options):
        return torch.linspace(0, 1, len(pairs))


def test_change_scale_is_a_third_of_the_median_change():
    assert measure_change_scale(ConstantMetric(0.75), samples=5, size=16) == pytest.approx(0.25 / 3)
    # Changes 1, 0.9, ... 0.
    assert measure_change_scale(RampMetric(0.0), samples=11, size=16) == pytest.approx(0.5 / 3)


def test_replace_between_marks():
    text = f"a {BEGIN} old {END} b"
    assert replace_between_marks(text, "new") == f"a {BEGIN}\n\nnew\n\n{END} b"
    for broken in ("a", f"a {BEGIN}", f"{END} {BEGIN}"):
        with pytest.raises(TPIPSError, match="no place for the table"):
            replace_between_marks(broken, "new")


def test_the_command_names_what_it_cannot_load(capsys):
    assert main(["--metric", "builtin:never"]) == 2
    assert main(["--samples", "0"]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and "builtin:never" in printed.err and "--samples 0" in printed.err


def test_markdown_table():
    numbers = dict.fromkeys(COLUMNS, 0.12345)
    lines = markdown_table({"copy": numbers}).splitlines()
    assert lines[-1] == "| copy | " + " | ".join(["0.123"] * len(COLUMNS)) + " |"
    assert all(line.count("|") == len(COLUMNS) + 2 for line in lines)
