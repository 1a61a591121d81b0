"""Which editor class serves which pipeline, and how an editor is loaded. A new family is one file and one line here."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError

from rl_recipes.editors.base import Editor
from rl_recipes.editors.errors import EditorError
from tpips_reward.dtypes import weights_dtype

# pipeline class name (the `_class_name` in model_index.json) -> where its editor is; imported when it is needed
EDITORS = {
    "Flux2KleinPipeline": "rl_recipes.editors.flux2:Flux2Klein",
    "Flux2Pipeline": "rl_recipes.editors.flux2:Flux2",
    "FluxKontextPipeline": "rl_recipes.editors.flux_kontext:FluxKontext",
    "FluxPipeline": "rl_recipes.editors.flux:Flux",
    "QwenImagePipeline": "rl_recipes.editors.qwen_image:QwenImage",
    "QwenImageEditPipeline": "rl_recipes.editors.qwen_image_edit:QwenImageEdit",
    "QwenImageEditPlusPipeline": "rl_recipes.editors.qwen_image_edit_plus:QwenImageEditPlus",
}
BUILTIN = "builtin"
BUILTIN_FOLDER = Path(__file__).resolve().parent.parent / "builtin" / "editor"
# An optional file beside model_index.json with the defaults of this editor, such as {"resolution": 64}.
DEFAULTS_FILE = "editor.json"


def supported_pipelines() -> list[str]:
    """Names of the pipeline classes that have an editor."""
    return sorted(EDITORS)


def load_editor(
    source: str | Path,
    device: torch.device | str | None = None,
    dtype: torch.dtype | str | None = None,
    *,
    resolution: int | None = None,
    revision: str | None = None,
    **options: Any,
) -> Editor:
    """Load an editor; its class follows from the pipeline's own name.

    Args:
        source: "builtin" (shipped with this package), a Hub id such as "Qwen/Qwen-Image-Edit-2511", or a folder.
        device: default: the first GPU, or the CPU where there is none.
        dtype: dtype of the frozen weights, as a torch.dtype or its name; default: bfloat16 on a GPU, float32 on the CPU.
        resolution: side of the square that has as many pixels as an edit; default: the folder's own, or the family's.
        revision: branch, tag or commit on the Hub.
        options: of the editor's class: `attention_backend` for all, `true_cfg_scale` for FLUX.1 and Kontext, ...

    Raises:
        EditorError: no such source, a pipeline without an editor, or an unknown dtype.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(device)
    kind = weights_dtype(dtype, device)
    location = _locate(source, revision)
    editor_class = _editor_class(_read_json(location.index_file, source).get("_class_name"), source)
    if resolution is None and location.defaults is not None:
        resolution = _read_json(location.defaults, source).get("resolution")

    import diffusers

    pipeline_class = getattr(diffusers, editor_class.pipeline_class)
    with _no_progress_bars():
        try:
            # Pickled weights could run code; every editor that is supported comes as safetensors.
            pipe = pipeline_class.from_pretrained(
                location.name, dtype=kind, use_safetensors=True, **location.hub_options
            )
        except (OSError, ValueError, KeyError, TypeError, RuntimeError, SafetensorError) as error:
            reason = " ".join(str(error).split())[:300]
            raise EditorError(
                f"The editor {str(source)!r} is incomplete or damaged ({type(error).__name__}: {reason}); fetch it again."
            ) from error
    return editor_class(pipe, device=device, dtype=kind, resolution=resolution, **options)


def preset_for(source: str) -> str:
    """The preset in rl_recipes/configs for an editor: by its pipeline's class in a folder, by its name on the Hub."""
    name = source
    index = Path(source) / "model_index.json"
    if index.is_file():
        name = str(_read_json(index, source).get("_class_name"))
    name = name.lower()
    if "flux" not in name:
        return "qwen_image_edit"
    return "flux2_klein" if "klein" in name else "flux_kontext"


class _Location(NamedTuple):
    """Where model_index.json is, and what from_pretrained is to be given."""

    name: str
    index_file: Path
    defaults: Path | None
    hub_options: dict[str, Any]


def _locate(source: str | Path, revision: str | None) -> _Location:
    folder = BUILTIN_FOLDER if str(source) == BUILTIN else Path(source)
    if folder.is_dir():
        if revision is not None:
            raise EditorError(
                f"revision {revision!r} names a version on the Hub, but {str(source)!r} is on this machine; leave it out."
            )
        index = folder / "model_index.json"
        if not index.is_file():
            raise EditorError(f"The folder {str(folder)!r} has no model_index.json, so it is no diffusers pipeline.")
        defaults = folder / DEFAULTS_FILE
        return _Location(str(folder), index, defaults if defaults.is_file() else None, {})
    if str(source) == BUILTIN:
        raise EditorError(f"The built-in editor is missing from {str(folder)!r}; reinstall the package.")
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", str(source)) or str(source).startswith("."):
        raise EditorError(
            f"There is no folder {str(source)!r}, and it is no Hub id such as 'Qwen/Qwen-Image-Edit-2511'; "
            f"give one of them, or {BUILTIN!r}."
        )
    from huggingface_hub import hf_hub_download

    try:
        index = Path(hf_hub_download(str(source), "model_index.json", revision=revision))
    except Exception as error:  # the Hub client has many error classes; each means that the editor is out of reach
        raise EditorError(
            f"{str(source)!r} is no folder, and its model_index.json could not be had from the Hub "
            f"({type(error).__name__}); check the name, the network and the login."
        ) from error
    return _Location(str(source), index, None, {"revision": revision})


def _read_json(path: Path, source: str | Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise EditorError(f"{path.name} of the editor {str(source)!r} cannot be read: {error}.") from error
    if not isinstance(content, dict):
        raise EditorError(f"{path.name} of the editor {str(source)!r} holds no JSON object.")
    return content


def _editor_class(pipeline_name: Any, source: str | Path) -> type[Editor]:
    if pipeline_name not in EDITORS:
        raise EditorError(
            f"The editor {str(source)!r} is a {pipeline_name}, which is not supported; supported are: "
            f"{', '.join(supported_pipelines())}."
        )
    module, name = EDITORS[pipeline_name].split(":")
    return getattr(import_module(module), name)


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    """A run has a progress bar of its own; those of loading are hidden, and come back afterwards."""
    from diffusers.utils import logging as diffusers_logging
    from transformers.utils import logging as transformers_logging

    libraries = [log for log in (diffusers_logging, transformers_logging) if log.is_progress_bar_enabled()]
    for log in libraries:
        log.disable_progress_bar()
    try:
        yield
    finally:
        for log in libraries:
            log.enable_progress_bar()
