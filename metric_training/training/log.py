"""What a user sees of a run: a bar with the time left, lines in log.jsonl, and a tracker."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from tqdm.auto import tqdm

from metric_training.training.state import LOG
from tpips_reward import TPIPSError
from tpips_reward.files import write_text


def check_tracker(name: str) -> None:
    """Refuses a tracker whose package is missing.

    Raises:
        TPIPSError: says what to install.
    """
    if name != "none" and find_spec(name) is None:
        raise TPIPSError(f"report_to {name} needs the package {name}; install it with pip install {name}.")


class Log:
    """Where the records of steps go; only the main process writes.

    Args:
        accelerator: of the run, whose trackers are used.
        folder: the output folder.
        start, steps: how many are done, and how many there are.
    """

    def __init__(self, accelerator: Accelerator, folder: Path, start: int, steps: int) -> None:
        self.accelerator, self.path = accelerator, folder / LOG
        self.bar = tqdm(total=steps, initial=start, disable=not accelerator.is_main_process, desc="training")
        if accelerator.is_main_process:
            _drop_later_lines(self.path, start)

    def step(self, record: dict[str, Any], write: bool) -> None:
        """Moves the bar on; ``write`` also writes the record."""
        self.bar.update()
        self.bar.set_postfix(loss=f"{record['loss']:.4f}", refresh=False)
        if not write:
            return
        self.accelerator.log({k: v for k, v in record.items() if k != "step"}, step=record["step"])
        if self.accelerator.is_main_process:
            with open(self.path, "a", encoding="utf-8") as log:
                log.write(json.dumps(record) + "\n")
            if "validation_agreement" in record:
                self.bar.write(json.dumps(record))

    def close(self) -> None:
        """Ends the bar and the trackers."""
        self.bar.close()
        self.accelerator.end_training()


def _drop_later_lines(path: Path, start: int) -> None:
    """Drops the lines of steps that a resumed run will do again."""
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() and start else []:
        try:
            if json.loads(line)["step"] <= start:
                kept.append(line)
        except ValueError:  # a kill cut the last line off; its step is done again
            break
    write_text(path, "".join(f"{line}\n" for line in kept))
