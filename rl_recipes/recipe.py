"""What every recipe's script does around its loop: settings read, parts built, a run begun, ended or stopped cleanly."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from rl_recipes import building, hub
from rl_recipes.config import Algorithm, Arguments
from rl_recipes.job import Job
from rl_recipes.parsing import parse_arguments
from rl_recipes.progress import Clock, Display
from rl_recipes.runs import DivergedError, RunError
from rl_recipes.session import Session
from rl_recipes.weights import MovingAverage
from tpips_reward.errors import BAD_INPUT, INTERRUPTED, exit_on_errors, reason
from tpips_reward.stopping import Interrupted, StopSignal


def run_recipe(
    algorithm: type[Algorithm],
    train: Callable[[Session], None],
    argv: Sequence[str] | None,
    clock: Clock | None,
    check: Callable[[Session], None] = lambda session: None,
) -> int:
    """Reads flags, runs the recipe, and turns errors that the user can mend into one line.

    Args:
        algorithm: the dataclass of its own settings.
        train: its loop, which is given a session that has begun.
        argv: flags; None for those of the command line.
        check: called before the first evaluation; raises a TPIPSError where the loop could not work.

    Returns:
        the exit code: 2 for bad input, 130 when it was interrupted.
    """
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    try:
        with exit_on_errors(), _memory_errors():
            args = parse_arguments(sys.argv[1:] if argv is None else argv, algorithm)
            return _run(args, train, clock or Clock(), check)
    except SystemExit as end:
        for code in (BAD_INPUT, INTERRUPTED):
            if end.code == code:
                return code
        raise  # --help


@contextmanager
def _memory_errors() -> Iterator[None]:
    """Turns a device that is full, while the editor is loaded or later, into one sentence.

    Raises:
        RunError: in place of PyTorch's error.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise RunError(
            f"The device's memory is full ({reason(error, 150)}); less is needed with --gradient_checkpointing true and "
            "--offload_text_encoders true, also by --resume, and in a new run with --samples_per_batch 1, a lower "
            "--resolution, or weights that GPUs share (docs/scaling.md)."
        ) from error


def _run(
    args: Arguments, train: Callable[[Session], None], clock: Clock, check: Callable[[Session], None]
) -> int:
    hub.check_login(args)
    accelerator = building.build_accelerator(args)
    folder = building.find_folder(args, accelerator)
    reward = building.build_reward(args, accelerator.device)
    judge = building.build_judge(args, accelerator.device)
    building.check_judge(judge, reward, args.reward)
    editor, optimizer = building.build_editor(args, accelerator)
    prompts, held_out, num_held_out = building.build_prompts(args, editor, reward, judge)
    stop = StopSignal(alone=accelerator.num_processes == 1)
    display = Display(args.run.max_steps, enabled=accelerator.is_main_process)
    average = MovingAverage(editor.lora_parameters(), args.ema_decay()) if args.ema_decay() else None
    job = Job(args, accelerator, folder, editor, optimizer, reward, stop, average)
    session = Session(job, prompts, held_out, num_held_out, judge, clock, display)
    claimed = False
    with folder, stop, display:
        try:
            building.check_folder(folder, args, accelerator)
            check(session)
            local = args.run.report_to == "tensorboard"  # writes to the folder, which must be this run's by then
            if not local:
                building.start_trackers(args, accelerator)
            building.claim_folder(folder, args, accelerator)
            claimed = True
            if local:
                building.start_trackers(args, accelerator)
            session.restore()
            before = session.evaluate_before()
            train(session)
            session.save_checkpoint()
            session.finish(before, session.evaluate_after(before))
        except (Interrupted, KeyboardInterrupt) as stopped:
            session.save_after_error(agreed=isinstance(stopped, Interrupted))
            display.say(session.stopped() if claimed else "Stopped. Nothing was begun, and nothing is changed.")
            return INTERRUPTED
        except DivergedError:
            raise
        except Exception:
            session.save_after_error()
            raise
        finally:
            building.end_trackers(accelerator)
    return 0
