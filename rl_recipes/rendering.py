"""Edits of an editor and its checkpoints as files, for an evaluation: the same sources and the same noise for each.

    FOLDER/sources/KEY.png          what the editor saw, at the size of its edit
    FOLDER/edits/CHECKPOINT/KEY.png
    FOLDER/rendering.json           with which settings; a run that goes on must have the same
    FOLDER/manifest.jsonl           all of it, for `tpips-reward evaluate`

An image depends on the checkpoint, the row and its key, its batch and the settings. Batches are made of all rows, whatever
is done already and however many processes share them, so that a run that was interrupted ends with the same pixels. (On a
CPU the number of threads of a process rounds otherwise too.)
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from safetensors import SafetensorError, safe_open
from torch import Tensor

from rl_recipes.collecting import decode, encode, same_size_batches
from rl_recipes.editors import Editor, EditorError, full
from rl_recipes.editors.base import Size
from rl_recipes.editors.lora import FILE_NAME
from rl_recipes.prompts import ProceduralPrompts, Prompt
from rl_recipes.rollout import sample_ode
from rl_recipes.runs import RunError, disk_errors, read_json, to_image, write_atomic, write_image, write_json
from rl_recipes.seeds import EVALUATION, generator
from tpips_reward.errors import TPIPSError
from tpips_reward.evaluation import Dataset, Problem, Row
from tpips_reward.evaluation.image_files import ImageFile, image_size
from tpips_reward.evaluation.image_files import decode as decode_image
from tpips_reward.evaluation.rows import check_model_name
from tpips_reward.files import TEMPORARY
from tpips_reward.scenes import measure_edit
from tpips_reward.stopping import StopSignal

#: The column of the editor as it is.
BASE = "base"
SETTINGS_NAME, MANIFEST_NAME = "rendering.json", "manifest.jsonl"


@dataclass(frozen=True)
class Checkpoint:
    """A column of the report: the editor itself, the editor with an adapter, or with other weights.

    Attributes:
        name: of the column.
        file: of the adapter.
        weights: the folder with all weights of the transformer.
    """

    name: str
    file: Path | None = None
    weights: Path | None = None

    def digest(self) -> str:
        """What tells checkpoints apart: their content."""
        files = full.weight_files(self.weights) if self.weights else [self.file] if self.file else []
        if not files:
            return ""
        total = hashlib.sha256()
        for file in files:
            with disk_errors(file), file.open("rb") as content:
                total.update(hashlib.file_digest(content, "sha256").digest())
        return total.hexdigest()[:32]


@dataclass(frozen=True)
class Sampling:
    """How edits are sampled: denoising steps, guidance, the seed of the initial noise, edits in one batch."""

    steps: int
    guidance_scale: float
    seed: int
    batch_size: int

    def __post_init__(self) -> None:
        for name, lowest in (("steps", 1), ("seed", 0), ("batch_size", 1), ("guidance_scale", 0)):
            value = getattr(self, name)
            if not lowest <= value < float("inf"):
                raise TPIPSError(f"{name} is {value}; give a number of at least {lowest}.")


# --- checkpoints


def find_checkpoints(adapters: Sequence[str], weights: Sequence[str] = ()) -> list[Checkpoint]:
    """The editor itself, then one checkpoint for each `PATH` or `NAME=PATH`.

    Without a name a checkpoint is called after its folder, "x" for `runs/x/adapter`. Those of all weights come last: they
    take the place of the editor's own.

    Args:
        adapters: folders with `pytorch_lora_weights.safetensors`, runs' folders with `adapter/`, or such files.
        weights: what `--train full` leaves: folders with the transformer's weights, or with `transformer/` or
            `adapter/transformer/` in them.

    Raises:
        TPIPSError: no such file, a name twice, or one that no folder can have.
    """
    found = [Checkpoint(BASE)]
    for option, text in [*(("--lora", text) for text in adapters), *(("--full", text) for text in weights)]:
        name, equals, path = text.partition("=")
        if not equals or Path(text).exists():
            name, path = "", text
        find = _adapter_file if option == "--lora" else _weights_folder
        place = find(Path(path).expanduser())
        name = check_model_name(name or _name_of(place))
        if "/" in name or "\\" in name or name.startswith("."):
            raise TPIPSError(f"{option} {text}: {name!r} cannot name a folder; write NAME=PATH with a plain name.")
        if name in [checkpoint.name for checkpoint in found]:
            why = "is the editor as it is" if name == BASE else "is there twice"
            raise TPIPSError(f"{option} {text}: the name {name!r} {why}; write NAME=PATH with another name.")
        found.append(Checkpoint(name, file=place) if option == "--lora" else Checkpoint(name, weights=place))
    return found


def _weights_folder(path: Path) -> Path:
    for folder in (path / "adapter" / full.FOLDER, path / full.FOLDER, path):
        if folder.is_dir() and any(folder.glob("*.safetensors")) and not (folder / FILE_NAME).is_file():
            for file in full.weight_files(folder):
                _tensor_names(file)
            return folder
    hint = "it holds an adapter, which --lora takes" if _holds_adapter(path) else f"there is no {full.FOLDER}/ with weights in it"
    raise TPIPSError(f"--full {path} holds no weights of a run with --train full: {hint}.")


def _holds_adapter(path: Path) -> bool:
    return any((folder / FILE_NAME).is_file() for folder in (path, path / "adapter"))


def _adapter_file(path: Path) -> Path:
    for file in (path / FILE_NAME, path / "adapter" / FILE_NAME, path):
        if file.is_file():
            if not any("lora" in name for name in _tensor_names(file)):
                raise TPIPSError(f"{file} holds no LoRA weights; give what save_lora_weights or a run wrote.")
            return file
    if any((folder / full.FOLDER).is_dir() for folder in (path, path / "adapter")):
        raise TPIPSError(f"--lora {path} is no adapter: it holds all weights of a transformer, which --full takes.")
    raise TPIPSError(f"--lora {path} is no adapter: there is no {FILE_NAME} in it.")


def _tensor_names(file: Path) -> list[str]:
    try:
        with safe_open(file, "pt") as content:
            return list(content.keys())
    except (OSError, SafetensorError) as error:
        raise TPIPSError(f"The weights {file} cannot be read ({error}); they must be a safetensors file.") from None


def _name_of(place: Path) -> str:
    if place.is_file() and place.name != FILE_NAME:
        return place.stem
    home = place.resolve() if place.is_dir() else place.resolve().parent
    for generic in (full.FOLDER, "adapter"):
        home = home.parent if home.name == generic else home
    return home.name


def apply_checkpoint(editor: Editor, checkpoint: Checkpoint) -> None:
    """Takes off the adapter that is on, and puts on the checkpoint's, or all of its weights.

    Weights replace the editor's own, of which there is no second copy: after them come only other weights.

    Raises:
        EditorError: it does not fit this editor, or not all of it does (such an adapter would change nothing, in silence);
            or the editor's own weights are asked for after they were replaced.
    """
    editor.pipe.unload_lora_weights()
    if checkpoint.weights is not None:
        editor.load_all(checkpoint.weights)
        return
    if not editor.has_own_weights:
        raise EditorError(f"The editor's weights were replaced before {checkpoint.name!r}; load the editor anew.")
    if checkpoint.file is None:
        return
    try:
        editor.pipe.load_lora_weights(checkpoint.file.parent, weight_name=checkpoint.file.name, use_safetensors=True)
    except (OSError, ValueError, KeyError, RuntimeError, AttributeError, SafetensorError) as error:
        reason = " ".join(str(error).split())[:300]
        raise EditorError(f"The adapter {checkpoint.file} does not fit this editor ({reason}).") from error
    editor.transformer.requires_grad_(False)
    placed = sum(".lora_A." in name or ".lora_B." in name for name, _ in editor.transformer.named_parameters())
    names = [name for name in _tensor_names(checkpoint.file) if name.startswith("transformer.")]
    expected = sum(".lora_A." in name or ".lora_B." in name for name in names)
    if not placed or placed < expected:
        raise EditorError(
            f"Of the adapter {checkpoint.file} {placed} of {expected or 'all'} weights fit this editor's transformer; give "
            "the adapter of this editor."
        )


# --- rows


def procedural_rows(folder: Path, count: int, seed: int, size: int, write: bool) -> Dataset:
    """Held-out procedural edits, their sources in `folder/sources`.

    Args:
        write: whether this process writes the sources.
    """
    prompts, rows = ProceduralPrompts(seed, "test", size), []
    for index in range(count):
        prompt = prompts[index]
        path = source_path(folder, prompt.key)
        if write and not path.exists():
            assert isinstance(prompt.image, Tensor)  # procedural edits have one image
            write_image(path, to_image(prompt.image))
        assert prompt.edit is not None
        rows.append(Row(prompt.key, ImageFile(path), prompt.instruction, {}, prompt.preserve, prompt.target,
                        prompt.edit.kind))  # fmt: skip
    return Dataset(f"{count} procedural edits", tuple(rows), ())


def source_path(folder: Path, key: str) -> Path:
    return folder / "sources" / f"{key}.png"


def edit_path(folder: Path, checkpoint: Checkpoint, key: str) -> Path:
    return folder / "edits" / checkpoint.name / f"{key}.png"


def check_rows(editor: Editor, dataset: Dataset) -> tuple[Dataset, dict[str, Size]]:
    """Leaves out what the editor would refuse, before anything is rendered; and each row's (height, width) of its edit."""
    rows, problems, sizes = [], [], {}
    for row in dataset.rows:
        kind = "unreadable_source"
        try:
            width, height = image_size(row.source)
            kind = "bad_row"
            sizes[row.key] = editor.output_size(torch.empty((3, height, width), device="meta"))
            editor.check_instruction(row.instruction)
        except TPIPSError as error:
            problems.append(Problem(kind, f"The row {row.key!r} cannot be edited: {error}", row.key))
            continue
        rows.append(row)
    return dataset.with_rows(rows, problems), sizes


