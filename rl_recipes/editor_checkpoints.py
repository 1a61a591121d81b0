"""What an evaluation compares: the editor as it is, with an adapter, or with all weights of a run; found and put on."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open

from rl_recipes.editors import Editor, EditorError, full
from rl_recipes.editors.lora import FILE_NAME
from rl_recipes.runs import disk_errors
from tpips_reward.errors import TPIPSError
from tpips_reward.evaluation.rows import check_model_name

#: The column of the editor as it is.
BASE = "base"


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


def check_checkpoints(editor: Editor, checkpoints: Sequence[Checkpoint]) -> None:
    """Finds what does not fit the editor before anything is rendered; leaves the editor as it is.

    Adapters are put on and taken off again. Of all weights the names and shapes are compared, for they would stay.

    Raises:
        EditorError: as `apply_checkpoint`.
    """
    for checkpoint in checkpoints:
        if checkpoint.file is not None:
            apply_checkpoint(editor, checkpoint)
    editor.pipe.unload_lora_weights()
    for checkpoint in checkpoints:
        if checkpoint.weights is not None:
            full.check_weights(editor.transformer, checkpoint.weights)


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
