"""The metric that users hold: images of any kind in, similarities out."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from tpips_reward.answers import check_finite, name_comparison
from tpips_reward.attention import choose_kernel
from tpips_reward.backbone import Backbone
from tpips_reward.calibration import Calibration
from tpips_reward.devices import errors_named, named_device
from tpips_reward.dtypes import parse_dtype
from tpips_reward.errors import TPIPSError
from tpips_reward.fusion.base import Triplet, check_entries
from tpips_reward.images import distinct_images, to_tensors

# A rough change_scale for metrics that nobody calibrated, in units of the fusion's temperature: 0.3 for cosines.
# `change_scale` in tpips_config.json replaces it.
DEFAULT_CHANGE_TEMPERATURES = 6

Aspects = str | None | Sequence[str | None]


class Fusion(Protocol):
    """What a fusion must offer to be a metric. One file each in `tpips_reward.fusion`.

    A fusion without a similarity of two images has the range None and `judge(images, triplets)` for `score_pairs`.
    """

    kind: str
    range: tuple[float, float] | None
    temperature: float
    backbone: Backbone
    token_budget: int

    def score_pairs(self, images: list[Tensor], pairs: Sequence[tuple[int, int, str | None]]) -> Tensor:
        """Distinct images and (index, index, aspect) -> (N,) similarities."""
        ...


class Metric:
    """Aspect-conditioned perceptual similarity.

    Scores carry no gradient unless an image that requires grad is given (and autograd is on); gradients then reach
    its pixels. The model is put in eval mode.

    Args:
        fusion: a fusion module, such as `tpips_reward.fusion.LateFusion`.
        change_scale: a third of the median 1 - f of true edits in the aspect that they change.
        info: what is known about the weights (name, license, source ...), kept by `save_pretrained`.
        calibration: what its similarities mean to people, where somebody fitted it (`tpips_reward.calibration`).

    Example:
        >>> metric = load_metric("builtin:late")                              # doctest: +SKIP
        >>> metric.similarity(edits, sources, ["background", "object color"])  # doctest: +SKIP
        tensor([[0.97, 0.12]])
    """

    def __init__(
        self,
        fusion: Any,
        *,
        change_scale: float | None = None,
        info: dict[str, Any] | None = None,
        calibration: Calibration | None = None,
    ) -> None:
        self.calibration = calibration
        self.fusion: Any = fusion.eval()
        self._attention: str | None = None
        self.is_calibrated = change_scale is not None
        rough = round(DEFAULT_CHANGE_TEMPERATURES * fusion.temperature, 6)
        scale = rough if change_scale is None else change_scale
        if isinstance(scale, bool) or not isinstance(scale, (int, float)) or not 0 < scale < float("inf"):
            raise TPIPSError(
                "change_scale (a third of the median 1 - f of true edits in the aspect that they change) must be a positive number, "
                f"got {change_scale!r}."
            )
        self._change_scale = float(scale)
        self.info = dict(info or {})

    @property
    def is_pairwise(self) -> bool:
        """Whether there is a similarity of two images; the triplet judge has none."""
        return self.fusion.range is not None

    @property
    def range(self) -> tuple[float, float]:
        """(lowest, highest) similarity; two equal images have the highest."""
        self._require_pairs()
        return self.fusion.range

    @property
    def change_scale(self) -> float:
        """A third of the median 1 - f of true edits in the aspect that they change; see `is_calibrated`."""
        self._require_pairs()
        return self._change_scale

    @property
    def backbone(self) -> Backbone:
        return self.fusion.backbone

    @property
    def device(self) -> torch.device:
        return self.backbone.device

    @property
    def dtype(self) -> torch.dtype:
        return self.backbone.dtype

    def similarity(
        self,
        a: Any,
        b: Any,
        aspects: Aspects = "overall",
        *,
        value_range: tuple[float, float] = (0.0, 1.0),
        alpha: str = "white",
        differentiable: bool | None = None,
    ) -> Tensor:
        """f(a, b | aspect) of aligned pairs; higher is more similar.

        Args:
            a, b: an image, a batch or a list each (see `tpips_reward.images`), equally many, or one against many.
            aspects: one aspect (None or "overall": similarity as such), or a list of them for every pair. An empty or
                blank text is an error, also in the methods below.
            value_range: lowest and highest value of float images, (-1, 1) for a VAE's.
            alpha: "white" composites transparent images on white, "drop" ignores alpha.
            differentiable: None follows the images; True is an error where no gradient could flow; False never
                builds a graph.

        Returns:
            (B,) for one aspect, (B, K) for a list of K; float32 on the metric's device.

        Raises:
            TPIPSError: bad images or aspects, an empty list of aspects, or batches that do not align.
            NotFinite: the metric's numbers are not finite (also in the methods below); it has the row.
        """
        self._require_pairs()
        names = aspect_list(aspects)
        first = to_tensors(a, value_range=value_range, alpha=alpha, name="a")
        second = to_tensors(b, value_range=value_range, alpha=alpha, name="b")
        count = max(len(first), len(second))
        if len(first) != len(second) and 1 not in (len(first), len(second)):
            raise TPIPSError(f"a holds {len(first)} images and b {len(second)}; give equally many, or one on one side.")
        both = [*first, *second]
        pairs = [(row % len(first), len(first) + row % len(second), name) for row in range(count) for name in names]
        scores = self._pair_scores(both, pairs, self._with_graph(both, (a, b), differentiable))

        def label(row: int) -> str:
            left, right, aspect = pairs[row]
            return name_comparison(aspect, f"a[{left}]", f"b[{right - len(first)}]")

        check_finite(scores, label)
        return scores if _is_one_aspect(aspects) else scores.view(count, len(names))

    def distance(self, a: Any, b: Any, aspects: Aspects = "overall", **options: Any) -> Tensor:
        """Highest similarity minus `similarity`: 1 - f for cosines, mid fusion's own distance; 0 for equal images.

        Arguments as there.
        """
        # two cosines of equal images may differ from 1 by float rounding, to either side
        return (self.range[1] - self.similarity(a, b, aspects, **options)).clamp(min=0)

    def similarity_pairs(
        self,
        images: Any,
        references: Any,
        pairs: Sequence[tuple[int, int, str | None]],
        *,
        value_range: tuple[float, float] = (0.0, 1.0),
        alpha: str = "white",
        differentiable: bool | None = None,
    ) -> Tensor:
        """Similarities of chosen (image, reference, aspect) triples, each distinct image encoded once for all of them.

        Args:
            images, references: images as in `similarity`; their numbers may differ.
            pairs: (index into images, index into references, aspect). Images that no pair names are not encoded.

        Returns:
            (N,) float32; (0,) for no pairs.

        Raises:
            TPIPSError: bad images or aspects, an entry of another form, an index out of range.
        """
        self._require_pairs()
        first = to_tensors(images, value_range=value_range, alpha=alpha, name="images")
        second = to_tensors(references, value_range=value_range, alpha=alpha, name="references")
        check_entries(pairs, [("images", len(first)), ("references", len(second))], "pairs")
        both = [*first, *second]
        graph = self._with_graph(both, (images, references), differentiable)
        if not pairs:
            return torch.zeros(0, device=self.device)
        chosen = [(left, len(first) + right, aspect) for left, right, aspect in pairs]

        def label(row: int) -> str:
            left, right, aspect = pairs[row]
            return name_comparison(aspect, f"images[{left}]", f"references[{right}]")

        return check_finite(self._pair_scores(both, chosen, graph), label)

    def embed(
        self,
        images: Any,
        aspects: Aspects = "overall",
        *,
        value_range: tuple[float, float] = (0.0, 1.0),
        alpha: str = "white",
        differentiable: bool | None = None,
    ) -> Tensor:
        """Unit vectors whose dot products are the similarities (late fusion only): (B, D), or (B, K, D) for a list.

        Raises:
            TPIPSError: the fusion has no embedding; otherwise as `similarity`.
        """
        self._require_pairs()
        if not hasattr(self.fusion, "embed"):
            raise TPIPSError(f"{self.fusion.kind} fusion compares two images at once: no embedding; use similarity.")
        names = aspect_list(aspects)
        tensors = to_tensors(images, value_range=value_range, alpha=alpha)
        with torch.set_grad_enabled(self._with_graph(tensors, (images,), differentiable)):
            unique, position = distinct_images(tensors)
            vectors = self.fusion.embed(unique, [names] * len(unique))
            stacked = torch.stack([vectors[index] for index in position])
        labels = [name_comparison(name, f"images[{index}]") for index in range(len(stacked)) for name in names]
        check_finite(stacked.flatten(0, 1), labels.__getitem__)
        return stacked[:, 0] if _is_one_aspect(aspects) else stacked

    def odd_one_out(
        self,
        images: Any,
        triplets: Sequence[Triplet],
        *,
        value_range: tuple[float, float] = (0.0, 1.0),
        alpha: str = "white",
        differentiable: bool | None = None,
    ) -> Tensor:
        """Which of three images is the most different in an aspect; every fusion answers.

        A similarity of two images speaks for the third one being odd: softmax of the similarities over the fusion's
        temperature (paper, Eq. 1). The triplet judge sees all three at once, in all six orders.

        Args:
            images: as in `similarity`.
            triplets: (index, index, index, aspect) into images. Each image is encoded once for all of them, by the
                triplet judge once in each combination.

        Returns:
            (N, 3) float32, the probability of each image of a triplet of being the odd one; (0, 3) for no triplets.

        Raises:
            TPIPSError: bad images or aspects, an entry of another form, an index out of range.

        Example:
            >>> metric.odd_one_out([a, b, c], [(0, 1, 2, "lighting")])  # doctest: +SKIP
            tensor([[0.1, 0.1, 0.8]])
        """
        given = to_tensors(images, value_range=value_range, alpha=alpha)
        check_entries(triplets, [("images", len(given))] * 3, "triplets")
        graph = self._with_graph(given, (images,), differentiable)
        if not triplets:
            return torch.zeros(0, 3, device=self.device)

        def label(row: int) -> str:
            *members, aspect = triplets[row]
            return name_comparison(aspect, *(f"images[{index}]" for index in members))

        if self.is_pairwise:
            # the pair that speaks for image k is that of the other two
            pairs = [pair for a, b, c, aspect in triplets for pair in ((b, c, aspect), (a, c, aspect), (a, b, aspect))]
            similarities = check_finite(self._pair_scores(given, pairs, graph).view(len(triplets), 3), label)
            return (similarities / self.fusion.temperature).softmax(-1)
        unique, position = distinct_images(given)
        with torch.set_grad_enabled(graph):
            odds = self.fusion.judge(
                unique, [(*(position[index] for index in members), aspect) for *members, aspect in triplets]
            )
        return check_finite(odds, label)

    def check_aspect(self, aspect: str | None) -> None:
        """Refuse an aspect that could not be scored, without scoring anything.

        Raises:
            TPIPSError: it is too long, no text, or holds a control token of the model.
        """
        self.fusion.prompts.full(aspect)

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | str | None = None) -> Metric:
        """Move or convert the weights in place; returns the metric itself.

        Raises:
            TPIPSError: float16, an unknown dtype, a device that this PyTorch cannot use, or one (or a dtype) for which the
                chosen attention is not; then nothing has moved.
        """
        kind = parse_dtype(dtype) if dtype is not None else None
        target = self.device if device is None else named_device(device)
        with errors_named(device, "the metric", _gib(self.fusion)):
            choose_kernel(self._attention, target, kind or self.dtype)  # before anything moves
            self.fusion.to(device=target, dtype=kind)
        self.backbone.choose_attention(self._attention)
        return self

    def set_attention(self, kernel: str | None) -> Metric:
        """Choose the attention kernel: "sdpa", "flash" (FlashAttention 2), or None for the fastest that runs here.

        Raises:
            TPIPSError: an unknown name, or FlashAttention without a GPU, in another dtype than bfloat16, or not installed.
        """
        self.backbone.choose_attention(kernel)
        self._attention = kernel
        return self

    def compile(self) -> Metric:
        """Compile the layers with torch.compile: the first call takes minutes, later ones are faster; equal scores."""
        self.backbone.compile_layers()
        return self

    def gradient_checkpointing_enable(self) -> Metric:
        """Recompute activations in the backward pass: less memory for gradients, about a third more time."""
        self.backbone.enable_checkpointing()
        return self

    def save_pretrained(
        self,
        folder: str | Path,
        dtype: torch.dtype | str | None = None,
        *,
        merge_lora: bool = True,
        base: str | None = None,
    ) -> None:
        """Write weights, config, tokenizer and image settings to `folder`, loadable by `load_metric(folder)`.

        Args:
            folder: made if it does not exist.
            dtype: of the stored weights, such as "bfloat16"; None keeps them as they are.
            merge_lora: store adapters that are still apart folded into the weights; False stores them beside these, in
                a folder `adapter` that PEFT reads too.
            base: a built-in metric, such as "builtin:late", of which only the differences are stored.

        Raises:
            TPIPSError: the folder cannot be written or holds files of another model, no adapters are apart that could stay
                so, or the base is of another architecture.
        """
        from tpips_reward.checkpoints import save_metric

        save_metric(self, folder, None if dtype is None else parse_dtype(dtype), merge_lora, base)

    def _pair_scores(self, images: list[Tensor], pairs: Sequence[tuple[int, int, str | None]], graph: bool) -> Tensor:
        """(N,) scores, not yet checked."""
        unique, position = distinct_images(images)
        with torch.set_grad_enabled(graph):
            return self.fusion.score_pairs(
                unique, [(position[left], position[right], aspect) for left, right, aspect in pairs]
            )

    def _require_pairs(self) -> None:
        if not self.is_pairwise:
            raise TPIPSError(
                f"The {self.fusion.kind} judge sees three images at once and has no score of two; use odd_one_out, or a "
                "metric of late, mid or early fusion."
            )

    def _with_graph(self, tensors: list[Tensor], given: tuple[Any, ...], differentiable: bool | None) -> bool:
        carries = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
        if differentiable and not carries:
            kinds = ", ".join(type(value).__name__ for value in given)
            raise TPIPSError(
                f"differentiable=True, but no gradient can flow: give float tensors with requires_grad, outside of "
                f"torch.no_grad (got {kinds}); PIL images and arrays carry none."
            )
        return carries if differentiable is None else bool(differentiable)


def aspect_list(aspects: Aspects) -> list[str | None]:
    """One aspect or several -> a list of at least one.

    Raises:
        TPIPSError: an empty list, or neither a string nor a list.
    """
    if _is_one_aspect(aspects):
        return [aspects]  # type: ignore[list-item]
    if not isinstance(aspects, Sequence):
        raise TPIPSError(f"aspects must be a string, None or a list of them, got {type(aspects).__name__}.")
    if not aspects:
        raise TPIPSError("aspects is an empty list; give at least one aspect, or 'overall'.")
    return list(aspects)


def _is_one_aspect(aspects: Any) -> bool:
    return aspects is None or isinstance(aspects, str)


def _gib(module: nn.Module) -> str:
    return f"{sum(value.nbytes for value in module.state_dict().values()) / 2**30:.1f} GiB"


def count_parameters(module: nn.Module) -> int:
    """Number of weights."""
    return sum(parameter.numel() for parameter in module.parameters())
