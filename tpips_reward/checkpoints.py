"""`load_metric` and `save_metric`: built-in, released, Hub and folder checkpoints."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from tpips_reward.attention import choose_kernel
from tpips_reward.backbone import Backbone
from tpips_reward.backbone_files import SMALL_FILES, empty_backbone, fill, read_json, stored_weights
from tpips_reward.calibration import CALIBRATION_NAME, Calibration, no_calibration
from tpips_reward.devices import parse_device
from tpips_reward.dtypes import weights_dtype
from tpips_reward.errors import TPIPSError
from tpips_reward.files import make_readable, remove
from tpips_reward.fusion import FUSIONS
from tpips_reward.fusion.base import FusionModule, accumulation_dtype
from tpips_reward.lora import (
    ADAPTER_FOLDER,
    LORA,
    base_state,
    merged_state,
    place_adapters,
    read_adapters,
    save_adapters,
)
from tpips_reward.metric import Metric
from tpips_reward.released import is_released_layout, load_released

RELEASED = {
    "late": "sywang/TPIPS-Embed-Qwen3VL-8B",
    "mid": "sywang/TPIPS-ActDiff-Qwen3VL-8B",
    "early": "sywang/TPIPS-EarlyFusion-Qwen3VL-8B",
}
RELEASED_LICENSE = "noncommercial; see the model card"
_RELEASED_SOURCES = {*(f"released:{key}" for key in RELEASED), *RELEASED.values()}
_RELEASED_NAMES = ", ".join(f"released:{key}" for key in RELEASED)
CONFIG_NAME = "tpips_config.json"
FORMAT_VERSION = 1
_TOWERS = ("language_model.", "visual.")
# What saving a metric may write, or have left in a folder, and loading would read; `CONFIG_NAME` beside it.
_OURS = (
    "model.safetensors",
    "model.safetensors.index.json",
    "model-*-of-*.safetensors",
    "config.json",
    "*processor_config.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.*",
    "additional_chat_templates",
    CALIBRATION_NAME,
    ADAPTER_FOLDER,
)
_STAGING = ".saving-"
BUILTIN = "builtin:"
_BUILTIN = Path(__file__).parent / "builtin"


def load_metric(
    source: str | os.PathLike[str],
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | str | None = None,
    revision: str | None = None,
    merge_lora: bool = True,
    attention: str | None = None,
    compile: bool = False,
    cache_dir: str | os.PathLike[str] | None = None,
    local_files_only: bool = False,
) -> Metric:
    """Load a metric, ready to score: eval mode, weights without gradients.

    Args:
        source: "builtin:late" (ships with the package), "released:late" (the published 8B weights), a Hub id, or a
            folder that holds a released checkpoint (config.json, model.pt) or what `save_pretrained` wrote.
        device: where it runs; None: the GPU if there is one.
        dtype: "float32", "bfloat16" or "float64", or the torch.dtype; None: float32 on the CPU, bfloat16 elsewhere.
        revision: branch, tag or commit of a Hub repository.
        merge_lora: fold a checkpoint's adapters into its weights; False keeps those apart that it has apart (needs peft).
        attention: "sdpa", "flash" (FlashAttention 2), or None for the fastest that runs on the device.
        compile: compile the layers with torch.compile; the first calls take minutes.
        cache_dir, local_files_only: as in transformers; HF_HUB_OFFLINE works too.

    Raises:
        TPIPSError: an unknown source, an incomplete or damaged checkpoint, a refused dtype, an attention that does not
            run here.

    Example:
        >>> metric = load_metric("builtin:late", device="cpu")  # doctest: +SKIP
    """
    target = parse_device(device)
    kind = weights_dtype(dtype, target)
    choose_kernel(attention, target, kind)  # before the weights are read
    hub = {"revision": revision, "cache_dir": cache_dir, "local_files_only": local_files_only}
    folder = _locate(source, revision, hub)
    try:
        if (folder / CONFIG_NAME).is_file():
            fusion, info = _load_own(folder, kind, merge_lora)
        elif is_released_layout(folder):
            fusion = load_released(folder, partial(_find_backbone, folder, hub), kind, merge_lora)
            info = {"license": RELEASED_LICENSE} if str(source) in _RELEASED_SOURCES else {}
        else:
            raise _no_checkpoint(folder)
        change_scale = info.pop("change_scale", None)
        fusion.requires_grad_(False)
        known = folder / CALIBRATION_NAME
        calibration = Calibration.load(known) if known.is_file() else None
        facts = {"source": str(source), **info}
        metric = Metric(fusion, change_scale=change_scale, info=facts, calibration=calibration)
    except TPIPSError:
        raise
    except Exception as error:  # configs, templates and tokenizers that are damaged fail in many ways
        reason = " ".join(str(error).split())[:300]
        raise TPIPSError(
            f"{folder} cannot be loaded ({type(error).__name__}: {reason}); a file is damaged, or its files do not belong "
            "together. Fetch it again."
        ) from error
    metric.to(target).set_attention(attention)
    return metric.compile() if compile else metric


def check_metric(
    source: str | os.PathLike[str],
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | str | None = None,
    revision: str | None = None,
    calibrated: bool = False,
) -> None:
    """What can be known of a metric before its weights are loaded, so that a typo does not cost the hours before.

    A checkpoint on the Hub is fetched.

    Args:
        source, device, dtype, revision: as for `load_metric`.
        calibrated: whether a calibration must lie beside the metric.

    Raises:
        TPIPSError: an unknown source, device or dtype, a folder without a checkpoint, or a calibration that is missing or
            damaged.
    """
    weights_dtype(dtype, parse_device(device))
    folder = _locate(source, revision, {"revision": revision})
    if not (folder / CONFIG_NAME).is_file() and not is_released_layout(folder):
        raise _no_checkpoint(folder)
    if calibrated:
        if not (folder / CALIBRATION_NAME).is_file():
            raise no_calibration()
        Calibration.load(folder / CALIBRATION_NAME)


def _locate(source: str | os.PathLike[str], revision: str | None, hub: dict[str, Any]) -> Path:
    if not isinstance(source, (str, os.PathLike)):
        raise TPIPSError(f"A metric is named by a text or a path such as 'builtin:late', not by {source!r}.")
    folder = resolve(str(os.fspath(source)), hub)
    if revision is not None and (str(source).startswith("builtin:") or Path(source).expanduser().is_dir()):
        raise TPIPSError(
            f"revision {revision!r} names a version on the Hub, but {str(source)!r} is on this machine; leave it out."
        )
    return folder


def _no_checkpoint(folder: Path) -> TPIPSError:
    return TPIPSError(
        f"{folder} is no TPIPS checkpoint: it has neither {CONFIG_NAME} (ours) nor config.json and model.pt (released)."
    )


def resolve(source: str, hub: dict[str, Any]) -> Path:
    """A source's folder on this machine, fetched where it is not there yet.

    Raises:
        TPIPSError: the source names nothing that exists.
    """
    scheme, _, name = source.partition(":")
    if scheme == "builtin" and name:
        folder = _BUILTIN / name
        if not (folder / CONFIG_NAME).is_file():
            there = sorted(f"builtin:{path.parent.name}" for path in _BUILTIN.glob(f"*/{CONFIG_NAME}"))
            raise TPIPSError(f"There is no metric {source!r}; installed are: {', '.join(there) or 'none'}.")
        return folder
    if scheme == "released" and name:
        if name not in RELEASED:
            raise TPIPSError(f"There is no metric {source!r}; known are {_RELEASED_NAMES}.")
        return _from_hub(RELEASED[name], [*SMALL_FILES, "*.pt"], hub)
    folder = Path(source).expanduser()
    if source and folder.is_dir():
        return folder
    if _is_hub_id(source):
        return _from_hub(source, [*SMALL_FILES, "*.pt", "*.safetensors"], hub)
    raise TPIPSError(
        f"The metric {source!r} is no folder and no Hub id (owner/name); known names are builtin:late (or mid, early) and "
        f"{_RELEASED_NAMES}."
    )


def _is_hub_id(source: str) -> bool:
    parts = source.split("/")
    return len(parts) == 2 and all(part and not part.startswith(".") for part in parts) and ":" not in source


def _from_hub(repo: str, patterns: list[str], hub: dict[str, Any]) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(repo, allow_patterns=patterns, **hub))
    except (OSError, ValueError) as error:  # what huggingface_hub raises derives from these
        reason = " ".join(str(error).split())[:300]
        raise TPIPSError(
            f"{repo!r} could not be had from the Hub ({type(error).__name__}: {reason}); check the id, the revision "
            "and the connection, or give a folder."
        ) from error


def _find_backbone(checkpoint: Path, hub: dict[str, Any], name: str, weights: bool) -> Path:
    """A released checkpoint's backbone: a folder seen from here or from beside the checkpoint, or a Hub id."""
    for folder in (Path(name), checkpoint.resolve().parent / name):
        if (folder / "config.json").is_file():
            return folder
    if _is_hub_id(name):
        # the pinned revision is the checkpoint's, not the backbone's
        options = {**hub, "revision": None}
        return _from_hub(name, [*SMALL_FILES, *(["*.safetensors"] if weights else [])], options)
    raise TPIPSError(
        f"The backbone {name!r} that {checkpoint / 'config.json'} names is no folder here or beside the checkpoint, "
        "and no Hub id (owner/name)."
    )


