"""What the recipes cost: work outside the models, one iteration of an editor of any size, and memory of backpropagation.

    python tests/benchmarks/recipes.py overhead                        share of an iteration outside the models
    python tests/benchmarks/recipes.py iteration --size tiny           seconds by phase and peak memory, random weights
    python tests/benchmarks/recipes.py iteration --size real --editor kontext      the same on one GPU
    python tests/benchmarks/recipes.py memory                          peak of backpropagation by K, kept and recomputed
    python tests/benchmarks/recipes.py plan                            the numbers of docs/scaling.md, by formula

Run with one thread (OMP_NUM_THREADS=1) to compare figures.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

sys.path.insert(0, str(Path(__file__).parents[1] / "rl_recipes"))
from real_sizes import EDITORS, build, real_parts

from rl_recipes import backprop, building, grpo
from rl_recipes.collecting import draw_edits, make_batches
from rl_recipes.config import BackpropArguments, GRPOArguments
from rl_recipes.editors import Editor
from rl_recipes.job import Iteration, Job
from rl_recipes.parsing import parse_arguments
from rl_recipes.progress import PhaseTimer
from rl_recipes.prompts import ProceduralPrompts
from rl_recipes.reporting import edit_rows, summarise_rows
from rl_recipes.rewards import Rewards
from rl_recipes.runs import RunFolder
from rl_recipes.seeds import ADAPTER, generator
from tpips_reward.stopping import StopSignal

#: The goal of `overhead`: at most this share of an iteration outside the models.
MOST_OVERHEAD = 0.10


class ModelTime:
    """Seconds inside models: calls of wrapped functions, one inside another counted once."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._depth = 0

    def wrap(self, owner: Any, method: str, name: str) -> None:
        """Counts what `owner.method` takes under `name`."""
        original: Callable[..., Any] = getattr(owner, method)

        def timed(*args: Any, **kwargs: Any) -> Any:
            self._depth += 1
            begin = time.perf_counter()
            try:
                return original(*args, **kwargs)
            finally:
                _wait()
                self._depth -= 1
                if not self._depth:
                    self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - begin

        setattr(owner, method, timed)


def overhead(options: argparse.Namespace) -> None:
    """One warm iteration of grpo_edit's built-in job; its line, report and logging included."""
    args = parse_arguments(["--threads", "1"], GRPOArguments)
    accelerator = building.build_accelerator(args)
    editor, optimizer = building.build_editor(args, accelerator)
    reward = building.build_reward(args, accelerator.device)
    models = ModelTime()
    for owner, method, name in (
        (editor.transformer, "forward", "transformer"),
        (editor.pipe.text_encoder, "forward", "text encoder"),
        (editor.pipe.vae, "encode", "VAE"),
        (editor.pipe.vae, "decode", "VAE"),
        (reward.tpips()[0].metric, "similarity_pairs", "reward"),
        (torch.Tensor, "backward", "backward"),
    ):
        models.wrap(owner, method, name)
    with tempfile.TemporaryDirectory() as name:
        job = Job(args, accelerator, RunFolder(name), editor, optimizer, reward, StopSignal())
        source = ProceduralPrompts(0, "train", editor.resolution)
        for number in range(1, options.iterations + 2):
            if number == 2:  # the first one warms up
                models.seconds.clear()
                begin = time.perf_counter()
            step = Iteration(number, PhaseTimer())
            _grpo_iteration(job, source, step)
        total = time.perf_counter() - begin
    share = 1.0 - sum(models.seconds.values()) / total
    print(
        json.dumps(
            {
                "iterations": options.iterations,
                "seconds": round(total, 2),
                **{f"share_{n}": round(s / total, 4) for n, s in models.seconds.items()},
                "share_outside_models": round(share, 4),
                "goal": MOST_OVERHEAD,
                "met": share <= MOST_OVERHEAD,
            }
        )
    )


def _grpo_iteration(job: Job, source: ProceduralPrompts, step: Iteration) -> dict[str, Any]:
    count = job.args.run.prompts_per_iteration
    positions = range((step.number - 1) * count, step.number * count)
    batches = grpo.sample(job, make_batches(job, draw_edits(job, source, positions)), step)
    grpo.assign_group_advantages(batches, job)
    moved = grpo.update(job, batches, step)
    line = {"iteration": step.number, **summarise_rows(edit_rows(batches)), **moved, **step.timer.report()}
    job.folder.path.mkdir(parents=True, exist_ok=True)
    job.folder.append_metrics(line)
    return line


