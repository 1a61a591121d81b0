"""The files of a backbone: config, tokenizer, image settings and weights, in a folder or on the Hub."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import AutoConfig, AutoTokenizer, Qwen3VLConfig, Qwen3VLModel

from tpips_reward.backbone import Backbone
from tpips_reward.errors import TPIPSError
from tpips_reward.preprocess import ImageSettings

# Small files only; the weights are asked for by name when they are needed.
SMALL_FILES = ["*.json", "*.jinja", "*.txt"]
_LISTED = 5


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
        TPIPSError: the file is missing, unreadable, or no JSON object.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise TPIPSError(f"{path.parent} has no {path.name}; the checkpoint is incomplete.") from None
    except (OSError, ValueError) as error:
        raise TPIPSError(f"{path} cannot be read as JSON: {error}.") from error
    if not isinstance(content, dict):
        raise TPIPSError(f"{path} holds {type(content).__name__} where a JSON object is expected.")
    return content


def read_config(folder: Path) -> Qwen3VLConfig:
    """The backbone's config.

    Raises:
        TPIPSError: missing, or not of a Qwen3-VL.
    """
    kind = read_json(folder / "config.json").get("model_type")
    if kind != "qwen3_vl":
        raise TPIPSError(f"{folder / 'config.json'} is of model_type {kind!r}; only 'qwen3_vl' is supported.")
    return AutoConfig.from_pretrained(folder)


def read_settings(folder: Path) -> ImageSettings:
    """Image settings from processor_config.json or preprocessor_config.json, without building a processor."""
    for name in ("processor_config.json", "preprocessor_config.json"):
        if (folder / name).is_file():
            content = read_json(folder / name)
            if name == "preprocessor_config.json" or "image_processor" in content:
                return ImageSettings.from_processor(content)
    raise TPIPSError(
        f"{folder} has no processor_config.json and no preprocessor_config.json, so image limits are unknown."
    )


def read_tokenizer(folder: Path) -> Any:
    """The tokenizer, with its chat template."""
    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise TPIPSError(f"{folder} has no usable tokenizer: {error}") from error


def has_processor_files(folder: Path) -> bool:
    """Whether a checkpoint brings its own tokenizer and image settings."""
    settings = any((folder / name).is_file() for name in ("processor_config.json", "preprocessor_config.json"))
    return settings and any((folder / name).is_file() for name in ("tokenizer.json", "vocab.json"))


def empty_backbone(config_folder: Path, processor_folder: Path) -> Backbone:
    """A backbone on the meta device: all structure, no weights, no memory."""
    config = read_config(config_folder)
    with torch.device("meta"):
        model = Qwen3VLModel._from_config(config, attn_implementation="sdpa", dtype=torch.float32)
    return Backbone(model, read_tokenizer(processor_folder), read_settings(processor_folder))


def fill(model: nn.Module, weights: Mapping[str, Tensor], where: str) -> None:
    """Give a meta-device model its weights (assigned, not copied) and rebuild what is computed from the config.

    Raises:
        TPIPSError: missing or unexpected keys, or shapes that do not fit.
    """
    expected = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    check_keys(expected, weights, where)
    for name, shape in expected.items():
        if tuple(weights[name].shape) != shape:
            raise TPIPSError(
                f"{where}: {name} has shape {tuple(weights[name].shape)}, the config asks for {shape}; "
                "weights and config do not belong together."
            )
    model.load_state_dict(weights, strict=True, assign=True)
    for module in list(model.modules()):
        for name, buffer in list(module.named_buffers(recurse=False)):
            if buffer.is_meta:  # rotary frequencies: never stored, always computed
                setattr(module, name, getattr(type(module)(module.config), name))
    left = [name for name, value in (*model.named_parameters(), *model.named_buffers()) if value.is_meta]
    if left:
        raise TPIPSError(f"{where}: {listing(left)} got no values; this version of transformers is not supported.")


def check_keys(expected: Any, given: Any, where: str) -> None:
    """Refuse missing and unexpected names: random weights would still give plausible scores."""
    missing, surplus = sorted(set(expected) - set(given)), sorted(set(given) - set(expected))
    if missing:
        raise TPIPSError(f"{where} lacks {len(missing)} weights ({listing(missing)}); the file is incomplete.")
    if surplus:
        raise TPIPSError(f"{where} has {len(surplus)} weights that the model does not ({listing(surplus)}).")


def listing(names: list[str]) -> str:
    """The first few names, and how many more."""
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(names[:_LISTED]) + more


def stored_weights(folder: Path, name: str = "model.safetensors") -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of a safetensors file or its shards, memory-mapped.

    Raises:
        TPIPSError: no weights, or a damaged file.
    """
    index = folder / f"{name}.index.json"
    if index.is_file():
        files = sorted(set(read_json(index).get("weight_map", {}).values()))
    else:
        files = [name]
    for file in files:
        path = folder / file
        if not path.is_file():
            raise TPIPSError(f"{folder} has no {file}; the weights are missing.")
        try:
            with safe_open(path, framework="pt") as handle:
                names = handle.keys()
                for key in names:
                    yield key, handle.get_tensor(key)
        except (SafetensorError, OSError) as error:
            raise TPIPSError(f"{path} is damaged or truncated ({error}); fetch it again.") from error
