"""The released checkpoint layout: `config.json` and a plain state dict `model.pt`, LoRA adapters included."""

from __future__ import annotations

import json
import pickle
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tpips_reward.backbone import Backbone
from tpips_reward.backbone_files import empty_backbone, fill, has_processor_files, listing, read_json, stored_weights
from tpips_reward.errors import TPIPSError
from tpips_reward.fusion import EarlyFusion, LateFusion, MidFusion
from tpips_reward.fusion.base import FusionModule, accumulation_dtype
from tpips_reward.fusion.distance import DEFAULT_PROBES
from tpips_reward.lora import LORA, check_adapters, check_alpha, place_adapters

FAMILY = "qwen3_vl_embed"
DEFAULT_INSTRUCTION = "Represent the user's input."
WITH_ADAPTERS = "channel_lora"
_FAMILIES = ("activation_dist_", "similarity_")
_LANGUAGE, _VISUAL = "language_model.", "visual."
_LEGACY = pickle.dumps(0x1950A86A20F9469CFC6C, protocol=2)  # begins what torch.save wrote before it wrote zip files


@dataclass(frozen=True)
class Layout:
    """Where a fusion's file keeps the towers, and what makes a fusion of the filled backbone.

    `own` are the prefixes of parameters beside the towers. `lora_targets` are the linear layers of a decoder layer that
    training adapts. `build` reads the fusion's options from the config; its own parameters are filled in afterwards.
    """

    language: str
    visual: str
    own: tuple[str, ...]
    lora_targets: tuple[str, ...]
    build: Callable[[Backbone, dict[str, Any]], FusionModule]


def _build_late(backbone: Backbone, config: dict[str, Any]) -> LateFusion:
    return LateFusion(backbone)


def _build_mid(backbone: Backbone, config: dict[str, Any]) -> MidFusion:
    return MidFusion(
        backbone,
        probe_layers=config.get("activation_dist_layers"),
        num_probes=config.get("activation_dist_num_probes", DEFAULT_PROBES),
        text_pool=config.get("activation_dist_text_pool", "mean"),
    )


def _build_early(backbone: Backbone, config: dict[str, Any]) -> EarlyFusion:
    return EarlyFusion(backbone)


# Options that change what a score means, and the values that are supported; those of None are checked where they are
# used. What is not listed here and looks like such an option is refused: it cannot be known what it does.
_OPTIONS: dict[str, tuple[Any, ...] | None] = {
    "similarity_pooling": ("last_token",),
    "instruction": (None, DEFAULT_INSTRUCTION),
    "activation_dist_text_cond": (True,),
    "activation_dist_tuning": (WITH_ADAPTERS, "channel"),
    "activation_dist_text_pool": None,
    "activation_dist_num_probes": None,
    "activation_dist_layers": None,
}


def check_options(config: dict[str, Any], where: str) -> None:
    """Refuse options of a released config.json that are not supported, before any weights are read.

    Raises:
        TPIPSError: names the option, its value, and what is supported.
    """
    for name, value in config.items():
        if name not in _OPTIONS:
            if name.startswith(_FAMILIES):
                known = ", ".join(option for option in _OPTIONS if option.startswith(_FAMILIES))
                raise TPIPSError(f"{where}: the option {name} is unknown; known are {known}.")
            continue
        supported = _OPTIONS[name]
        if supported is not None and not any(type(value) is type(one) and value == one for one in supported):
            shown = " or ".join(json.dumps(one) for one in supported)
            raise TPIPSError(f"{where}: {name} {value!r} is not supported in this version; only {shown} is.")


_ATTENTION = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_OUTPUT = ("self_attn.o_proj",)
_MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")

