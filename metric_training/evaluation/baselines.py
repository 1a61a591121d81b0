"""Baselines by name, and any metric by its source: what `--metric` takes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torchvision.transforms.functional import to_pil_image

from metric_training.evaluation.endpoint_vlm import OPTIONS, EndpointVLM
from metric_training.evaluation.judges import Judge, PairwiseJudge, blind_judge, embedding_judge, metric_judge
from metric_training.evaluation.local_vlm import load_local_vlm
from metric_training.evaluation.vlm import ChoiceJudge, Respondent, score_judge
from tpips_reward import Metric, TPIPSError, load_metric
from tpips_reward.backbone import Backbone
from tpips_reward.chat import ChatClient
from tpips_reward.devices import usable_device

UNTRAINED = "untrained:"
#: Vision-language models: a Hub id or folder follows, or an endpoint and its model, "http://HOST:PORT/v1#MODEL".
VLM_SCORE, VLM_TRIPLET = "vlm-score:", "vlm-triplet:"
_PREFIXES = (UNTRAINED, VLM_SCORE, VLM_TRIPLET)
_SSIM_WINDOW = 11


def load_judge(
    source: str, *, device: str | None = None, dtype: str | None = None, revision: str | None = None
) -> Judge:
    """A judge by name.

    Args:
        source: "pixel_l2", "ssim", "lpips", "dreamsim", "untrained:SOURCE", "vlm-score:MODEL", "vlm-triplet:MODEL", or
            anything that load_metric takes.
        device, dtype, revision: of a metric; LPIPS and DreamSim run on the device too.

    Raises:
        TPIPSError: an unknown source, or a package or weights that are not there.
    """
    if source.startswith((VLM_SCORE, VLM_TRIPLET)):
        return vlm_judge(source, device=device, dtype=dtype, revision=revision)
    if source in BASELINES:
        return BASELINES[source](str(usable_device(device)))
    if source.startswith(UNTRAINED):
        inner = source.removeprefix(UNTRAINED)
        return metric_judge(source, untrained_metric(inner, device=device, dtype=dtype, revision=revision))
    try:
        return metric_judge(source, load_metric(source, device=device, dtype=dtype, revision=revision))
    except TPIPSError as error:
        if Path(source).exists() or ":" in source or "/" in source:
            raise
        raise TPIPSError(
            f"{error} Baselines are {', '.join(BASELINES)}, {UNTRAINED}SOURCE, {VLM_SCORE}MODEL and {VLM_TRIPLET}MODEL."
        ) from error


def is_baseline(source: str) -> bool:
    """Whether `load_judge` makes something else of a source than `load_metric`."""
    return source in BASELINES or source.startswith(_PREFIXES)


def vlm_judge(
    source: str, *, device: str | None = None, dtype: str | None = None, revision: str | None = None
) -> Judge:
    """A vision-language model as a judge, on this machine or behind an endpoint.

    Args:
        source: "vlm-score:" (pairwise, 0 to 10) or "vlm-triplet:" (all three images), then a Hub id, a folder, or
            "http://HOST:PORT/v1#MODEL"; the endpoint's key is the environment's TPIPS_API_KEY.
        device, dtype, revision: of a model on this machine.

    Raises:
        TPIPSError: the model cannot be loaded, or the address is none.
    """
    kind, _, where = source.partition(":")
    if not where.strip():
        raise TPIPSError(f"{source!r} names no model; write {source}MODEL, a Hub id, a folder or http://HOST:PORT/v1#MODEL.")
    respondent: Respondent
    if where.startswith(("http://", "https://")):
        url, _, model = where.partition("#")
        if not model.strip():
            raise TPIPSError(f"{source!r} names no model behind the endpoint; write {kind}:http://HOST:PORT/v1#MODEL.")
        respondent = EndpointVLM(ChatClient(url, model, options=OPTIONS, attempts=6))
    else:
        respondent = load_local_vlm(where, device=device, dtype=dtype, revision=revision)
    return score_judge(source, respondent) if f"{kind}:" == VLM_SCORE else ChoiceJudge(source, respondent)


def untrained_metric(
    source: str, *, device: str | None = None, dtype: str | None = None, revision: str | None = None, seed: int = 0
) -> Metric:
    """A metric as it was before it was trained on votes.

    Where a checkpoint has adapters (the released ones), they are switched off, which leaves the backbone as it was
    fine-tuned from; everything else was trained from scratch and gets random weights. A fusion's own parameters (the
    channel weights, the register) start anew in both cases.

    Args:
        source, device, dtype, revision: as load_metric.
        seed: of random weights.
    """
    metric = load_metric(source, device=device, dtype=dtype, revision=revision, merge_lora=False)
    return untrained(metric, f"{UNTRAINED}{source}", seed)


def untrained(metric: Metric, name: str = "untrained", seed: int = 0) -> Metric:
    """The same architecture before training on votes (see :func:`untrained_metric`), on the metric's device.

    Where the metric has adapters, it shares its backbone with the result, and they are off in both.
    """
    backbone = metric.backbone
    adapters = [p for name, p in metric.fusion.named_parameters() if "lora_B" in name]
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        if adapters:
            for parameter in adapters:
                parameter.zero_()
        else:
            model = type(backbone.model)(backbone.config).to(metric.device, metric.dtype)
            backbone = Backbone(model, backbone.tokenizer, backbone.settings, backbone.chat_template, backbone.processor)
        fusion = type(metric.fusion)(backbone, **metric.fusion.options)
    fusion.requires_grad_(False)
    return Metric(fusion, info={"name": name}).to(metric.device)


def match_sizes(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Two images in the size of the one with fewer pixels (bicubic, antialiased), to be compared pixel by pixel."""
    if a.shape == b.shape:
        return a, b
    # of two equally large ones the wider decides: the choice must not depend on the order
    size = min((a.shape[-2:], b.shape[-2:]), key=lambda s: (s[0] * s[1], s[0]))

    def resized(image: Tensor) -> Tensor:
        if image.shape[-2:] == size:
            return image
        return F.interpolate(image[None], tuple(size), mode="bicubic", antialias=True)[0].clamp(0, 1)

    return resized(a), resized(b)


