"""Ships a trained editor: copies its folder into the package and writes the card beside it.

    python -m rl_recipes.builtin.card --vae runs/vae --editor runs/drifting_editor
"""

from __future__ import annotations

import argparse
import shlex
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rl_recipes.builtin.train_editor import EditorSettings
from rl_recipes.editors.registry import BUILTIN_FOLDER
from rl_recipes.runs import read_json, write_atomic
from tpips_reward.arguments import HelpFormatter
from tpips_reward.errors import TPIPSError, exit_on_errors

#: Limits of what is shipped, in bytes: of all files together, and of each.
MAX_TOTAL, MAX_FILE = 11_000_000, 6_000_000

_CARD = """---
pipeline_tag: image-to-image
library_name: diffusers
---
# The built-in editor

A small instruction editor for 64 x 64 images, in the architecture of Qwen-Image-Edit: diffusers'
`QwenImageEditPipeline` with its own classes for every part. It was trained from scratch on a CPU with the procedural
scenes of `tpips_reward.scenes`, and on nothing else. It is made for one purpose: to let RL fine-tuning run anywhere
within minutes. Like real editors it does not preserve what it should, for its training targets drift now and then in
what the instruction does not name (probability {drift_probability}).

    from rl_recipes.editors import load_editor
    editor = load_editor("builtin")

## Parts

| part | class | parameters |
|---|---|---|
{parts}

Latents have {z_dim} channels at a quarter of the image's side; tokens are 2 x 2 latents, 64 an image. The scheduler's
shift is {shift:g}. Use 8 steps and no classifier-free guidance (there was no dropout of instructions). Weights are bfloat16;
{megabytes:.1f} MB in all.

The text encoder does not see the image: the last layer of its vision tower is zero, so that image tokens are constants.
The image reaches the transformer through its latents, and an instruction is encoded once for all images of one size.

## Training

    python -m rl_recipes.builtin.train_vae --minutes {vae_minutes:.0f} --output runs/vae
{trainings}
    python -m rl_recipes.builtin.card --vae runs/vae --editor {last}

{counts} steps on one CPU thread that other work slowed down; `--steps` instead of `--minutes` repeats a
training exactly. Both use Muon for matrices and kernels. The autoencoder starts as a nearly linear network, the
transformer as one that copies the source. Noise levels are shifted to 1 and often 1 itself, tokens that the instruction
is to change count {weight:g} times, and an average of the weights is saved.

## Figures

Held-out edits (scenes, and combinations of kind, shape and value, that training never shows), 8 steps, seed {seed}; printed by
`python -m rl_recipes.builtin.measure_editor builtin --count {count} --seed {seed}`.

| | edit success | drift | drift, 10th percentile | object lost | L1 to ideal | copies |
|---|---|---|---|---|---|---|
{table}

"Ideal through the autoencoder" is the ideal edit, encoded and decoded: no editor with this autoencoder drifts less. The
tenth percentile of drift is about what the editor's own blur costs where nothing drifted.
Reconstruction: PSNR {psnr_edits:.1f} dB on scenes of held-out edits, {psnr_scenes:.1f} dB on arbitrary held-out scenes
(float32 weights).

## Limits

One object on a background, six kinds of edit ({kinds}), the sentences of `tpips_reward.scenes` and few others. On
photographs and at other sizes it runs, but do not expect a good edit.
"""


def _row(name: str, figures: dict[str, float]) -> str:
    keys = ("edit_success", "drift", "drift_p10", "object_lost", "l1_to_ideal", "copy_rate")
    digits = (3, 4, 4, 3, 4, 3)
    return f"| {name} | " + " | ".join(f"{figures[k]:.{d}f}" for k, d in zip(keys, digits, strict=True)) + " |"


def _command(stage: dict[str, Any], output: str, start_from: str | None) -> str:
    """The command that repeats one training; settings that are the defaults are left out."""
    defaults = asdict(EditorSettings())
    changed = {name: value for name, value in stage["settings"].items() if defaults.get(name) != value}
    flags = "".join(f" --{name} {shlex.quote(str(value))}" for name, value in changed.items())
    start = f" --start_from {start_from}" if start_from else ""
    return (
        f"    python -m rl_recipes.builtin.train_editor --vae runs/vae/vae{start} --minutes {stage['minutes']:.0f}{flags}"
        f" --output {output}"
    )


