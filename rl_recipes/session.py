"""A run from its start, or from where it stopped, to its summary: iterations counted, files written, time kept."""

from __future__ import annotations

import copy
import logging
import shlex
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Protocol

import torch
from accelerate.utils import gather_object

from rl_recipes import html_report, hub
from rl_recipes.building import describe
from rl_recipes.checkpoints import latest_checkpoint, load_checkpoint, save_checkpoint
from rl_recipes.collecting import Draw, Edits, draw_edits, fitted_source, make_batches
from rl_recipes.drawing import PromptQueue
from rl_recipes.evaluation import Evaluation, compare, comparison_table, evaluate, setbacks
from rl_recipes.job import Iteration, Job, any_process
from rl_recipes.plots import save_curves, save_sample_grids
from rl_recipes.progress import Clock, Display, PhaseTimer
from rl_recipes.prompts import JSONLPrompts, PromptSource
from rl_recipes.reporting import edit_rows, summarise_rows
from rl_recipes.rewards import Rewards
from rl_recipes.runs import RunError, disk_errors, write_json
from rl_recipes.shares import are_shared
from rl_recipes.watching import Watch
from rl_recipes.weights import ShadowWeights
from rl_recipes.zero import ZeroOptimizer, whole
from tpips_reward.errors import TPIPSError, reason
from tpips_reward.scenes import render, to_tensor
from tpips_reward.stopping import Interrupted

log = logging.getLogger(__name__)


