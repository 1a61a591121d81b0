"""How well the built-in editor edits, measured on held-out edits from the scenes' known parameters.

    python -m rl_recipes.builtin.measure_editor rl_recipes/builtin/editor
"""

from __future__ import annotations

import argparse
import copy
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import QwenImageEditPipeline

from rl_recipes.builtin.data import held_out_edits
from rl_recipes.builtin.pictures import save_grid
from rl_recipes.builtin.train_vae import evaluate_vae, held_out_images
from rl_recipes.editors import load_editor
from rl_recipes.editors.registry import DEFAULTS_FILE
from rl_recipes.rollout import sample_ode
from rl_recipes.runs import read_json, write_json
from rl_recipes.seeds import generator
from tpips_reward.arguments import HelpFormatter
from tpips_reward.errors import exit_on_errors
from tpips_reward.scenes import EDIT_KINDS, Edit, EditMeasures, measure_edit, render, to_tensor

#: Side in pixels of the images that the editor is trained on.
IMAGE_SIZE = 64
#: Steps of the sampler, as in RL runs.
NUM_STEPS = 8


def save_pipeline(pipeline: QwenImageEditPipeline, transformer: torch.nn.Module, folder: Path) -> None:
    """Writes a pipeline folder in bfloat16 with ``transformer`` in place of the pipeline's own.

    The folder appears as a whole: what was there is replaced once all files are written.
    """
    parts = dict(pipeline.components)
    parts["transformer"] = transformer
    for name in ("transformer", "text_encoder", "vae"):
        parts[name] = copy.deepcopy(parts[name]).to(torch.bfloat16)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".tmp-") as temporary:
        work = Path(temporary) / folder.name
        QwenImageEditPipeline(**parts).save_pretrained(work)
        _forget_origin(work)
        write_json(work / DEFAULTS_FILE, {"resolution": IMAGE_SIZE})
        if folder.exists():
            folder.rename(Path(temporary) / "old")
        work.rename(folder)


def _forget_origin(folder: Path) -> None:
    """Takes out of the configs the path that a part was loaded from: it means nothing on another machine."""
    for path in folder.glob("*/config.json"):
        config = read_json(path)
        if config.pop("_name_or_path", None) is not None:
            write_json(path, config)


@torch.no_grad()
def measure_editor(
    folder: str | Path,
    *,
    edits: Sequence[Edit] | None = None,
    count: int = 120,
    seed: int = 2_000,
    batch_size: int = 30,
) -> tuple[dict[str, Any], list[tuple[Edit, torch.Tensor]]]:
    """Edits held-out scenes with the editor in ``folder``.

    Args:
        folder: a pipeline folder, or "builtin".
        edits: what to edit; None draws ``count`` test edits, the kinds in turn.
        seed: of the edits and of the initial noise.

    Returns:
        the figures (means over all edits; by kind; the floor that the autoencoder sets, and its PSNR in dB), and each edit
        with its image (3, H, W) float in [0, 1].
    """
    editor = load_editor(str(folder), device="cpu", dtype=torch.float32)
    chosen = list(edits) if edits is not None else held_out_edits(seed, count)
    images: list[torch.Tensor] = []
    floor: list[EditMeasures] = []
    for start in range(0, len(chosen), batch_size):
        part = chosen[start : start + batch_size]
        sources = [to_tensor(render(edit.source)) for edit in part]
        conditions = editor.encode(sources, [edit.instruction for edit in part])
        generators = [generator(seed, start + i) for i in range(len(part))]
        images += editor.decode(sample_ode(editor, conditions, generators, NUM_STEPS, 1.0), conditions)
        ideals = editor.encode([to_tensor(render(edit.ideal)) for edit in part], [edit.instruction for edit in part])
        restored = editor.decode(ideals.image_latents, ideals)
        floor += [measure_edit(edit, image) for edit, image in zip(part, restored, strict=True)]
    measures = [measure_edit(edit, image) for edit, image in zip(chosen, images, strict=True)]
    kinds = {
        kind: summarise([m for e, m in zip(chosen, measures, strict=True) if e.kind == kind])
        for kind in EDIT_KINDS
        if any(e.kind == kind for e in chosen)
    }
    figures: dict[str, Any] = {**summarise(measures), "by_kind": kinds, "autoencoder_floor": summarise(floor)}
    psnr = evaluate_vae(editor.pipe.vae, held_out_images())
    figures["autoencoder_psnr"] = {name: round(value, 2) for name, value in psnr.items()}
    figures["measured"] = {"count": len(chosen), "seed": seed}
    return figures, list(zip(chosen, images, strict=True))


def summarise(measures: Sequence[EditMeasures]) -> dict[str, float]:
    """Means of the measures, and the tenth percentile of drift: what is left where nothing drifted."""
    drift = np.array([m.drift for m in measures], np.float64)
    drift = drift[np.isfinite(drift)]
    out = {
        "edit_success": float(np.mean([m.success for m in measures])),
        "drift": float(drift.mean()) if len(drift) else 0.0,
        "drift_p10": float(np.quantile(drift, 0.1)) if len(drift) else 0.0,
        "drift_p50": float(np.quantile(drift, 0.5)) if len(drift) else 0.0,
        "object_lost": float(np.mean([m.object_lost for m in measures])),
        "l1_to_ideal": float(np.mean([m.l1_to_ideal for m in measures])),
        "copy_rate": float(np.mean([m.copied for m in measures])),
    }
    return {name: round(value, 5) for name, value in out.items()}


def save_edits(path: Path, edits: Sequence[tuple[Edit, torch.Tensor]], count: int = 48) -> None:
    """Writes a grid: source, ideal and edit under each other."""
    shown = edits[:count]
    sources, ideals = ([to_tensor(render(scene)) for scene in scenes] for scenes in
                       ([e.source for e, _ in shown], [e.ideal for e, _ in shown]))  # fmt: skip
    save_grid(path, [sources, ideals, [image for _, image in shown]], columns=12)


@exit_on_errors()
def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument("folder", help="a pipeline folder, or 'builtin'")
    parser.add_argument("--count", type=int, default=300, help="held-out edits")
    parser.add_argument("--seed", type=int, default=2_000, help="of the edits and the noise they start from")
    parser.add_argument("--picture", type=Path, help="write a grid source | ideal | edit here")
    args = parser.parse_args(arguments)
    figures, edits = measure_editor(args.folder, count=args.count, seed=args.seed)
    if args.picture:
        save_edits(args.picture, edits)
    print(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
