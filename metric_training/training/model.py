"""What is trained: a fusion from a metric or a backbone, its adapters, and what stays frozen."""

from __future__ import annotations

from typing import Any

import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import nn

from metric_training.builtin_model import build_late_fusion
from metric_training.training.config import SCRATCH, TrainConfig
from tpips_reward import TPIPSError, load_metric
from tpips_reward.backbone import Backbone
from tpips_reward.backbone_files import empty_backbone, fill, stored_weights
from tpips_reward.checkpoints import CONFIG_NAME, resolve
from tpips_reward.fusion import FUSIONS
from tpips_reward.fusion.base import FusionModule
from tpips_reward.fusion.mid import MidFusion
from tpips_reward.released import is_released_layout

_ATTENTION = ("q_proj", "k_proj", "v_proj")
_MLP = ("gate_proj", "up_proj", "down_proj")
#: The layers that LoRA adapts, by fusion, as in the released checkpoints (of the triplet judge none is released).
LORA_TARGETS: dict[str, tuple[str, ...]] = {
    "late": _ATTENTION + _MLP,
    "mid": (*_ATTENTION, "o_proj"),
    "early": (*_ATTENTION, "o_proj", *_MLP),
    "triplet": (*_ATTENTION, "o_proj", *_MLP),
}


def build_fusion(config: TrainConfig) -> FusionModule:
    """The fusion on the CPU, with only what is trained requiring gradients; the global random state is left alone.

    Frozen weights are bfloat16 with ``bf16``, else float32; what is trained is float32.

    Raises:
        TPIPSError: a source that is neither a metric nor a Qwen3-VL, or layers that it does not have.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        fusion = _fusion(config)
        fusion.requires_grad_(False)
        own = [] if config.objective == "embeddings" else list(fusion.own_state())  # a distance has no part in those
        for name, parameter in fusion.named_parameters():
            parameter.requires_grad_(name in own)
        model = fusion.backbone.model
        if config.objective != "scenes":
            _open_language(model, config)
            _close_unread(fusion, config)
        model.visual.requires_grad_(config.objective == "scenes" or not config.freeze_vision)
    fusion.token_budget = config.token_budget
    if config.gradient_checkpointing:
        fusion.backbone.enable_checkpointing()
    return fusion


def load_backbone(source: str, dtype: torch.dtype) -> Backbone:
    """A plain Qwen3-VL, with or without its language head, from a folder or the Hub.

    Raises:
        TPIPSError: nothing is there, it is of another kind, or weights are missing.
    """
    folder = resolve(source, {})
    backbone = empty_backbone(folder, folder)
    expected = backbone.model.state_dict().keys()
    weights = {}
    for name, value in stored_weights(folder):
        plain = name.removeprefix("model.")
        if plain in expected or not name.startswith("lm_head."):
            weights[plain] = value.to(dtype)
    fill(backbone.model, weights, str(folder))
    return backbone


def load_start(config: TrainConfig) -> FusionModule | Backbone:
    """What training starts from: a metric of the same fusion as it is, or a backbone for a new one.

    Raises:
        TPIPSError: as `build_fusion`.
    """
    dtype = torch.bfloat16 if config.bf16 else torch.float32
    if config.model_name_or_path == SCRATCH:
        return build_late_fusion(config.seed).backbone.to(dtype)
    folder = resolve(config.model_name_or_path, {})
    if (folder / CONFIG_NAME).is_file() or is_released_layout(folder):
        metric = load_metric(config.model_name_or_path, device="cpu", dtype=dtype)
        return metric.fusion if metric.fusion.kind == config.fusion else metric.backbone
    return load_backbone(config.model_name_or_path, dtype)


def _fusion(config: TrainConfig) -> FusionModule:
    backbone = load_start(config)
    if isinstance(backbone, FusionModule):
        _check_probes(backbone, config)
        return backbone
    options = {"num_probes": config.num_probes, "probe_layers": config.probe_layers}
    fusion: FusionModule = FUSIONS[config.fusion](backbone, **options if config.fusion == "mid" else {})
    if config.fusion == "early":
        # the scale of a token: a register of unit variance would outweigh what the layers add to it
        last = fusion.prompts.full(None)[-1]  # type: ignore[union-attr, operator]
        embeddings = backbone.model.language_model.embed_tokens.weight  # type: ignore[union-attr]
        with torch.no_grad():
            fusion.register_embed.weight.copy_(embeddings[last : last + 1])  # type: ignore[union-attr, operator, index]
    return fusion


def _check_probes(start: FusionModule, config: TrainConfig) -> None:
    """Refuses other probe layers than those of the mid metric that training starts from, which keeps its own."""
    if not isinstance(start, MidFusion):
        return
    given = {"probe_layers": config.probe_layers} if config.probe_layers is not None else {"num_probes": config.num_probes}
    kept = (start.probe_layers, len(start.probe_layers), TrainConfig.num_probes)  # the last: not given
    for name, value in given.items():
        if value not in kept:
            raise TPIPSError(
                f"{name} {value} was given, but {config.model_name_or_path} is a mid metric with the probe layers "
                f"{start.probe_layers}, which it keeps; leave {name} out, or start from another fusion."
            )


def _close_unread(fusion: FusionModule, config: TrainConfig) -> None:
    """Freezes the layers behind the last one that mid fusion reads: without gradients, several processes would wait for them."""
    if not isinstance(fusion, MidFusion):
        return
    last = fusion.probe_layers[-1] if config.objective == "embeddings" else max(fusion.probe_layers)
    language: Any = fusion.backbone.model.language_model
    if last < len(language.layers):  # the final norm is part of the last layer's hidden state alone
        for module in (*language.layers[last:], language.norm):
            module.requires_grad_(False)


def _open_language(model: nn.Module, config: TrainConfig) -> None:
    language = model.language_model
    if not config.use_peft:
        language.requires_grad_(True)
        language.embed_tokens.requires_grad_(not config.freeze_embeddings)  # type: ignore[union-attr]
        return
    targets = tuple(config.lora_target_modules or LORA_TARGETS[config.fusion])
    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    chosen = [n for n in linear if n.startswith("language_model.") and n.rpartition(".")[2] in targets]
    missing = set(targets) - {name.rpartition(".")[2] for name in chosen}
    if missing:
        raise TPIPSError(
            f"lora_target_modules names {', '.join(sorted(missing))}, which the language tower does not have; it has "
            f"{', '.join(_linear_names(language))}."  # type: ignore[arg-type]
        )
    settings = LoraConfig(
        r=config.lora_r, lora_alpha=config.lora_alpha, lora_dropout=config.lora_dropout, target_modules=chosen
    )
    inject_adapter_in_model(settings, model)
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            parameter.data = parameter.data.float()
    language.embed_tokens.requires_grad_(not config.freeze_embeddings)  # type: ignore[union-attr]


def _linear_names(language: nn.Module) -> tuple[str, ...]:
    names = (name.rpartition(".")[2] for name, module in language.named_modules() if isinstance(module, nn.Linear))
    return tuple(dict.fromkeys(names))