def write_sources(editor: Editor, dataset: Dataset, folder: Path, accelerator: Accelerator, stop: StopSignal) -> Dataset:
    """Writes what the editor sees, at the size of the edit, and leaves out rows whose images do not decode.

    The processes share the work; each gets all of the result.
    """
    found: list[Problem] = []
    for row in dataset.rows[accelerator.process_index :: accelerator.num_processes]:
        stop.check()
        path = source_path(folder, row.key)
        if path.exists():
            continue
        try:
            image = decode_image(row.source.read(), row.source.label)
        except TPIPSError as error:
            found.append(Problem("unreadable_source", str(error), row.key))
            continue
        write_image(path, to_image(editor.fit(image)))
    problems: list[Problem] = gather_object(found)
    broken = {problem.key for problem in problems}
    rows = [replace(row, source=ImageFile(source_path(folder, row.key))) for row in dataset.rows if row.key not in broken]
    order = {row.key: position for position, row in enumerate(dataset.rows)}
    return dataset.with_rows(rows, sorted(problems, key=lambda problem: order[problem.key]))


def rows_digest(rows: Sequence[Row]) -> str:
    """What tells two sets of edits apart: keys, instructions, and the sources' sizes in bytes."""
    digest = hashlib.sha256()
    for row in rows:
        size = row.source.path.stat().st_size if isinstance(row.source, ImageFile) else len(row.source.read())
        digest.update(json.dumps([row.key, row.instruction, size]).encode())
    return digest.hexdigest()[:32]