def iteration(options: argparse.Namespace) -> None:
    """One GRPO iteration: LoRA, gradient checkpointing, guidance, and the steps of the editor's preset."""
    preset = {"qwen": "qwen_image_edit", "kontext": "flux_kontext"}[options.editor]
    tiny = options.size == "tiny"
    resolution = 32 if tiny else options.resolution
    small = {"num_generations": 2, "prompts_per_iteration": 1, "lora_rank": 4} if tiny else {"prompts_per_iteration": 1}
    flags = [f"--{k}={v}" for k, v in {"preset": preset, "resolution": resolution, "threads": 1, **small}.items()]
    args = parse_arguments(flags, GRPOArguments)
    accelerator = Accelerator(cpu=tiny, mixed_precision="no" if tiny else "bf16")
    if not tiny and accelerator.device.type == "cpu":
        raise SystemExit("--size real needs a GPU; --size tiny runs anywhere.")
    editor = build(options.editor, options.size, accelerator.device, resolution)
    reward = building.build_reward(args, accelerator.device)
    job = _job(args, accelerator, editor, reward)
    editor.transformer.enable_gradient_checkpointing()
    _reset_peak(accelerator.device)
    source = ProceduralPrompts(0, "train", resolution)
    with tempfile.TemporaryDirectory() as name:
        job.folder = RunFolder(name)
        line = _grpo_iteration(job, source, Iteration(1, PhaseTimer(accelerator.device.type)))
    print(
        json.dumps(
            {
                "editor": options.editor,
                "size": options.size,
                "resolution": resolution,
                "edits": args.run.num_generations * args.run.prompts_per_iteration,
                "ratio_max_deviation": line["ratio_max_deviation"],
                **{k: round(v, 2) for k, v in line.items() if k.startswith("seconds")},
                "peak_gib": round(_peak(accelerator.device), 2),
            }
        )
    )


def memory(options: argparse.Namespace) -> None:
    """Peak memory of one backprop_edit iteration above that before it, each setting in a process of its own."""
    for recompute in (False, True):
        for last in options.steps:
            command = [sys.executable, __file__, "one-memory", "--last", str(last), "--edits", str(options.edits)]
            command += ["--editor", options.editor, "--size", options.size, "--resolution", str(options.resolution)]
            done = subprocess.run(command + ["--recompute"] * recompute, capture_output=True, text=True, check=False)
            if done.returncode:
                raise SystemExit(done.stderr[-2000:])
            print(done.stdout.strip(), flush=True)


def one_memory(options: argparse.Namespace) -> None:
    """One line of `memory`."""
    flags = {"prompts_per_iteration": options.edits, "last_steps": options.last, "recompute": options.recompute}
    if options.size == "real":
        flags |= {"preset": {"qwen": "qwen_image_edit", "kontext": "flux_kontext"}[options.editor]}
    args = parse_arguments([f"--{k}={v}" for k, v in {**flags, "threads": 1}.items()], BackpropArguments)
    accelerator = Accelerator(cpu=options.size != "real", mixed_precision="bf16" if options.size == "real" else "no")
    reward = building.build_reward(args, accelerator.device)
    if options.size == "real":
        editor = build(options.editor, "real", accelerator.device, options.resolution)
        editor.transformer.enable_gradient_checkpointing()
        job = _job(args, accelerator, editor, reward)
    else:  # the built-in editor: large enough to show, small enough for a CPU
        editor, optimizer = building.build_editor(args, accelerator)
        job = Job(args, accelerator, RunFolder("."), editor, optimizer, reward, StopSignal())
    source = ProceduralPrompts(0, "train", editor.resolution)
    drawn = make_batches(job, draw_edits(job, source, range(options.edits)))
    _reset_peak(accelerator.device)
    before = _peak(accelerator.device)
    begin = time.perf_counter()
    backprop.update(job, drawn, Iteration(1, PhaseTimer()))
    print(
        json.dumps(
            {
                "K": options.last,
                "recompute": options.recompute,
                "edits": options.edits,
                "peak_mib_above_start": round(1024 * (_peak(accelerator.device) - before), 1),
                "seconds": round(time.perf_counter() - begin, 2),
            }
        )
    )


def _job(args: Any, accelerator: Accelerator, editor: Editor, reward: Rewards) -> Job:
    parameters = editor.add_lora(args.editor.lora_rank, args.editor.lora_alpha, generator=generator(0, ADAPTER))
    return Job(args, accelerator, RunFolder("."), editor, torch.optim.AdamW(parameters), reward, StopSignal())