def card(
    vae: dict[str, Any], editor: dict[str, Any], parts: dict[str, tuple[str, int]], z_dim: int, shift: float, size: int
) -> str:
    """The card's text.

    Args:
        vae: `figures.json` of the autoencoder's training.
        editor: `figures.json` of the editor's training.
        parts: class and number of parameters of each part.
        z_dim: latent channels.
        shift: of the scheduler.
        size: bytes of the folder.
    """
    settings = editor["settings"]
    stages = [editor["earlier"], editor] if "earlier" in editor else [editor]
    folders = ["runs/editor", "runs/drifting_editor"]
    trainings = [
        _command(stage, folder, None if i == 0 else folders[i - 1])
        for i, (stage, folder) in enumerate(zip(stages, folders, strict=False))
    ]
    rows = [_row("all", editor), *(_row(kind.replace("_", " "), f) for kind, f in editor["by_kind"].items())]
    rows.append(_row("*ideal through the autoencoder*", editor["autoencoder_floor"]))
    return _CARD.format(
        drift_probability=settings["drift_probability"],
        trainings="\n".join(trainings),
        last=folders[len(stages) - 1],
        counts=" and ".join(str(n) for n in (vae["steps"], *(stage["steps"] for stage in stages))),
        parts="\n".join(f"| {name} | `{kind}` | {count:,} |" for name, (kind, count) in parts.items()),
        z_dim=z_dim,
        shift=shift,
        megabytes=size / 1e6,
        vae_minutes=vae["minutes"],
        weight=1 + settings["changed_weight"],
        seed=editor["measured"]["seed"],
        count=editor["measured"]["count"],
        table="\n".join(rows),
        psnr_edits=vae["psnr"]["edits"],
        psnr_scenes=vae["psnr"]["scenes"],
        kinds=", ".join(kind.replace("_", " ") for kind in editor["by_kind"]),
    )


def folder_size(folder: Path) -> int:
    """Bytes of a folder's files.

    Raises:
        TPIPSError: when they are more than is shipped.
    """
    sizes = {path: path.stat().st_size for path in folder.rglob("*") if path.is_file()}
    largest = max(sizes, key=lambda path: sizes[path])
    if sum(sizes.values()) > MAX_TOTAL or sizes[largest] > MAX_FILE:
        raise TPIPSError(
            f"The editor in {folder} has {sum(sizes.values())} bytes, {sizes[largest]} of them in {largest.name}; at "
            f"most {MAX_TOTAL} and {MAX_FILE} are shipped. Train a smaller one."
        )
    return sum(sizes.values())


def count_parameters(folder: Path) -> dict[str, tuple[str, int]]:
    """Class name and number of parameters of each part of a pipeline folder that has weights."""
    from safetensors import safe_open

    index = read_json(folder / "model_index.json")
    out = {}
    for name in ("vae", "transformer", "text_encoder"):
        count = 0
        for file in (folder / name).glob("*.safetensors"):
            with safe_open(file, "pt") as tensors:
                names = tensors.keys()
                for key in names:
                    shape = tensors.get_slice(key).get_shape()
                    size = 1
                    for side in shape:
                        size *= side
                    count += size
        out[name] = (index[name][1], count)
    return out


def ship(vae_run: Path, editor_run: Path, folder: Path = BUILTIN_FOLDER) -> None:
    """Replaces ``folder`` by the editor of ``editor_run`` and its card."""
    source = editor_run / "editor"
    size = folder_size(source)
    text = card(
        read_json(vae_run / "figures.json"),
        read_json(editor_run / "figures.json"),
        count_parameters(source),
        read_json(source / "vae" / "config.json")["z_dim"],
        read_json(source / "scheduler" / "scheduler_config.json")["shift"],
        size,
    )
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".tmp-") as temporary:
        work = Path(temporary) / folder.name
        shutil.copytree(source, work)
        write_atomic(work / "README.md", lambda p: p.write_text(text, encoding="utf-8"))
        for path in [work, *work.rglob("*")]:
            path.chmod(0o755 if path.is_dir() else 0o644)
        if folder.exists():
            folder.rename(Path(temporary) / "old")
        work.rename(folder)


@exit_on_errors()
def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument("--vae", type=Path, required=True, help="output folder of train_vae")
    parser.add_argument("--editor", type=Path, required=True, help="output folder of train_editor")
    parser.add_argument("--output", type=Path, default=BUILTIN_FOLDER, help="where to ship it to")
    args = parser.parse_args(arguments)
    ship(args.vae, args.editor, args.output)
    print(f"Shipped to {args.output}.")


if __name__ == "__main__":
    main()