class Stateful(Protocol):
    """What a checkpoint keeps beside weights and optimizer: plain values and tensors."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any], /) -> None: ...


class Session:
    """The state of a run around its loop.

    Args:
        job: what the run is made of.
        prompts: those to train on.
        held_out: those to evaluate on, of which the first ``num_held_out`` are used.
        judge: measured beside the reward, or None.

    Attributes:
        iteration: iterations that are done.
    """

    def __init__(
        self,
        job: Job,
        prompts: PromptSource,
        held_out: PromptSource,
        num_held_out: int,
        judge: Rewards | None,
        clock: Clock,
        display: Display,
    ) -> None:
        self.job, self.held_out, self.num_held_out, self.judge = job, held_out, num_held_out, judge
        self.display, self.clock = display, clock
        self.clock.limit = job.args.time_limit()
        self.iteration = 0
        self.queue = PromptQueue(prompts, skip=job.args.run.skip_saturated, top=job.args.run.saturated_at)
        self.watch = Watch()
        self._kept: dict[str, Stateful] = {"queue": self.queue, "watch": self.watch}
        if job.average is not None:
            self._kept["average"] = job.average
        self._restored: dict[str, Any] = {}
        self._ended: dict[str, Any] = {}  # states of what is kept, at the end of the last iteration
        self._saved = -1
        self._untracked = False

    def keep(self, name: str, part: Stateful) -> None:
        """Lets checkpoints keep the state of ``part``, and gives it the state of the one that was restored.

        Raises:
            RunError: when the checkpoint does not have it.
        """
        self._kept[name] = part
        if self._saved >= 0:
            self._load(name, part)

    def _load(self, name: str, part: Stateful) -> None:
        if name not in self._restored:
            raise RunError(f"The checkpoint has no {name!r}; it is of another version: start anew with --overwrite.")
        part.load_state_dict(self._restored[name])

    def restore(self) -> None:
        """With --resume, takes up the newest complete checkpoint; a run killed before its first one starts over."""
        run = self.job.args.run
        if not run.resume:
            return
        path = latest_checkpoint(self.job.folder.checkpoints)
        if path is not None:
            with whole(self.job.optimizer):
                self.iteration, extra = load_checkpoint(path, self.job.editor.transformer, self.job.optimizer)
            self._saved = self.iteration
            self.clock.earlier, self.clock.reserved = float(extra["seconds"]), float(extra["reserved"])
            self._restored = extra["kept"]
            for name, part in self._kept.items():
                self._load(name, part)
            if extra["data"] != self._data():
                raise RunError(
                    f"{' or '.join(filter(None, (run.data, run.eval_data)))}, or one of their images, has changed since the "
                    "checkpoint, and the run would not be the same; put the old files back, or start anew in another "
                    "--output_dir."
                )
            if extra["threads"] != torch.get_num_threads():
                log.warning(
                    "The run so far used %d CPU threads and now uses %d: results may differ in the last bits.",
                    extra["threads"], torch.get_num_threads(),
                )  # fmt: skip
        if self.job.accelerator.is_main_process:
            self.job.folder.rewind_metrics(self.iteration)
        self.job.accelerator.wait_for_everyone()
        self.display.say(f"Resuming {self.job.folder.path} after iteration {self.iteration}.")

    # The loop --------------------------------------------------------------------------------------------------------

    def iterations(self) -> Iterator[Iteration]:
        """The iterations that are still to be run, until they are done, time is up, or a sign says to stop.

        Raises:
            Interrupted: when any process was asked to stop.
        """
        while self._goes_on():
            yield Iteration(self.iteration + 1, PhaseTimer(self.job.accelerator.device.type))

    def _goes_on(self) -> bool:
        run = self.job.args.run
        self.display.count("training", self.iteration, run.max_steps)
        stop, over = any_process(self.job.accelerator, self.job.stop.requested, self.clock.is_over())
        if stop:
            raise Interrupted
        if self.iteration >= run.max_steps:
            return False
        if run.stop_on_hack and self.watch.fooled:
            self.display.say(f"Training ends after iteration {self.iteration} (--stop_on_hack).")
            return False
        if over:
            self.display.say(
                f"Training ends after iteration {self.iteration}, so that the run stays within "
                f"{self.clock.limit / 60:.1f} minutes (--max_minutes)."
            )
        return not over

    def draw(self, step: Iteration) -> list[list[Draw]]:
        """This process's edits of an iteration, in the batches that go through the editor together."""
        positions = self.queue.take(step.number, self.job.args.run.prompts_per_iteration)
        return make_batches(self.job, draw_edits(self.job, self.queue.source, positions))

    def finish_iteration(self, step: Iteration, batches: Sequence[Edits], moved: dict[str, float]) -> None:
        """Writes an iteration's line, shows it, looks for signs, and takes a checkpoint when it is time for one."""
        rows = edit_rows(batches, self.judge)
        line = {"iteration": step.number, **summarise_rows(rows, self.job.reward.weights), **moved, **step.timer.report()}
        if self.job.accelerator.is_main_process:
            self.job.folder.append_metrics(line)
        self.queue.note([row["key"] for row in rows], [row["score"] for row in rows])
        for sentence in self.watch.look({**line, "saturated": float(self.queue.exhausted())}):
            self.display.say(f"Warning, iteration {step.number}: {sentence}", style="yellow")
        # A run that is stopped within the next iteration has taken prompts and rewards from it, and will do so again.
        # The second sets of weights move with the weights alone.
        plain = {name: part.state_dict() for name, part in self._kept.items() if not isinstance(part, ShadowWeights)}
        self._ended = copy.deepcopy(plain)
        self.iteration = step.number
        self.job.weights_are_between = False
        self.clock.note(line["seconds"])
        run = self.job.args.run
        if run.report_to != "none":
            self.track({k: v for k, v in line.items() if isinstance(v, float)})
        left = run.max_steps - self.iteration
        self.display.iteration(line, self.clock.left_for(left, line["seconds"]) + self.clock.reserved)
        if self.iteration % run.save_steps == 0:
            self.save_checkpoint()

    def track(self, values: dict[str, float]) -> None:
        """Hands an iteration's numbers to the tracker, whose failure must not cost the run: all of them are in metrics.jsonl."""
        try:
            self.job.accelerator.log(values, step=self.iteration)
        except Exception as error:  # noqa: BLE001  each tracker has errors of its own
            if not self._untracked:
                log.warning("The tracker failed, and training goes on without it: %s", reason(error))
            self._untracked = True

    def save_checkpoint(self) -> None:
        """Takes a checkpoint of the iterations that are done, unless there is one."""
        if self._saved == self.iteration:
            return
        with whole(self.job.optimizer, moments=True):
            if self.job.accelerator.is_main_process or self._shares_weights():
                self._write_checkpoint()
        self._saved = self.iteration

    def _shares_weights(self) -> bool:
        """Whether no process has the trained weights whole, so that all of them have to take part where they are written."""
        return are_shared(self.job.editor.lora_parameters())

    def _write_checkpoint(self) -> None:
        job = self.job
        extra = {
            "seconds": self.clock.elapsed(),
            "reserved": self.clock.reserved,
            "threads": torch.get_num_threads(),
            "data": self._data(),
            "kept": {n: self._ended[n] if n in self._ended else part.state_dict() for n, part in self._kept.items()},
        }
        # All weights are in the checkpoint already; an adapter is written in the layout of pipelines too.
        also = self._save_adapter if job.args.editor.train == "lora" else lambda folder: None
        limit = job.args.run.save_total_limit
        save_checkpoint(
            job.folder.checkpoints, self.iteration, job.editor.transformer, job.optimizer, extra, limit, also,
            writes=job.accelerator.is_main_process,
        )  # fmt: skip

    def _save_adapter(self, folder: Path) -> None:
        with self._final_weights():
            self.job.editor.save_lora(folder)

    def _final_weights(self) -> Any:
        """The weights that are evaluated and handed out: the moving average where there is one."""
        return nullcontext() if self.job.average is None else self.job.average.swapped()

    def stopped(self) -> str:
        """What to tell the user whose run was interrupted."""
        done = (
            f"The last checkpoint is of iteration {self._saved}." if self._saved > 0 else "There is no checkpoint yet."
        )
        return (
            f"Stopped. {done} The same command with --resume goes on from there:\n"
            f"  accelerate launch rl_recipes/{self.job.args.algorithm.recipe}.py --resume --output_dir "
            f"{shlex.quote(self.job.args.run.output_dir)}"
        )

    def _data(self) -> str:
        """The fingerprints of the user's files; empty for procedural edits."""
        found = [getattr(source, "fingerprint", "") for source in (self.queue.source, self.held_out)]
        return " ".join(dict.fromkeys(filter(None, found)))

    def _bad_rows(self) -> list[tuple[str, int, str]]:
        """(file, line, reason) of each row of the user's files that this process has skipped."""
        files = [source for source in (self.queue.source, self.held_out) if isinstance(source, JSONLPrompts)]
        return [(str(source.path), line, reason) for source in files for line, reason in source.bad]

    def save_after_error(self, agreed: bool = False) -> None:
        """Keeps what is done when a run stops early; never hides the error that stopped it.

        Args:
            agreed: all processes stop, so that those which share weights can gather them.
        """
        if self.job.weights_are_between or self.iteration == 0:
            return
        if (isinstance(self.job.optimizer, ZeroOptimizer) or self._shares_weights()) and not agreed:
            return
        try:
            self.save_checkpoint()
        except RunError as error:
            log.warning("No checkpoint could be taken: %s", error)

    # Before and after ------------------------------------------------------------------------------------------------

    def evaluate(self, name: str) -> Evaluation:
        """Evaluates the editor as it is now."""
        total = -(-self.num_held_out // self.job.accelerator.num_processes)
        start = time.perf_counter()
        self.display.count(f"evaluation {name}", 0, total)
        result = evaluate(
            self.job,
            self.held_out,
            self.num_held_out,
            name,
            lambda done: self.display.count(f"evaluation {name}", done, total),
        )
        result.seconds = time.perf_counter() - start
        self.clock.reserved = 1.1 * result.seconds
        return result

    def evaluate_before(self) -> Evaluation:
        """Evaluates the editor without its adapter, once in the life of a run."""
        folder = self.job.folder.path
        kept = Evaluation.load(folder) if self.job.args.run.resume else None
        if kept is not None:
            if self._saved < 0:  # no checkpoint says what has been used
                self.clock.earlier, self.clock.reserved = kept.seconds, 1.1 * kept.seconds
            return kept
        with self.job.editor.disable_lora():
            result = self.evaluate("before")
        if self.job.accelerator.is_main_process:
            result.save(folder)
        return result

    def evaluate_after(self, before: Evaluation) -> Evaluation:
        """Evaluates the trained editor; `before` where there was no time to train."""
        if self.iteration == 0:
            self.display.say(
                "Nothing was trained: --max_steps is 0, or the evaluation before took up the run's time (raise "
                "--max_minutes, or lower --eval_samples).",
                style="yellow",
            )
            return before
        with self._final_weights():
            return self.evaluate("after")

    def finish(self, before: Evaluation, after: Evaluation) -> None:
        """Writes adapter, grids, curves, summary and report, and prints the before/after table."""
        job = self.job
        path = job.folder.path
        # Each process finds broken photographs among those that it draws.
        bad = sorted(set(gather_object(self._bad_rows())))
        with whole(job.optimizer), disk_errors(path / "adapter"):
            if job.accelerator.is_main_process or self._shares_weights():
                self._save_adapter(path / "adapter")
        if not job.accelerator.is_main_process:
            return
        self.display.close()
        grids = self._draw(before, after)
        lines = job.folder.read_metrics()
        save_curves(path / "curves.png", lines)
        warnings = [f"{sentence} (during training)" for sentence in self.watch.found.values()]
        warnings += setbacks(before, after)
        silent = sum("judge" not in line for line in lines) if self.judge is not None else 0
        if silent:
            warnings.append(
                f"--judge said nothing in {silent} of {len(lines)} iterations, and what it would have said of the reward in them is "
                "not known"
            )
        summary = {
            "before": before.means(),
            "after": after.means(),
            "difference": compare(before, after),
            "by_kind": {"before": before.by_kind(), "after": after.by_kind()},
            "evaluated": len(after.rows),
            "held_out": job.args.held_out(),
            "iterations": self.iteration,
            "seconds": self.clock.elapsed(),
            "warnings": warnings,
            "saturated": sorted(self.queue.saturated()) if job.args.run.skip_saturated else [],
            "bad_rows": [{"file": file, "line": line, "reason": reason} for file, line, reason in bad],
            **describe(job),
        }
        write_json(path / "summary.json", summary)
        html_report.write(path / "report.html", summary, job.args.to_dict(), before, after, lines, grids)
        if after.rows:
            title = "held-out edits" if job.args.held_out() else "edits of --data, which were trained on"
            self.display.say(comparison_table(before, after, title))
        for warning in warnings:
            self.display.say(f"Look at the grids: {warning}", style="yellow")
        self.display.say(
            f"{self.iteration} iterations, {self.clock.elapsed() / 60:.1f} minutes. Adapter, grids, curves and "
            f"report.html: {path}"
        )
        if job.args.run.push_to_hub:
            try:
                self.display.say(f"Uploaded to {hub.push(path, summary, job.args)}")
            except TPIPSError as error:  # the run itself is done and on the disk
                self.display.say(f"Not uploaded: {error}", style="yellow")

    def _draw(self, before: Evaluation, after: Evaluation) -> list[Path]:
        # By key: a photograph that went missing between the two has no partner.
        earlier, later = before.images_by_key(), after.images_by_key()
        count = min(self.job.args.run.sample_grids, self.num_held_out)
        prompts = {p.key: p for p in (self.held_out[i] for i in range(count)) if p.key in earlier and p.key in later}
        return save_sample_grids(
            self.job.folder.path / "samples",
            [fitted_source(self.job.editor, p).cpu() for p in prompts.values()],
            [earlier[key] for key in prompts],
            [later[key] for key in prompts],
            [to_tensor(render(p.edit.ideal, later[key].shape[-1])) if p.edit else None for key, p in prompts.items()],
            [p.instruction for p in prompts.values()],
            [[_captions(evaluation, key) for evaluation in (before, after)] for key in prompts],
        )


def _captions(evaluation: Evaluation, key: str) -> list[str]:
    """The scores of an edit by aspect, a line each."""
    row = next(row for row in evaluation.rows if row["key"] == key)
    return [f"{name} {value:.2f}" for values in row["aspects"].values() for name, value in values.items()]
