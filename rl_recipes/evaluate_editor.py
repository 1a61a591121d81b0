"""Which checkpoint keeps what it should, and still does what it was asked? Renders edits and scores them by TPIPS.

    accelerate launch rl_recipes/evaluate_editor.py --lora runs/grpo_edit/adapter
    accelerate launch rl_recipes/evaluate_editor.py --editor Qwen/Qwen-Image-Edit-2511 --metric released:late
        --lora runs/a/adapter --lora late=runs/b/adapter --data edits.jsonl

One column for the editor as it is, "base", one for each adapter, and one for each run with --train full (--full); every
checkpoint edits the same sources from the same noise. The report is that of `tpips-reward evaluate` (docs/evaluation.md).
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs
from tqdm import tqdm

from rl_recipes import rendering_folder
from rl_recipes.building import set_threads
from rl_recipes.editor_checkpoints import Checkpoint, check_checkpoints, find_checkpoints
from rl_recipes.editors import Editor, load_editor
from rl_recipes.parsing import PRESETS, auto_preset, load_yaml
from rl_recipes.procedural_edits import known_truth, procedural_rows
from rl_recipes.rendering import Sampling, render_checkpoint
from rl_recipes.rendering_sources import check_rows, rows_digest, write_sources
from rl_recipes.runs import RunFolder, write_json
from tpips_reward import load_metric
from tpips_reward.arguments import HelpFormatter
from tpips_reward.aspects import parse_proposer
from tpips_reward.calibration import CalibratedMetric
from tpips_reward.checkpoints import check_metric
from tpips_reward.errors import INTERRUPTED, TPIPSError, exit_on_errors
from tpips_reward.evaluation import Dataset, Settings, evaluate, read_manifest
from tpips_reward.evaluation.command import ending
from tpips_reward.evaluation.folder import ASPECTS_NAME, keep_files, keep_inputs
from tpips_reward.rewards.reward import PairMetric
from tpips_reward.stopping import Interrupted, StopSignal

#: A process may wait as long for the others: one of them renders the last batch, or decodes large photographs.
_PATIENCE = timedelta(hours=12)


def run(args: argparse.Namespace) -> int:
    """Renders and scores; the exit code is 130 where the user stopped it.

    Raises:
        TPIPSError: for whatever the user can mend.
    """
    checkpoints = find_checkpoints(args.lora, args.full)
    settings = Settings(examples=args.examples, strict=args.strict)
    # a typo must not cost the rendering
    parse_proposer(args.proposer)
    if args.data is None and args.count < 1:
        raise TPIPSError(f"count is {args.count}; give at least one edit.")
    accelerator = Accelerator(
        cpu=not torch.accelerator.is_available(), kwargs_handlers=[InitProcessGroupKwargs(timeout=_PATIENCE)]
    )
    set_threads(accelerator, args.threads)
    folder = RunFolder(args.output_dir, owner=accelerator.is_main_process)
    with folder:
        if accelerator.is_main_process:
            _check_folder(folder.path, args)
            check_metric(
                args.metric,
                device=args.metric_device,
                dtype=_dtype(args.metric_dtype),
                revision=args.metric_revision,
                calibrated=args.calibrated,
            )
        accelerator.wait_for_everyone()
        try:
            with StopSignal() as stop:
                dataset = _render(args, folder.path, checkpoints, accelerator, stop)
                stop.check()
        except Interrupted:
            print("Stopped; what is rendered stays, and --resume goes on.", file=sys.stderr)
            return INTERRUPTED
        if accelerator.is_main_process:  # Ctrl-C ends it here: every score is kept when it is measured
            checkpoints = rendering_folder.rendered_checkpoints(folder.path)
            dataset = rendering_folder.with_edits(dataset, folder.path, checkpoints)
            _score(args, dataset, folder.path, settings)
            if args.data is None:
                tell_truth(args, folder.path, checkpoints)
    accelerator.end_training()
    return 0


def _check_folder(folder: Path, args: argparse.Namespace) -> None:
    if args.overwrite and args.resume:
        raise TPIPSError("--overwrite starts anew and --resume goes on; give one of the two.")
    if args.overwrite:
        rendering_folder.files_to_clear(folder)
    elif not args.resume and (folder / rendering_folder.SETTINGS_NAME).exists():
        raise TPIPSError(
            f"{folder} holds an evaluation; give --resume to go on or to add checkpoints, --overwrite to start anew, or "
            "another --output_dir."
        )
    elif not args.resume and any(not entry.name.startswith(".") for entry in folder.iterdir()):
        raise TPIPSError(f"{folder} is not empty; give another --output_dir, or --overwrite to write into it.")


def _render(
    args: argparse.Namespace,
    folder: Path,
    checkpoints: Sequence[Checkpoint],
    accelerator: Accelerator,
    stop: StopSignal,
) -> Dataset:
    dataset = None if args.data is None else read_manifest(args.data, needs_outputs=False)
    if dataset is not None and dataset.models:
        raise TPIPSError(
            f"{args.data} already has outputs (of {', '.join(dataset.models)}), which this command would not score: take them "
            "out to render edits, or score them with tpips-reward evaluate."
        )
    _keep_inputs(args, folder, dataset)
    defaults = editor_defaults(args.editor)
    sampling = Sampling(
        steps=_first(args.steps, defaults.get("eval_inference_steps"), 8),
        guidance_scale=_first(args.guidance_scale, defaults.get("guidance_scale"), 1.0),
        seed=args.seed,
        batch_size=args.batch_size,
    )
    editor = load_editor(
        args.editor,
        device=accelerator.device,
        dtype=_dtype(args.editor_dtype),
        resolution=_first(args.resolution, defaults.get("resolution")),
        revision=args.revision,
    )
    if not editor.sees_image:
        raise TPIPSError(f"{args.editor} makes images from text and edits none; give an image editor.")
    if dataset is not None:
        dataset, sizes = check_rows(editor, dataset)
        if not dataset.rows:
            raise TPIPSError(f"{args.data} has no edit that can be rendered. {dataset.problems[0].detail}")
    check_checkpoints(editor, checkpoints)
    if args.overwrite and accelerator.is_main_process:  # only now that everything is known to be good
        rendering_folder.clear(folder, dataset.rows if dataset is not None else ())
    accelerator.wait_for_everyone()
    if dataset is None:
        dataset = procedural_rows(folder, args.count, args.data_seed, editor.resolution, accelerator.is_main_process)
        accelerator.wait_for_everyone()
        dataset, sizes = check_rows(editor, dataset)
    if accelerator.is_main_process:
        rendering_folder.claim(folder, _facts(args, editor, sampling, dataset), checkpoints, dataset.rows, resume=args.resume)
    accelerator.wait_for_everyone()
    dataset = write_sources(editor, dataset, folder, accelerator, stop)
    total = len(dataset.rows) * len(checkpoints)
    quiet = not (accelerator.is_main_process and sys.stderr.isatty())
    with tqdm(total=-(-total // accelerator.num_processes), unit="edit", disable=quiet) as bar:
        for checkpoint in checkpoints:
            render_checkpoint(editor, checkpoint, dataset.rows, sizes, folder, sampling, accelerator, stop, bar.update)
    accelerator.wait_for_everyone()
    del editor  # the metric needs its memory
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return dataset


def _keep_inputs(args: argparse.Namespace, folder: Path, dataset: Dataset | None) -> None:
    """Nothing that is read may be written; `evaluate` would say so when all is rendered."""
    report = folder / "report"
    aspects = report / ASPECTS_NAME if args.aspects is None else args.aspects
    written = rendering_folder.text_files(folder)
    keep_files([aspects], written, "The rendering", "--aspects")
    if dataset is not None:
        keep_files(dataset.files(), written, "The rendering", "--output_dir")
        keep_inputs(dataset, report, aspects)


def _facts(args: argparse.Namespace, editor: Editor, sampling: Sampling, dataset: Dataset) -> dict[str, Any]:
    """What the pixels depend on."""
    return {
        "editor": args.editor,
        "revision": args.revision,
        "resolution": editor.resolution,
        "dtype": str(editor.dtype).removeprefix("torch."),
        **vars(sampling),
        "rows": rows_digest(dataset.rows),
    }


def _score(args: argparse.Namespace, dataset: Dataset, folder: Path, settings: Settings) -> None:
    target = folder / "report"

    def load() -> PairMetric:
        metric = load_metric(args.metric, device=args.metric_device, dtype=_dtype(args.metric_dtype), revision=args.metric_revision)
        return CalibratedMetric(metric) if args.calibrated else metric

    report = evaluate(
        dataset,
        load,
        target,
        metric_name=f"{args.metric}, calibrated" if args.calibrated else args.metric,
        settings=settings,
        aspects_file=args.aspects,
        proposer=parse_proposer(args.proposer),
        overwrite=args.overwrite,
        resume=not args.overwrite,  # scores of equal images are kept; the folder is ours
    )
    print(ending(report, target))


def tell_truth(args: argparse.Namespace, folder: Path, checkpoints: Sequence[Checkpoint]) -> None:
    """What is known of procedural edits, beside what the metric says of them."""
    from PIL import Image

    with Image.open(rendering_folder.source_path(folder, "test-000000")) as image:
        size = image.width
    truth = known_truth(folder, checkpoints, args.count, args.data_seed, size)
    write_json(folder / rendering_folder.TRUTH_NAME, truth)
    names = list(next(iter(truth.values())))
    print("\nKnown from the scenes' parameters, without the metric:\n")
    print(f"| checkpoint | {' | '.join(names)} |\n|{'---|' * (len(names) + 1)}")
    for checkpoint, values in truth.items():
        print(f"| {checkpoint} | {' | '.join('–' if v is None else f'{v:.4f}' for v in values.values())} |")


def editor_defaults(editor: str) -> dict[str, Any]:
    """The preset of the editor's family; none where the editor brings defaults of its own, as the built-in one."""
    name = auto_preset(editor)
    return {} if name == "none" else load_yaml(PRESETS / f"{name}.yaml")