def _load_own(folder: Path, dtype: torch.dtype, merge_lora: bool) -> tuple[FusionModule, dict[str, Any]]:
    """A fusion and what its tpips_config.json says beside it."""
    info = read_json(folder / CONFIG_NAME)
    version, kind, base = (info.pop(name, None) for name in ("format", "fusion", "base"))
    if version != FORMAT_VERSION:
        raise TPIPSError(
            f"{folder / CONFIG_NAME} is of format {version!r}, this version reads {FORMAT_VERSION}; update the package."
        )
    if kind not in FUSIONS:
        raise TPIPSError(f"{folder / CONFIG_NAME} names the fusion {kind!r}; known are {', '.join(FUSIONS)}.")
    home = folder if base is None else _base_folder(base)
    backbone = empty_backbone(home, home)
    where = str(folder / "model.safetensors")
    towers: dict[str, Tensor] = {}
    own: dict[str, Tensor] = {}
    if base is not None:
        towers.update((name, value.to(dtype)) for name, value in stored_weights(home) if name.startswith(_TOWERS))
    for name, value in stored_weights(folder):
        if name.startswith(_TOWERS):
            towers[name] = value
        else:
            own[name] = value.to(accumulation_dtype(dtype))
    if info.pop(ADAPTER_FOLDER, False):
        weights, rank, alpha = read_adapters(folder / ADAPTER_FOLDER)
        adapted = sorted({name.removesuffix(LORA[0]) for name in weights if name.endswith(LORA[0])})
        for layer in adapted:
            if f"{layer}.weight" not in towers:
                raise TPIPSError(f"{folder / ADAPTER_FOLDER} adapts {layer}, which {where} does not have.")
            towers[f"{layer}.base_layer.weight"] = towers.pop(f"{layer}.weight")
        towers = place_adapters(backbone.model, towers | weights, adapted, rank, alpha, dtype, merge_lora)
    fill(backbone.model, {name: value.to(dtype) for name, value in towers.items()}, where)
    fusion = _build(kind, backbone, info.pop("options", {}), folder)
    fusion.load_own(own, where)
    return fusion, info