# --- rendering


@torch.no_grad()
def render_checkpoint(
    editor: Editor,
    checkpoint: Checkpoint,
    rows: Sequence[Row],
    sizes: dict[str, Size],
    folder: Path,
    sampling: Sampling,
    accelerator: Accelerator,
    stop: StopSignal,
    progress: Callable[[int], None] = lambda edits: None,
) -> int:
    """Renders what is not there yet of one checkpoint, this process's share of it.

    Args:
        rows: with sources of `write_sources`.
        sizes: of `check_rows`.
        progress: called with the number of edits of each batch that is done, or was already.

    Returns:
        the number of edits that were rendered.

    Raises:
        TPIPSError: the editor gives pixels that are not finite, or the disk refuses.
        Interrupted: the user asked to stop; whole files are left.
    """
    batches = list(same_size_batches(rows, lambda row: sizes[row.key], sampling.batch_size))
    rendered, applied = 0, False
    for batch in batches[accelerator.process_index :: accelerator.num_processes]:
        stop.check()
        if not all(edit_path(folder, checkpoint, row.key).exists() for row in batch):
            if not applied:  # a checkpoint that is done costs nothing
                apply_checkpoint(editor, checkpoint)
                applied = True
            for row, image in zip(batch, _edits(editor, batch, sampling, checkpoint.name), strict=True):
                write_image(edit_path(folder, checkpoint, row.key), to_image(image))
            rendered += len(batch)
        progress(len(batch))
    return rendered