# A fusion that is added gets its own line here: prefixes (facts of the released files) and a builder.
LAYOUTS: dict[str, Layout] = {
    "embedding": Layout("backbone.model.language_model.", "backbone.model.visual.", (), _ATTENTION + _MLP, _build_late),
    "activation_dist": Layout(
        "extractor.backbone.base_model.model.model.language_model.",
        "extractor.backbone.base_model.model.model.visual.",
        ("head.",),
        _ATTENTION + _OUTPUT,
        _build_mid,
    ),
    "early_fusion": Layout(
        "backbone.language_model.", "backbone.visual.", ("register_embed.",), _ATTENTION + _OUTPUT + _MLP, _build_early
    ),
}


def is_released_layout(folder: Path) -> bool:
    """Whether a folder looks like a released checkpoint."""
    return (folder / "model.pt").is_file() and (folder / "config.json").is_file()


def load_released(
    folder: Path, find_backbone: Callable[[str, bool], Path], dtype: torch.dtype, merge_lora: bool = True
) -> FusionModule:
    """A fusion from a released checkpoint, on the CPU.

    Args:
        folder: holds config.json and model.pt.
        find_backbone: (name, whether its weights are needed) -> the backbone's folder.
        dtype: of the weights.
        merge_lora: fold the adapters into the weights; otherwise they stay apart as peft layers.

    Raises:
        TPIPSError: an unknown type, missing, unexpected or misshapen weights, adapters that were never trained.
    """
    config = read_json(folder / "config.json").get("model")
    if not isinstance(config, dict):
        raise TPIPSError(f"{folder / 'config.json'} has no 'model' section; it is no TPIPS checkpoint.")
    layout = _layout(config, folder)
    check_options(config, str(folder / "config.json"))
    where = str(folder / "model.pt")
    towers, own = _split(read_state(folder / "model.pt"), layout, where)
    partial = [tower for tower in (_LANGUAGE, _VISUAL) if not _has_base_weights(towers, tower)]
    backbone_folder = find_backbone(str(config.get("name")), bool(partial))
    backbone = empty_backbone(backbone_folder, folder if has_processor_files(folder) else backbone_folder)
    adapted = check_lora(towers, config, backbone.config.text_config.num_hidden_layers, layout.lora_targets, where)
    for tower in partial:
        towers.update(_from_backbone(backbone_folder, tower, adapted))
    if adapted:
        rank = int(towers[adapted[0] + LORA[0]].shape[0])
        alpha = check_alpha(config.get("lora_alpha", 2 * rank), str(folder / "config.json"))
        towers = place_adapters(backbone.model, towers, adapted, rank, alpha, dtype, merge_lora)
    fill(backbone.model, {name: value.to(dtype) for name, value in towers.items()}, where)
    with torch.device("meta"):  # no random numbers are drawn for parameters that are assigned next
        fusion = layout.build(backbone, config)
    wide = accumulation_dtype(dtype)
    fusion.load_own({name: value.to(wide) for name, value in own.items()}, where)
    return fusion


def _layout(config: dict[str, Any], folder: Path) -> Layout:
    kind, family = config.get("type"), config.get("backbone_family", FAMILY)
    if kind not in LAYOUTS:
        raise TPIPSError(f"{folder} is of type {kind!r}; known types are {', '.join(LAYOUTS)}.")
    if family != FAMILY:
        raise TPIPSError(f"{folder} has the backbone family {family!r}; only {FAMILY!r} is supported.")
    return LAYOUTS[kind]


def read_state(path: Path) -> dict[str, Tensor]:
    """A state dict, memory-mapped, without running any code of the file.

    Raises:
        TPIPSError: a damaged file, or one that holds anything but tensors.
    """
    damaged = f"{path} is damaged, or holds more than tensors"
    try:
        with path.open("rb") as file:
            legacy = file.read(len(_LEGACY)) == _LEGACY
            whole = zipfile.is_zipfile(file)
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True) if whole else None
    except pickle.UnpicklingError:  # PyTorch would recommend to run what the file holds
        raise TPIPSError(f"{damaged}; fetch it again.") from None
    except Exception as error:  # a damaged pickle fails in many ways
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise TPIPSError(f"{damaged} ({reason}); fetch it again.") from error
    if legacy:
        raise TPIPSError(f"{path} is in PyTorch's format of before 1.6, which cannot be memory-mapped; save it again with torch.save.")
    if not whole:
        raise TPIPSError(f"{damaged}; fetch it again.")
    if not isinstance(state, dict) or not all(isinstance(k, str) and isinstance(v, Tensor) for k, v in state.items()):
        raise TPIPSError(f"{path} is no plain state dict of tensors.")
    if empty := sorted(name for name, value in state.items() if value.is_meta):
        raise TPIPSError(f"{path} has no numbers for {listing(empty)} (tensors on the meta device); save it again with them.")
    return state