def plan(options: argparse.Namespace) -> None:
    """Weights, activations and work at a resolution, by the formulas of docs/scaling.md; parameters are counted."""
    for name in EDITORS:
        parts = real_parts(name, "meta")
        count = {part: sum(p.numel() for p in module.parameters()) for part, module in parts.items()}
        transformer = parts["transformer"]
        config = transformer.config
        width = config.num_attention_heads * config.attention_head_dim
        layers = config.num_layers + getattr(config, "num_single_layers", 0)
        image = (options.resolution // 16) ** 2
        # Qwen's text encoder sees the source, a token for each 28 x 28 pixels, beside the template and the instruction.
        text = 512 if name == "kontext" else (options.resolution // 28) ** 2 + 100
        tokens = 2 * image + text
        attention = 4 * layers * tokens**2 * width
        forward = 2 * count["transformer"] * tokens * _matmul_share(transformer) + attention
        guided = 2 if name == "qwen" else 1
        targets = _lora_targets(name)
        lora = sum(
            options.rank * (m.in_features + m.out_features)
            for n, m in transformer.named_modules()
            if isinstance(m, torch.nn.Linear) and n.endswith(targets)
        )
        steps, trained, group = 10, 2, 16
        passes = guided * (steps + trained * 5)  # a replay, its reference, and a backward pass that computes it again
        gib = 2**30
        print(
            json.dumps(
                {
                    "editor": name,
                    "resolution": options.resolution,
                    "parameters_billion": {part: round(number / 1e9, 2) for part, number in count.items()},
                    "weights_gib_bf16": round(2 * sum(count.values()) / gib, 1),
                    "lora_million": round(lora / 1e6, 1),
                    "lora_adam_average_gib_fp32": round(5 * 4 * lora / gib, 2),
                    "tokens": tokens,
                    "checkpointed_activations_gib_an_edit": round(2 * layers * tokens * width * guided / gib, 2),
                    "forward_tflop_an_edit": round(forward / 1e12, 1),
                    "iteration_pflop_a_group_of_16": round(group * passes * forward / 1e15, 2),
                    "minutes_a_group_at_300_tflops": round(group * passes * forward / 300e12 / 60, 2),
                }
            )
        )


def _matmul_share(transformer: torch.nn.Module) -> float:
    """Share of the parameters that a token meets: of blocks of two streams only its own, of modulations none."""
    sizes = {name: p.numel() for name, p in transformer.named_parameters()}
    modulations = ("_mod.", "norm1.linear", "norm.linear", "norm1_context.linear", "norm_out", "time_text_embed")
    met = {name: size for name, size in sizes.items() if not any(part in name for part in modulations)}
    halved = sum(size for name, size in met.items() if name.startswith("transformer_blocks."))
    return (sum(met.values()) - halved / 2) / sum(sizes.values())


def _lora_targets(name: str) -> tuple[str, ...]:
    from rl_recipes.editors.flux_kontext import FluxKontext
    from rl_recipes.editors.qwen_image_edit import QwenImageEdit

    return QwenImageEdit.lora_targets if name == "qwen" else FluxKontext.lora_targets


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _reset_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()


def _peak(device: torch.device) -> float:
    """GiB: of the device, or of the process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated() / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)

    def command(name: str, run: Callable[[argparse.Namespace], None], **numbers: int) -> argparse.ArgumentParser:
        made = commands.add_parser(name, help=(run.__doc__ or "").split("\n")[0])
        made.set_defaults(run=run)
        for option, default in numbers.items():
            made.add_argument(f"--{option}", type=int, default=default)
        return made

    command("overhead", overhead, iterations=2)
    command("plan", plan, resolution=512, rank=64)
    one = command("iteration", iteration, resolution=512)
    many = command("memory", memory, edits=8, resolution=512)
    many.add_argument("--steps", type=int, nargs="+", default=[1, 2, 4, 6])
    single = command("one-memory", one_memory, edits=8, resolution=512, last=1)
    single.add_argument("--recompute", action="store_true")
    for made in (one, many, single):
        made.add_argument("--editor", choices=EDITORS, default="qwen")
        made.add_argument("--size", choices=("tiny", "real"), default="tiny")
    options = parser.parse_args(arguments)
    options.run(options)


if __name__ == "__main__":
    main()