def _edits(editor: Editor, batch: Sequence[Row], sampling: Sampling, name: str) -> list[Tensor]:
    prompts = [
        Prompt(decode_image(row.source.read(), row.source.label), row.instruction, (), (), row.key) for row in batch
    ]
    conditions = encode(editor, prompts, sampling.guidance_scale)
    generators = [generator(sampling.seed, EVALUATION, _number(row.key)) for row in batch]
    latents = sample_ode(editor, conditions, generators, sampling.steps, sampling.guidance_scale)
    return decode(editor, latents, conditions, f"{name}, {batch[0].key} to {batch[-1].key}")


def _number(key: str) -> int:
    """A row's noise goes by its key, so that rows may come and go around it."""
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big")


# --- the folder


def claim(
    folder: Path, facts: dict[str, Any], checkpoints: Sequence[Checkpoint], rows: Sequence[Row], *, resume: bool
) -> None:
    """Writes `rendering.json`, or checks that the one that is there says the same.

    Args:
        facts: settings on which the pixels depend.
        rows: their keys are written, by which `clear` knows what is the rendering's.
        resume: whether a rendering may be there. More checkpoints than it had are welcome.

    Raises:
        RunError: another setting, or a checkpoint of that name with other content.
    """
    path = folder / SETTINGS_NAME
    digests = {checkpoint.name: checkpoint.digest() for checkpoint in checkpoints}
    if resume and path.exists():
        known = read_json(path)
        for name, value in facts.items():
            if known.get(name) != value:
                raise RunError(
                    f"{folder} was rendered with {name} = {known.get(name)!r}, and now it is {value!r}; give what it was, "
                    "or start anew with --overwrite."
                )
        before = known.get("checkpoints", {})
        changed = [name for name, digest in digests.items() if before.get(name, digest) != digest]
        if changed:
            raise RunError(
                f"The checkpoint {changed[0]!r} is another one than {folder} was rendered with; give it another name "
                "(NAME=PATH), or start anew with --overwrite."
            )
        digests = {**before, **digests}
    write_json(path, {**facts, "checkpoints": digests, "keys": [row.key for row in rows]})


def rendered_checkpoints(folder: Path) -> list[Checkpoint]:
    """Every checkpoint that `rendering.json` knows, this run's and those of the runs before it, by name alone."""
    return [Checkpoint(name) for name in read_json(folder / SETTINGS_NAME)["checkpoints"]]


def with_edits(dataset: Dataset, folder: Path, checkpoints: Sequence[Checkpoint]) -> Dataset:
    """The rows with the rendered edits as outputs, also written to `manifest.jsonl`.

    An edit that an earlier run was stopped before is listed as missing.

    Raises:
        RunError: the disk refuses.
    """
    names = tuple(checkpoint.name for checkpoint in checkpoints)
    rows, lines, problems = [], [], []
    for row in dataset.rows:
        paths = {}
        for checkpoint in checkpoints:
            path = edit_path(folder, checkpoint, row.key)
            if path.exists():
                paths[checkpoint.name] = path
                continue
            detail = f"{checkpoint.name} was stopped before it edited {row.key!r}; give it again with --resume."
            problems.append(Problem("missing_output", detail, row.key, checkpoint.name))
        rows.append(replace(row, outputs={name: ImageFile(path) for name, path in paths.items()}))
        line: dict[str, Any] = {"key": row.key, "source": source_path(folder, row.key).relative_to(folder).as_posix(),
                "instruction": row.instruction, "category": row.category}  # fmt: skip
        line |= {name: list(aspects) for name, aspects in (("preserve", row.preserve), ("target", row.target)) if aspects}
        line["outputs"] = {name: path.relative_to(folder).as_posix() for name, path in paths.items()}
        lines.append(json.dumps(line, ensure_ascii=False))
    text = "\n".join(lines) + "\n"
    write_atomic(folder / MANIFEST_NAME, lambda path: path.write_text(text, encoding="utf-8"))
    return replace(dataset.with_rows(rows, problems), models=names)


