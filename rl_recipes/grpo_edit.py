"""Flow-GRPO for image editors, rewarded by TPIPS.

    accelerate launch rl_recipes/grpo_edit.py --reward tpips:preserve
    accelerate launch rl_recipes/grpo_edit.py --data edits.jsonl --editor Qwen/Qwen-Image-Edit-2511
        --metric released:late

An iteration samples a group of edits for each of a few (source, instruction) pairs, scores them, and raises the
likelihood of those that scored above their group's mean (Flow-GRPO; rl_recipes/algorithms has the formulas). Only a
LoRA is trained.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence

from rl_recipes import building, grpo
from rl_recipes.config import Arguments, parse_arguments
from rl_recipes.progress import Clock, Display, PhaseTimer
from rl_recipes.reporting import report
from rl_recipes.runs import DivergedError
from rl_recipes.session import Session
from tpips_reward.errors import TPIPSError
from tpips_reward.stopping import Interrupted, StopSignal


def train(args: Arguments, clock: Clock) -> int:
    """Runs the job that the settings describe; returns the exit code (130 when it was interrupted)."""
    accelerator = building.build_accelerator(args)
    folder = building.check_folder(args, accelerator)
    reward = building.build_reward(args, accelerator.device)
    editor, optimizer = building.build_editor(args, accelerator.device)
    prompts, held_out, num_held_out = building.build_prompts(args, editor, reward)
    stop = StopSignal(alone=accelerator.num_processes == 1)
    display = Display(args.grpo.max_steps, enabled=accelerator.is_main_process)
    session = Session(
        args, accelerator, folder, editor, optimizer, reward, held_out, num_held_out, clock, display, stop
    )
    with folder, stop, display:
        try:
            building.claim_folder(folder, args, accelerator)
            building.start_trackers(args, accelerator)
            session.restore()
            before = session.evaluate_before()
            while session.goes_on():
                iteration = session.iteration + 1
                timer = PhaseTimer(accelerator.device.type)
                drawn = grpo.draw_prompts(prompts, iteration, args, accelerator)
                batches = [
                    grpo.collect(editor, reward, part, iteration, args, folder, accelerator, timer, stop)
                    for part in grpo.make_batches(drawn, editor, args)
                ]
                grpo.assign_advantages(batches, args, accelerator)
                moved = grpo.update(
                    editor, optimizer, batches, iteration, args, accelerator, timer, session.weights_move
                )
                session.finish_iteration({"iteration": iteration, **report(batches), **moved, **timer.report()})
            session.save_checkpoint()
            session.finish(before, session.evaluate("after"), building.describe(args, editor, reward, accelerator))
        except (Interrupted, KeyboardInterrupt):
            session.save_after_error()
            display.say(session.stopped())
            return 130
        except DivergedError:
            raise
        except Exception:
            session.save_after_error()
            raise
        finally:
            accelerator.end_training()
    return 0


def main(argv: Sequence[str] | None = None, clock: Clock | None = None) -> int:
    """Reads flags, trains, and turns errors that the user can mend into one line."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
    try:
        return train(parse_arguments(sys.argv[1:] if argv is None else argv), clock or Clock())
    except TPIPSError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("Stopped before the run began.", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main(clock=Clock.since_process_start()))