def _base_folder(base: object) -> Path:
    """The folder of the built-in metric whose weights and files a checkpoint shares.

    Raises:
        TPIPSError: the base is no built-in one, or shares another's files itself.
    """
    if not isinstance(base, str) or not base.startswith(BUILTIN):
        raise TPIPSError(f"The base of a checkpoint must be a built-in metric such as 'builtin:late', not {base!r}.")
    folder = resolve(base, {})
    if "base" in read_json(folder / CONFIG_NAME):
        raise TPIPSError(f"{base} has a base itself, so it cannot be one; use what it is based on.")
    return folder


def _build(kind: str, backbone: Backbone, options: Any, folder: Path) -> FusionModule:
    try:
        with torch.device("meta"):  # no random numbers are drawn for parameters that are assigned next
            return FUSIONS[kind](backbone, **options)
    except TypeError as error:
        raise TPIPSError(
            f"{folder / CONFIG_NAME} has the options {options!r}, which {kind} fusion does not take ({error})."
        ) from error


def save_metric(
    metric: Metric,
    folder: str | os.PathLike[str],
    dtype: torch.dtype | None = None,
    merge_lora: bool = True,
    base: str | None = None,
) -> None:
    """Write a metric as a folder; every file appears whole or not at all, `tpips_config.json` last.

    One process at a time may save to a folder.

    Args:
        metric: as it is; its weights stay where they are.
        folder: made if missing; what it holds of a metric that was saved here before is replaced or removed, other
            files stay.
        dtype: of the stored towers; None keeps it. A fusion's own parameters and adapters are stored as they are.
        merge_lora: store adapters that are still apart folded in; False: in a folder `adapter`, as PEFT does.
        base: a built-in metric; then only what differs from it is stored.

    Raises:
        TPIPSError: the folder cannot be written or holds files of another model, no adapters are apart that could stay so,
            or the base is of another architecture.
    """
    target = Path(folder)
    shared = None if base is None else dict(stored_weights(_base_folder(base)))
    try:
        check_save_folder(target)
        target.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target, prefix=_STAGING) as name:
            staging = Path(name)
            _write_weights(metric.fusion, staging, dtype, merge_lora, shared)
            details = {"format": FORMAT_VERSION, "fusion": metric.fusion.kind, **metric.info}
            if base is None:
                _write_backbone_files(metric.backbone, staging)
            else:
                details["base"] = base
            if metric.fusion.options:
                details["options"] = metric.fusion.options
            if metric.is_calibrated:
                details["change_scale"] = metric.change_scale
            if not merge_lora:
                details[ADAPTER_FOLDER] = True
            details.pop("source", None)
            if metric.calibration is not None:
                metric.calibration.save(staging / CALIBRATION_NAME)
            (staging / CONFIG_NAME).write_text(json.dumps(details, indent=2) + "\n", encoding="utf-8")
            for path in (path for path in staging.rglob("*") if path.is_file()):
                make_readable(path)
            _remove_earlier(target, staging)
            _take_place(staging, target)
        for left in target.glob(f"{_STAGING}*"):  # by processes that were killed
            shutil.rmtree(left, ignore_errors=True)
    except OSError as error:
        raise TPIPSError(f"The metric cannot be saved to {target}: {error}.") from error


