"""Full fine-tuning: all of a transformer's weights train, and a copy of those it began with is the reference policy."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from safetensors import SafetensorError, safe_open
from torch import nn
from torch.distributed.fsdp import FSDPModule

from rl_recipes.editors import lora
from rl_recipes.editors.errors import EditorError
from rl_recipes.shares import gathered
from rl_recipes.swapping import swapped
from tpips_reward.files import make_readable

FOLDER = "transformer"
#: What `save_pretrained` writes: one file, or shards and what lists them.
_FILE = "diffusion_pytorch_model.safetensors"
_INDEX = f"{_FILE}.index.json"


class FullWeights:
    """The trained weights of `transformer`; takes as much memory again for the copy.

    Raises:
        EditorError: the transformer is not in float32, where small updates would be rounded away, or has an adapter.
    """

    def __init__(self, transformer: Any) -> None:
        if lora.has_adapter(transformer):
            raise EditorError("The transformer has a LoRA adapter; load the editor anew to train all of its weights.")
        other = next((p.dtype for p in transformer.parameters() if p.dtype != torch.float32), None)
        if other is not None:
            raise EditorError(
                f"Full fine-tuning needs float32 weights, but the transformer's are {other}: updates would be rounded away. "
                "Load the editor with dtype float32; mixed precision (bf16) still computes fast."
            )
        self.transformer = transformer.requires_grad_(True)
        self._reference = [p.detach().clone() for p in transformer.parameters()]

    def parameters(self) -> list[nn.Parameter]:
        """All of the transformer's parameters."""
        return list(self.transformer.parameters())

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """The weights that training began with, for the block; graphs built before stay valid."""
        with swapped(self.parameters(), self._reference):
            yield

    def save(self, folder: Path) -> Path:
        """Write `folder`/transformer as diffusers does; `from_pretrained` of the transformer's class takes it.

        Where processes share out the weights all must call it, and the main one writes.
        """
        target = folder / FOLDER
        whole = _whole(self.transformer)
        if whole is None:
            return target
        target.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".full-") as scratch:
            whole.save_pretrained(scratch, safe_serialization=True)
            for path in sorted(Path(scratch).iterdir()):
                make_readable(path)
                os.replace(path, target / path.name)
        return target


def _whole(transformer: Any) -> Any:
    """The transformer as it was before FSDP2, with its weights in the main process; None in the others."""
    classes: tuple[Any, ...] = type(transformer).__mro__
    if FSDPModule not in classes:
        return transformer
    weights = gathered(transformer.state_dict())
    if torch.distributed.get_rank() != 0:
        return None
    kind = next(kind for kind in classes if not issubclass(kind, FSDPModule))
    with init_empty_weights():
        whole = kind.from_config(transformer.config)
    whole.load_state_dict(weights, assign=True)
    return whole


def weight_files(folder: Path) -> list[Path]:
    """The files of a saved transformer: one, or the shards that its index lists.

    Raises:
        EditorError: there are none, or the index cannot be read or lists a file that is not there.
    """
    index = folder / _INDEX
    if not index.is_file():
        if not (folder / _FILE).is_file():
            raise EditorError(f"{folder} holds no weights of a transformer: there is no {_FILE} in it.")
        return [folder / _FILE]
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        files = [folder / Path(name).name for name in names]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise EditorError(f"{index} cannot be read ({type(error).__name__}); save the weights again.") from error
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise EditorError(f"{folder} lacks {', '.join(missing)}, which its index lists; copy the folder again.")
    return files


def check_weights(transformer: nn.Module, folder: Path) -> None:
    """Reads the names and shapes of saved weights, and compares them with a transformer's.

    Raises:
        EditorError: a file cannot be read, or names and shapes are not those of this transformer.
    """
    own = transformer.state_dict()
    shapes: dict[str, list[int]] = {}
    with _reading(folder):
        for file in weight_files(folder):
            with safe_open(file, "pt") as content:
                shapes |= {name: content.get_slice(name).get_shape() for name in content.keys()}  # noqa: SIM118
    wrong = [name for name in own if shapes.get(name) != list(own[name].shape)] + [name for name in shapes if name not in own]
    if wrong:
        raise EditorError(
            f"The weights in {folder} do not fit this editor's transformer ({len(wrong)} of {len(own)} differ, the first "
            f"is {wrong[0]}); give the weights of this editor."
        )


@torch.no_grad()
def load_weights(transformer: nn.Module, folder: Path) -> None:
    """Puts saved weights in the place of a transformer's own, in its dtype and on its device; one tensor at a time.

    Raises:
        EditorError: as `check_weights`; then nothing is changed.
    """
    check_weights(transformer, folder)
    own = transformer.state_dict()
    with _reading(folder):
        for file in weight_files(folder):
            with safe_open(file, "pt") as content:
                for name in content.keys():  # noqa: SIM118
                    own[name].copy_(content.get_tensor(name))


@contextmanager
def _reading(folder: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise EditorError(f"The weights in {folder} cannot be read ({error}); they must be safetensors files.") from error