def known_truth(
    folder: Path, checkpoints: Sequence[Checkpoint], count: int, seed: int, size: int
) -> dict[str, dict[str, float]]:
    """Means of what is known of procedural edits without any metric (`measure_edit`), by checkpoint; of one whose edits
    are not all there nothing is said.

    The reader sees by it whether the report's order is the true one.
    """
    prompts, result = ProceduralPrompts(seed, "test", size), {}
    for checkpoint in checkpoints:
        if not all(edit_path(folder, checkpoint, prompts[index].key).exists() for index in range(count)):
            continue
        measures = []
        for index in range(count):
            prompt = prompts[index]
            assert prompt.edit is not None
            ref = ImageFile(edit_path(folder, checkpoint, prompt.key))
            measures.append(measure_edit(prompt.edit, decode_image(ref.read(), ref.label)))
        drifts = [m.drift for m in measures if m.drift == m.drift]  # NaN where an edit changes everything
        result[checkpoint.name] = {
            "edit_success": sum(m.success for m in measures) / count,
            "drift": sum(drifts) / max(1, len(drifts)),
            "object_lost": sum(m.object_lost for m in measures) / count,
            "l1_to_ideal": sum(m.l1_to_ideal for m in measures) / count,
            "copy_rate": sum(m.copied for m in measures) / count,
        }
    return result


def files_to_clear(folder: Path) -> list[Path]:
    """What `clear` would remove: the files that `rendering.json` names, and none where there is no such file.

    Raises:
        RunError: where a rendering would write there are files of someone else, or `rendering.json` is damaged.
    """
    pictures = [path for name in ("sources", "edits") for path in sorted((folder / name).rglob("*")) if _is_file(path)]
    texts = [path for name in (MANIFEST_NAME, "truth.json") if _is_file(path := folder / name)]
    settings = folder / SETTINGS_NAME
    ours: set[Path] = set()
    if settings.exists():
        known = read_json(settings)
        names, keys = (known.get(name) if isinstance(known, dict) else None for name in ("checkpoints", "keys"))
        if not isinstance(names, dict) or not isinstance(keys, list) or "editor" not in known:
            raise RunError(f"{settings} is of no rendering of this version; give another --output_dir, or empty {folder}.")
        ours = {source_path(folder, key) for key in keys} | {settings, *texts}
        ours |= {edit_path(folder, Checkpoint(name), key) for name in names for key in keys}
    else:
        texts += [path for path in sorted((folder / "report").rglob("*")) if _is_file(path)]  # `evaluate` would replace it
    foreign = [path for path in (*pictures, *texts) if path not in ours and not path.name.startswith(TEMPORARY)]
    if foreign:
        raise RunError(
            f"--overwrite would write where no rendering of this command has written {foreign[0].relative_to(folder)}; give "
            "another --output_dir, or move it."
        )
    return [path for path in (*pictures, *texts, settings) if _is_file(path)]


def clear(folder: Path, rows: Sequence[Row] = ()) -> None:
    """Removes what a rendering wrote, and nothing else.

    Args:
        rows: that are to be edited next; their sources must not be among it.

    Raises:
        RunError: as `files_to_clear`, a row's source would go, or the disk refuses.
    """
    files = files_to_clear(folder)
    gone = {file.resolve() for file in files}
    for row in rows:
        if isinstance(row.source, ImageFile) and row.source.path.resolve() in gone:
            raise RunError(f"--overwrite would delete {row.source.label}, the source of {row.key!r}; give another --output_dir.")
    with disk_errors(folder):
        for file in files:
            file.unlink(missing_ok=True)
        homes = [path for name in ("sources", "edits") for path in ((folder / name), *(folder / name).rglob("*"))]
        for home in sorted(homes, reverse=True):  # the innermost first
            if home.is_dir() and not home.is_symlink() and not any(home.iterdir()):
                home.rmdir()


def _is_file(path: Path) -> bool:
    return path.is_symlink() or path.is_file()