def _split(state: dict[str, Tensor], layout: Layout, where: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """File names -> the model's names of both towers (adapters included), and the fusion's own parameters."""
    towers: dict[str, Tensor] = {}
    own: dict[str, Tensor] = {}
    unknown = []
    for name, value in state.items():
        if name.startswith(layout.language):
            towers[_LANGUAGE + name.removeprefix(layout.language).removeprefix("base_model.model.")] = value
        elif name.startswith(layout.visual):
            towers[_VISUAL + name.removeprefix(layout.visual)] = value
        elif name.startswith(layout.own) and layout.own:
            own[name] = value
        else:
            unknown.append(name)
    if unknown:
        raise TPIPSError(f"{where} has {len(unknown)} unexpected weights ({listing(sorted(unknown))}).")
    return towers, own


def check_lora(
    towers: dict[str, Tensor], config: dict[str, Any], layers: int, targets: tuple[str, ...], where: str
) -> list[str]:
    """Names of the adapted layers, after checking that every adapter is whole, of the stated rank, and trained.

    Args:
        layers: of the backbone's language tower; targets: what training adapts in each of them.

    Raises:
        TPIPSError: a missing half or layer, another rank than config.json says, all lora_B zero, no adapters where
            the config asks for some, or some where it denies them.
    """
    adapted = check_adapters(towers, config.get("lora_r"), where)
    denied = {
        "use_lora": not config.get("use_lora", True),
        "full_finetune": bool(config.get("full_finetune", False)),
        "activation_dist_tuning": config.get("type") == "activation_dist"
        and config.get("activation_dist_tuning", WITH_ADAPTERS) != WITH_ADAPTERS,
    }
    denials = {name: config[name] for name, denies in denied.items() if denies}
    if adapted and denials:
        raise TPIPSError(
            f"{where} holds LoRA adapters, which config.json denies ({json.dumps(denials)}); the files do not belong together."
        )
    if not adapted and not denials:
        raise TPIPSError(f"{where} holds no LoRA adapters, which config.json asks for; without them it is untrained.")
    if not adapted:
        return []
    _check_every_layer(adapted, layers, targets, where)
    return adapted


def _check_every_layer(adapted: list[str], layers: int, targets: tuple[str, ...], where: str) -> None:
    """What training adapted must be there in every decoder layer: a missing adapter is a hole, not a choice."""
    present = set(adapted)
    whole = {f"{_LANGUAGE}layers.{number}.{target}" for number in range(layers) for target in targets}
    missing, surplus = sorted(whole - present), sorted(present - whole)
    if missing:
        raise TPIPSError(f"{where} lacks the adapters of {listing(missing)}; the file is incomplete.")
    if surplus:
        raise TPIPSError(f"{where} has adapters where this fusion has none: {listing(surplus)}.")


def _has_base_weights(towers: dict[str, Tensor], tower: str) -> bool:
    return any(name.startswith(tower) and not name.endswith(LORA) for name in towers)


def _from_backbone(folder: Path, tower: str, adapted: list[str]) -> dict[str, Tensor]:
    found = {}
    for name, value in stored_weights(folder):
        plain = name.removeprefix("model.")
        if plain.startswith(tower):
            layer = plain.removesuffix(".weight")
            found[f"{layer}.base_layer.weight" if layer in adapted else plain] = value
    return found