def check_save_folder(target: Path) -> None:
    """Refuses a folder with files that saving would replace, and no metric; one that is not there is good.

    Raises:
        TPIPSError: there is such a file, and no metric was saved here: it is somebody else's.
    """
    there = sorted(path.name for pattern in _OURS for path in target.glob(pattern))
    # a process that was killed while it moved the files into their place has left the last of them, ours
    saved = (target / CONFIG_NAME).is_file() or any(target.glob(f"{_STAGING}*/{CONFIG_NAME}"))
    if there and not saved:
        raise TPIPSError(
            f"{target} holds {there[0]}, and no metric was saved there: saving would replace it, or loading would read it with "
            "the new files; give another folder."
        )


def _remove_earlier(target: Path, staging: Path) -> None:
    """What was saved here before and no file takes the place of: loading would read it in place of what is new."""
    earlier = {path for pattern in _OURS for path in target.glob(pattern)}
    for path in sorted(path for path in earlier if path.is_dir() or not (staging / path.name).exists()):
        remove(path)


def _take_place(staging: Path, target: Path) -> None:
    """Moves the files, the config last.

    A first save that is interrupted takes them away again: without a config they would be another model's.
    """
    first = not (target / CONFIG_NAME).exists()
    paths = sorted(staging.iterdir(), key=lambda path: path.name == CONFIG_NAME)
    try:
        for path in paths:
            os.replace(path, target / path.name)
    except BaseException:
        if first and (staging / CONFIG_NAME).exists():
            for path in paths:
                if not path.exists():
                    remove(target / path.name)
        raise


def _write_weights(
    fusion: FusionModule, folder: Path, dtype: torch.dtype | None, merge_lora: bool, shared: dict[str, Tensor] | None
) -> None:
    if not merge_lora:
        save_adapters(fusion.backbone.model, folder / ADAPTER_FOLDER)
    weights = (merged_state if merge_lora else base_state)(fusion.backbone.model)
    stored = {name: value.detach().to("cpu", dtype or value.dtype).contiguous() for name, value in weights.items()}
    if shared is not None:
        if any(name not in shared or shared[name].shape != value.shape for name, value in stored.items()):
            raise TPIPSError("The metric's backbone has another architecture than the base, so nothing can be shared.")
        stored = {name: value for name, value in stored.items() if not torch.equal(value, shared[name].to(value.dtype))}
    stored |= {name: value.detach().to("cpu").contiguous() for name, value in fusion.own_state().items()}
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})


def _write_backbone_files(backbone: Backbone, folder: Path) -> None:
    backbone.config.save_pretrained(folder)
    backbone.tokenizer.save_pretrained(folder)
    if backbone.processor is not None:
        backbone.processor.save_pretrained(folder)
    else:
        content = json.dumps(backbone.settings.to_config(), indent=2) + "\n"
        (folder / "preprocessor_config.json").write_text(content, encoding="utf-8")
    if backbone.chat_template is not None:
        (folder / "chat_template.jinja").write_text(backbone.chat_template, encoding="utf-8")
