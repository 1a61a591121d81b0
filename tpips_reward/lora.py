"""LoRA adapters: folded into the weights, kept apart from them, and their files in PEFT's layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from tpips_reward.backbone_files import listing, read_json, stored_weights
from tpips_reward.errors import TPIPSError

#: The folder of the adapters inside of a metric's; transformers and diffusers take it for nothing of their own.
ADAPTER_FOLDER = "adapter"
LORA = (".lora_A.default.weight", ".lora_B.default.weight")
_WEIGHTS, _CONFIG = "adapter_model.safetensors", "adapter_config.json"
_STORED = (".lora_A.weight", ".lora_B.weight")
_PREFIX = "base_model.model."  # PEFT's own, so that PeftModel.from_pretrained reads the folder
# What would make more of an adapter than scale * B A, and the values with which it is no more.
_PLAIN = {"peft_type": "LORA", "use_dora": False, "use_rslora": False, "bias": "none", "rank_pattern": {}, "alpha_pattern": {}}


def lora_layers(model: nn.Module) -> dict[str, Any]:
    """PEFT's LoRA layers of a model that are still apart, by name.

    Raises:
        TPIPSError: several adapters, or another kind than plain LoRA.
    """
    found: dict[str, Any] = {n: m for n, m in model.named_modules() if hasattr(m, "lora_A") and hasattr(m, "base_layer")}
    for name, layer in found.items():
        if len(layer.active_adapters) != 1 or len(layer.lora_A) != 1:
            raise TPIPSError(f"{name} has the adapters {', '.join(layer.lora_A)}; exactly one can be saved.")
        if getattr(layer, "lora_variant", {}):
            raise TPIPSError(f"{name} has an adapter that is no plain LoRA (such as DoRA); it cannot be saved here.")
    return found


def merged_state(model: nn.Module) -> dict[str, Tensor]:
    """A model's state dict with its adapters folded in, under the plain model's names."""
    state = dict(model.state_dict())
    for name, layer in lora_layers(model).items():
        base = layer.base_layer.weight
        delta = layer.get_delta_weight(layer.active_adapters[0]).float()
        state[f"{name}.base_layer.weight"] = (base.float() + delta).to(base.dtype)
    return _plain(state)


def base_state(model: nn.Module) -> dict[str, Tensor]:
    """A model's state dict without its adapters, under the plain model's names."""
    return _plain(dict(model.state_dict()))


def _plain(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.replace(".base_layer.", "."): value for name, value in state.items() if ".lora_" not in name}


def save_adapters(model: nn.Module, folder: Path) -> None:
    """Write a model's adapters as PEFT does: adapter_config.json and adapter_model.safetensors.

    Raises:
        TPIPSError: there are none, or they differ in rank or scale.
    """
    layers = lora_layers(model)
    if not layers:
        raise TPIPSError("No adapters are apart, so none can be kept apart; load the metric with merge_lora=False.")
    kinds = {(layer.r[name], layer.scaling[name]) for layer in layers.values() for name in layer.active_adapters}
    if len(kinds) != 1:
        raise TPIPSError(f"The adapters have different (rank, scale): {sorted(kinds)}; only equal ones can be saved apart.")
    rank, scale = kinds.pop()
    config = {
        **_PLAIN,
        "base_model_name_or_path": None,
        "task_type": None,
        "r": rank,
        "lora_alpha": scale * rank,
        "lora_dropout": 0.0,
        "inference_mode": True,
        "target_modules": list(layers),
    }
    weights = {}
    for name, layer in layers.items():
        for end, part in zip(_STORED, (layer.lora_A, layer.lora_B), strict=True):
            value = part[layer.active_adapters[0]].weight
            weights[f"{_PREFIX}{name}{end}"] = value.detach().to("cpu").clone(memory_format=torch.contiguous_format)
    folder.mkdir()
    save_file(weights, folder / _WEIGHTS, metadata={"format": "pt"})
    (folder / _CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def read_adapters(folder: Path) -> tuple[dict[str, Tensor], int, float]:
    """What `save_adapters` wrote: weights under the names that an adapted model has, rank and alpha.

    Raises:
        TPIPSError: missing or damaged files, adapters that are incomplete, untrained, or no plain LoRA.
    """
    config = read_json(folder / _CONFIG)
    for key, plain in _PLAIN.items():
        if config.get(key, plain) not in (plain, None):
            raise TPIPSError(f"{folder / _CONFIG}: {key} {config[key]!r} is not supported, only {plain!r} is.")
    rank, alpha, targets = config.get("r"), config.get("lora_alpha"), config.get("target_modules")
    broken = TPIPSError(f"{folder / _CONFIG} needs r, lora_alpha and a list of target_modules; it is damaged.")
    if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1 or alpha is None:
        raise broken
    if not isinstance(targets, list) or not all(isinstance(name, str) for name in targets):
        raise broken
    where = str(folder / _WEIGHTS)
    weights = {}
    for name, value in stored_weights(folder, _WEIGHTS):
        for ours, stored in zip(LORA, _STORED, strict=True):
            if name.endswith(stored):
                weights[name.removeprefix(_PREFIX).removesuffix(stored) + ours] = value
                break
        else:
            raise TPIPSError(f"{where} holds {name}, which is no LoRA weight.")
    adapted = set(check_adapters(weights, rank, where))
    if missing := sorted(set(targets) - adapted):
        raise TPIPSError(f"{where} lacks the adapters of {listing(missing)}; the file is incomplete.")
    if surplus := sorted(adapted - set(targets)):
        raise TPIPSError(f"{where} has adapters that {_CONFIG} does not name: {listing(surplus)}.")
    return weights, rank, check_alpha(alpha, str(folder / _CONFIG))


def check_alpha(alpha: object, where: str) -> float:
    """lora_alpha of a config, which scales what the adapters add.

    Raises:
        TPIPSError: no finite number above 0.
    """
    if isinstance(alpha, bool) or not isinstance(alpha, (int, float)) or not 0 < alpha < float("inf"):
        raise TPIPSError(f"{where}: lora_alpha must be a finite number above 0, got {alpha!r}.")
    return float(alpha)


def check_adapters(weights: dict[str, Tensor], rank: int | None, where: str) -> list[str]:
    """Names of the adapted layers, after checking that every adapter is whole, of one rank, and trained.

    Args:
        weights: all of them, or those of the adapters alone.
        rank: what the config says; None: whatever the first one has.

    Raises:
        TPIPSError: a missing half, another rank, all lora_B zero.
    """
    halves = [{name.removesuffix(end) for name in weights if name.endswith(end)} for end in LORA]
    adapted = sorted(halves[0] | halves[1])
    if lonely := sorted(halves[0] ^ halves[1]):
        raise TPIPSError(f"{where} has only one half of the adapters of {listing(lonely)}; the file is incomplete.")
    for layer in adapted:
        shapes = tuple(weights[layer + LORA[0]].shape), tuple(weights[layer + LORA[1]].shape)
        rank = shapes[0][0] if rank is None else rank
        if shapes[0][0] != rank or shapes[1][1] != rank:
            raise TPIPSError(f"{where}: the adapter of {layer} has shapes {shapes}, config.json says lora_r={rank}.")
    if adapted and not any(bool(weights[layer + LORA[1]].any()) for layer in adapted):
        raise TPIPSError(f"{where}: every lora_B is zero, so the adapters change nothing; it is untrained.")
    return adapted


def fold_adapters(towers: dict[str, Tensor], scale: float, dtype: torch.dtype) -> dict[str, Tensor]:
    """W + scale * B A for every adapted layer, computed in float32 (float64 for float64) and rounded once.

    `towers` is used up. Weights that have `dtype` already are changed in place: those of a memory-mapped file are
    private copies page by page, so that no second copy stands beside the file's pages.
    """
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    folded: dict[str, Tensor] = {}
    for name in list(towers):
        if name.endswith(".base_layer.weight"):
            layer = name.removesuffix(".base_layer.weight")
            down, up = (towers.pop(layer + end).to(wide) for end in LORA)
            base = towers.pop(name)
            total = (up @ down).mul_(scale).add_(base)
            folded[f"{layer}.weight"] = base.copy_(total) if base.dtype == dtype else total.to(dtype)
        elif name in towers and not name.endswith(LORA):
            folded[name.replace(".base_layer.", ".")] = towers.pop(name)
    if towers:
        raise TPIPSError(f"The adapters of {listing(sorted(towers))} have no weights to be folded into.")
    return folded


def add_adapters(model: nn.Module, adapted: list[str], rank: int, alpha: float) -> None:
    """Put PEFT layers without weights where the adapters go.

    Raises:
        TPIPSError: peft is not installed.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError:
        raise TPIPSError("merge_lora=False needs peft; install it with pip install peft.") from None
    settings = LoraConfig(r=rank, lora_alpha=alpha, lora_dropout=0.0, target_modules=adapted)
    inject_adapter_in_model(settings, model, low_cpu_mem_usage=True)


def place_adapters(
    model: nn.Module,
    towers: dict[str, Tensor],
    adapted: list[str],
    rank: int,
    alpha: float,
    dtype: torch.dtype,
    merge: bool,
) -> dict[str, Tensor]:
    """Folded weights, or the weights as they are and PEFT layers for them in the (still empty) model."""
    if merge:
        return fold_adapters(towers, alpha / rank, dtype)
    add_adapters(model, adapted, rank, alpha)
    return towers
