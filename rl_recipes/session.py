"""A run from its start, or from where it stopped, to its summary: iterations counted, files written, time kept."""

from __future__ import annotations

import logging
import shlex
import time
from typing import Any

import torch
from accelerate import Accelerator

from rl_recipes.checkpoints import latest_checkpoint, load_checkpoint, save_checkpoint
from rl_recipes.config import Arguments
from rl_recipes.editors import Editor
from rl_recipes.evaluation import Evaluation, compare, comparison_table, evaluate, setbacks
from rl_recipes.plots import save_curves, save_sample_grids
from rl_recipes.progress import Clock, Display
from rl_recipes.prompts import PromptSource
from rl_recipes.runs import RunError, RunFolder, disk_errors, write_json
from tpips_reward.rewards import TPIPSReward
from tpips_reward.scenes import render, to_tensor
from tpips_reward.stopping import Interrupted, StopSignal

log = logging.getLogger(__name__)


class Session:
    """The state of a run around its loop.

    Attributes:
        iteration: iterations that are done.
    """

    def __init__(
        self,
        args: Arguments,
        accelerator: Accelerator,
        folder: RunFolder,
        editor: Editor,
        optimizer: torch.optim.Optimizer,
        reward: TPIPSReward,
        held_out: PromptSource,
        num_held_out: int,
        clock: Clock,
        display: Display,
        stop: StopSignal,
    ) -> None:
        self.args, self.accelerator, self.folder, self.editor = args, accelerator, folder, editor
        self.optimizer, self.reward, self.held_out, self.num_held_out = optimizer, reward, held_out, num_held_out
        self.display, self.stop = display, stop
        self.clock = clock
        self.clock.limit = args.time_limit()
        self.iteration = 0
        self._saved = -1
        self._weights_are_between = False

    def restore(self) -> None:
        """With --resume, takes up the newest complete checkpoint; a run killed before its first one starts over."""
        if not self.args.grpo.resume:
            return
        path = latest_checkpoint(self.folder.checkpoints)
        if path is not None:
            self.iteration, extra = load_checkpoint(path, self.editor.transformer, self.optimizer)
            self._saved = self.iteration
            self.clock.earlier, self.clock.reserved = float(extra["seconds"]), float(extra["reserved"])
            if extra["data"] != self._data():
                raise RunError(
                    f"{self.args.grpo.data} or one of its images has changed since the checkpoint, and the run would not "
                    "be the same; put the old files back, or start anew in another --output_dir."
                )
            if extra["threads"] != torch.get_num_threads():
                log.warning(
                    "The run so far used %d CPU threads and now uses %d: results may differ in the last bits.",
                    extra["threads"], torch.get_num_threads(),
                )  # fmt: skip
        if self.accelerator.is_main_process:
            self.folder.rewind_metrics(self.iteration)
        self.accelerator.wait_for_everyone()
        self.display.say(f"Resuming {self.folder.path} after iteration {self.iteration}.")

    # The loop --------------------------------------------------------------------------------------------------------

    def goes_on(self) -> bool:
        """Whether one more iteration is to be run.

        Raises:
            Interrupted: when any process was asked to stop.
        """
        self.display.count("training", self.iteration, self.args.grpo.max_steps)
        stop, over = self._any_process(self.stop.requested, self.clock.is_over())
        if stop:
            raise Interrupted
        if self.iteration >= self.args.grpo.max_steps:
            return False
        if over:
            self.display.say(
                f"Training ends after iteration {self.iteration}, so that the run stays within "
                f"{self.clock.limit / 60:.1f} minutes (--max_minutes)."
            )
        return not over

    def weights_move(self) -> None:
        """Notes that the weights are between two iterations from now on, where no checkpoint may be taken."""
        self._weights_are_between = True

    def finish_iteration(self, line: dict[str, Any]) -> None:
        """Writes an iteration's line, shows it, and takes a checkpoint when it is time for one."""
        if self.accelerator.is_main_process:
            self.folder.append_metrics(line)
        self.iteration = line["iteration"]
        self._weights_are_between = False
        self.clock.note(line["seconds"])
        if self.args.grpo.report_to != "none":
            self.accelerator.log({k: v for k, v in line.items() if isinstance(v, float)}, step=self.iteration)
        left = self.args.grpo.max_steps - self.iteration
        self.display.iteration(line, self.clock.left_for(left, line["seconds"]) + self.clock.reserved)
        if self.iteration % self.args.grpo.save_steps == 0:
            self.save_checkpoint()

    def save_checkpoint(self) -> None:
        """Takes a checkpoint of the iterations that are done, unless there is one."""
        if self._saved == self.iteration:
            return
        if self.accelerator.is_main_process:
            save_checkpoint(
                self.folder.checkpoints,
                self.iteration,
                self.editor.transformer,
                self.optimizer,
                {
                    "seconds": self.clock.elapsed(),
                    "reserved": self.clock.reserved,
                    "threads": torch.get_num_threads(),
                    "data": self._data(),
                },
                self.args.grpo.save_total_limit,
                also=self.editor.save_lora,
            )
        self._saved = self.iteration

    def stopped(self) -> str:
        """What to tell the user whose run was interrupted."""
        done = (
            f"The last checkpoint is of iteration {self._saved}." if self._saved > 0 else "There is no checkpoint yet."
        )
        return (
            f"Stopped. {done} The same command with --resume goes on from there:\n"
            f"  accelerate launch rl_recipes/grpo_edit.py --resume --output_dir {shlex.quote(self.args.grpo.output_dir)}"
        )

    def _data(self) -> str:
        """The fingerprint of the user's data; empty for procedural edits."""
        return getattr(self.held_out, "fingerprint", "")

    def save_after_error(self) -> None:
        """Keeps what is done when a run stops early; never hides the error that stopped it."""
        if self._weights_are_between or self.iteration == 0:
            return
        try:
            self.save_checkpoint()
        except RunError as error:
            log.warning("No checkpoint could be taken: %s", error)

    # Before and after ------------------------------------------------------------------------------------------------

    def evaluate(self, name: str) -> Evaluation:
        """Evaluates the editor as it is now."""
        total = -(-self.num_held_out // self.accelerator.num_processes)
        start = time.perf_counter()
        self.display.count(f"evaluation {name}", 0, total)

        def progress(done: int) -> None:
            self.display.count(f"evaluation {name}", done, total)
            self.stop.check()

        result = evaluate(
            self.editor,
            self.reward,
            self.held_out,
            self.num_held_out,
            self.args,
            self.accelerator,
            self.folder,
            name,
            progress,
        )
        result.seconds = time.perf_counter() - start
        self.clock.reserved = 1.1 * result.seconds
        return result

    def evaluate_before(self) -> Evaluation:
        """Evaluates the editor without its adapter, once in the life of a run."""
        kept = Evaluation.load(self.folder.path) if self.args.grpo.resume else None
        if kept is not None:
            if self._saved < 0:  # no checkpoint says what has been used
                self.clock.earlier, self.clock.reserved = kept.seconds, 1.1 * kept.seconds
            return kept
        with self.editor.disable_lora():
            result = self.evaluate("before")
        if self.accelerator.is_main_process:
            result.save(self.folder.path)
        return result

    def finish(self, before: Evaluation, after: Evaluation, ran: dict[str, Any]) -> None:
        """Writes adapter, grids, curves and summary, and prints the before/after table."""
        if not self.accelerator.is_main_process:
            return
        self.display.close()
        path = self.folder.path
        with disk_errors(path / "adapter"):
            self.editor.save_lora(path / "adapter")
        self._draw(before, after)
        save_curves(path / "curves.png", self.folder.read_metrics())
        warnings = setbacks(before, after)
        summary = {
            "before": before.means(),
            "after": after.means(),
            "difference": compare(before, after),
            "by_kind": {"before": before.by_kind(), "after": after.by_kind()},
            "evaluated": len(after.rows),
            "held_out": self.args.grpo.data is None,
            "iterations": self.iteration,
            "seconds": self.clock.elapsed(),
            "warnings": warnings,
            "bad_rows": [{"line": line, "reason": reason} for line, reason in getattr(self.held_out, "bad", [])],
            **ran,
        }
        write_json(path / "summary.json", summary)
        if after.rows:
            title = "held-out edits" if self.args.grpo.data is None else "edits of --data, which were trained on"
            self.display.say(comparison_table(before, after, title))
        for warning in warnings:
            self.display.say(f"Look at the grids: {warning}", style="yellow")
        self.display.say(
            f"{self.iteration} iterations, {self.clock.elapsed() / 60:.1f} minutes. Adapter, grids and curves: {path}"
        )

    def _draw(self, before: Evaluation, after: Evaluation) -> None:
        # By key: a photograph that went missing between the two has no partner.
        earlier, later = before.images_by_key(), after.images_by_key()
        count = min(self.args.grpo.sample_grids, self.num_held_out)
        prompts = {p.key: p for p in (self.held_out[i] for i in range(count)) if p.key in earlier and p.key in later}
        save_sample_grids(
            self.folder.path / "samples",
            [self.editor.fit(p.image).cpu() for p in prompts.values()],
            [earlier[key] for key in prompts],
            [later[key] for key in prompts],
            [to_tensor(render(p.edit.ideal, later[key].shape[-1])) if p.edit else None for key, p in prompts.items()],
            [p.instruction for p in prompts.values()],
        )

    def _any_process(self, *flags: bool) -> tuple[bool, ...]:
        """Whether each flag is set in any process; all processes get the same answer."""
        if self.accelerator.num_processes == 1:
            return flags
        mine = torch.tensor([float(flag) for flag in flags], device=self.accelerator.device)
        return tuple(bool(total > 0) for total in self.accelerator.reduce(mine, reduction="sum"))