def pixel_similarity(a: Tensor, b: Tensor) -> float:
    """Minus the mean squared difference of the pixels."""
    a, b = match_sizes(a, b)
    return -float(((a.double() - b.double()) ** 2).mean())


def ssim_similarity(a: Tensor, b: Tensor) -> float:
    """Mean structural similarity as its authors defined it: Gaussian window of σ 1.5, 11 pixels wide; by scikit-image.

    Raises:
        TPIPSError: scikit-image is not installed, or an image is smaller than the window.
    """
    try:
        from skimage.metrics import structural_similarity
    except ImportError as error:
        raise TPIPSError(_needs("ssim", "scikit-image")) from error
    a, b = match_sizes(a, b)
    if min(a.shape[-2:]) < _SSIM_WINDOW:
        size = f"{a.shape[-1]}x{a.shape[-2]}"
        raise TPIPSError(f"SSIM needs images of at least {_SSIM_WINDOW} pixels a side, not {size}.")
    value = structural_similarity(
        a.double().numpy(),
        b.double().numpy(),
        channel_axis=0,
        data_range=1.0,
        gaussian_weights=True,
        sigma=1.5,
        use_sample_covariance=False,
    )
    return float(value)


def _pixel_l2(device: str) -> PairwiseJudge:
    return blind_judge("pixel_l2", pixel_similarity)


def _ssim(device: str) -> PairwiseJudge:
    return blind_judge("ssim", ssim_similarity)


def _lpips(device: str) -> PairwiseJudge:
    """Minus the LPIPS distance (AlexNet, version 0.1), by the package lpips."""
    try:
        import lpips
    except ImportError as error:
        raise TPIPSError(_needs("lpips", "lpips")) from error
    try:
        model: Any = lpips.LPIPS(net="alex", verbose=False)
    except Exception as error:  # the download fails in many ways: no network, no rights, a broken file
        raise TPIPSError(_no_weights("LPIPS", error, "torchvision's AlexNet", str(_torch_cache()))) from error
    model.to(device).eval()

    def similarity(a: Tensor, b: Tensor) -> float:
        a, b = match_sizes(a, b)
        return -float(model(2 * a[None].to(device) - 1, 2 * b[None].to(device) - 1))

    return blind_judge("lpips", similarity)


def _dreamsim(device: str) -> PairwiseJudge:
    """The cosine of DreamSim's embeddings (its distance is 1 minus that), by the package dreamsim."""
    try:
        from dreamsim import dreamsim
    except ImportError as error:
        raise TPIPSError(_needs("dreamsim", "dreamsim")) from error
    # its own default would be ./models, in whatever folder the command is run
    cache = Path.home() / ".cache" / "dreamsim"
    try:
        cache.mkdir(parents=True, exist_ok=True)
        model, preprocess = dreamsim(pretrained=True, device=device, cache_dir=str(cache))
    except Exception as error:  # as with LPIPS
        raise TPIPSError(_no_weights("DreamSim", error, "its ensemble", str(cache))) from error

    def embed(image: Tensor) -> Tensor:
        return model.embed(preprocess(to_pil_image(image.float())).to(device))

    return embedding_judge("dreamsim", embed)


def _torch_cache() -> Path:
    return Path(torch.hub.get_dir()) / "checkpoints"


def _no_weights(metric: str, error: Exception, what: str, folder: str) -> str:
    reason = " ".join(str(error).split())[:200] or type(error).__name__
    return (
        f"The weights of {metric} could not be had ({type(error).__name__}: {reason}). They ({what}) are downloaded on first "
        f"use: run it once with a connection, or copy the files to {folder}."
    )


def _needs(metric: str, package: str) -> str:
    return f"The metric {metric} needs the package {package}; install it with pip install 'tpips-reward[metrics]'."


#: name → device → judge.
BASELINES: dict[str, Callable[[str], Judge]] = {
    "pixel_l2": _pixel_l2,
    "ssim": _ssim,
    "lpips": _lpips,
    "dreamsim": _dreamsim,
}