def _dtype(name: str) -> str | None:
    return None if name == "auto" else name


def _first(*values: Any) -> Any:
    return next((value for value in values if value is not None), None)


def build_parser() -> argparse.ArgumentParser:
    """The flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    add = parser.add_argument
    add("--editor", default="builtin", help="'builtin', a Hub id such as Qwen/Qwen-Image-Edit-2511, or a folder")
    add("--lora", action="append", default=[], metavar="PATH", help="an adapter, or NAME=PATH; may be repeated")
    add("--full", action="append", default=[], metavar="PATH",
        help="all weights, of a run with --train full, or NAME=PATH; may be repeated")  # fmt: skip
    add("--data", type=Path, help="edits, a manifest of `tpips-reward evaluate` without outputs (default: procedural)")
    add("--count", type=int, default=64, help="procedural edits")
    add("--data_seed", type=int, default=20_000, help="of the procedural edits; those of the recipes' evaluation")
    add("--output_dir", type=Path, default=Path("runs/evaluate_editor"), help="where everything goes")
    add("--overwrite", action="store_true", help="replace the evaluation that is there")
    add("--resume", action="store_true", help="go on with the evaluation that is there, or add checkpoints to it")
    sample = parser.add_argument_group("sampling", "left out: as in the preset of the editor's family")
    sample.add_argument("--resolution", type=int, help="edits have about so many pixels squared")
    sample.add_argument("--steps", type=int, help="denoising steps")
    sample.add_argument("--guidance_scale", type=float, help="1 turns it off")
    sample.add_argument("--seed", type=int, default=0, help="of the initial noise; a row's noise goes by its key")
    sample.add_argument("--batch_size", type=int, default=4, help="edits of one size at a time")
    sample.add_argument("--editor_dtype", default="auto", choices=("auto", "float32", "bfloat16"), help="of its weights")
    sample.add_argument("--revision", help="of the editor on the Hub")
    sample.add_argument("--threads", type=int, default=0, help="CPU threads of a process; 0: all cores shared")
    score = parser.add_argument_group("scoring")
    score.add_argument("--metric", default="builtin:late", help="'builtin:late', 'released:late', a Hub id, a folder")
    score.add_argument("--metric_revision", help="of the metric on the Hub")
    score.add_argument("--metric_dtype", default="auto", choices=("auto", "float32", "bfloat16"), help="of its weights")
    score.add_argument("--metric_device", help="cpu, cuda ... (default: the GPU if there is one)")
    score.add_argument("--aspects", type=Path, help="file of proposed aspects (default: OUTPUT_DIR/report/aspects.jsonl)")
    score.add_argument("--proposer", default="rules", help="who proposes aspects: rules, vlm:SOURCE, endpoint:MODEL@URL")
    score.add_argument("--calibrated", action="store_true", help="score with the calibration beside the metric")
    score.add_argument("--examples", type=int, default=6, help="best and worst edits of each model on the page")
    score.add_argument("--strict", action="store_true", help="any problem with the input is an error")
    return parser


@exit_on_errors("evaluate_editor")
def main(argv: Sequence[str] | None = None) -> int:
    """The command line."""
    return run(build_parser().parse_args(argv))


if __name__ == "__main__":
    sys.exit(main())
