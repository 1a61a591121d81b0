"""Ctrl-C and SIGTERM while two real processes evaluate: both stop, and the run goes on from its checkpoint."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from two_processes import run_two

# Signals come to the processes of some ranks while they score the first batch of an evaluation.
SCRIPT = """
import signal
from rl_recipes import evaluation
original = evaluation.score
run, *flags = sys.argv[1:]

def train(flags, where, number, ranks):
    def score(*args):
        if where and args[4].startswith(where) and os.environ["RANK"] in ranks:
            os.kill(os.getpid(), number)
        return original(*args)
    evaluation.score = score
    return grpo_edit.main(flags)

again = ["--resume", f"--output_dir={run}"]
# A scheduler's SIGTERM reaches one process; there is nothing to keep yet.
assert train(flags, "evaluation_before", signal.SIGTERM, "1") == 130
assert not os.path.exists(f"{run}/before.json")
# Ctrl-C reaches both, after the training.
assert train(again, "evaluation_after", signal.SIGINT, "01") == 130
assert os.path.exists(f"{run}/checkpoints/step_000001/manifest.json") and not os.path.exists(f"{run}/summary.json")
assert train(again, None, None, "") == 0
"""


@pytest.mark.slow
def test_two_processes_stop_in_an_evaluation_and_go_on(flags: Callable[..., list[str]], tmp_path: Path) -> None:
    run = tmp_path / "run"
    (code, out, errors), (other, _, others_errors) = run_two(
        SCRIPT, str(run), *flags(run, max_steps=1, eval_samples=4, samples_per_batch=1, sample_grids=1)
    )
    assert code == other == 0, errors[-2000:] + others_errors[-2000:]
    assert "There is no checkpoint yet" in out and "The last checkpoint is of iteration 1" in out
    assert (errors.count("Stopping: "), others_errors.count("Stopping: ")) == (1, 2)
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["iterations"], summary["processes"], summary["evaluated"]) == (1, 2, 4)
