"""What all fusions share: the backbone, and parameters of a fusion's own beside it."""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tpips_reward.backbone import Backbone
from tpips_reward.backbone_files import check_keys
from tpips_reward.errors import TPIPSError
from tpips_reward.prompts import TextFirstPrompts

DEFAULT_TOKEN_BUDGET = 32768
# Vision features that mid and early fusion hold at one time, in tokens of the language tower.
FEATURE_BUDGET = 65536
_BACKBONE = "backbone"

#: Two indices into the images, and the aspect.
Pair = tuple[int, int, str | None]
#: Three indices into the images, and the aspect.
Triplet = tuple[int, int, int, str | None]


class FusionModule(nn.Module, ABC):
    """A fusion on a Qwen3-VL backbone; subclasses say how two images and an aspect become a score.

    Parameters beside the backbone stay float32 when the rest is converted to bfloat16, as released files store them.

    Args:
        model: a transformers `Qwen3VLModel`, or a ready `Backbone`.
        tokenizer, settings, chat_template, processor: see `Backbone`; not needed with a ready one.
        options: the fusion's own, see its `build`.
    """

    kind: str
    # (lowest, highest) similarity; None for a fusion that has no similarity of two images
    range: tuple[float, float] | None
    # of the softmax that turns similarities into a choice (paper, Eq. 1 and table 9): the scale of the similarities
    temperature: float = 0.05

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any = None,
        settings: Any = None,
        chat_template: str | None = None,
        processor: Any = None,
        **options: Any,
    ) -> None:
        super().__init__()
        if isinstance(model, Backbone):
            self.backbone = model
        else:
            self.backbone = Backbone(model, tokenizer, settings or processor, chat_template, processor)
        self.token_budget = DEFAULT_TOKEN_BUDGET
        self.build(**options)

    @abstractmethod
    def build(self) -> None:
        """Add what the fusion has beside the backbone: prompts and parameters."""

    @property
    def options(self) -> dict[str, Any]:
        """The keyword arguments that, with the backbone, build this fusion again; JSON values."""
        return {}

    def own_state(self) -> dict[str, Tensor]:
        """The parameters that are not the backbone's, by name."""
        return {name: value for name, value in self.state_dict().items() if not name.startswith(_BACKBONE + ".")}

    def load_own(self, weights: Mapping[str, Tensor], where: str) -> None:
        """Give the parameters that are not the backbone's their values (assigned, not copied).

        Args:
            weights: float32, or float64 for a float64 backbone.
            where: the file, for messages.

        Raises:
            TPIPSError: missing or unexpected names, shapes that do not fit, numbers that are not finite.
        """
        expected = self.own_state()
        check_keys(expected, weights, where)
        for name, value in expected.items():
            given = weights[name]
            if given.shape != value.shape:
                raise TPIPSError(
                    f"{where}: {name} has shape {tuple(given.shape)}, {self.kind} fusion needs {tuple(value.shape)} "
                    "here; weights and config do not belong together."
                )
            if not bool(given.isfinite().all()):
                raise TPIPSError(f"{where}: {name} holds NaN or infinite numbers; the file is damaged.")
        self.load_state_dict(dict(weights), strict=False, assign=True)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> FusionModule:
        def keep_wide(value: Tensor) -> Tensor:
            changed = fn(value)
            return value.to(changed.device, torch.float32) if changed.dtype == torch.bfloat16 else changed

        for name, child in self.named_children() if recurse else ():
            child._apply(fn if name == _BACKBONE else keep_wide)
        return self


class TextFirstFusion(FusionModule):
    """A fusion whose prompt has the aspect before the images, so that a pair of images is its unit of work."""

    def build(self) -> None:
        self.feature_budget = FEATURE_BUDGET
        self.prompts = TextFirstPrompts(
            self.backbone.tokenizer, self.kind, self.backbone.config.image_token_id, self.backbone.chat_template
        )

    @abstractmethod
    def score_pairs(self, images: list[Tensor], pairs: Sequence[Pair]) -> Tensor:
        """Distinct images (3, H, W) and (index, index, aspect) -> (N,) similarities; see `Metric.similarity_pairs`."""

    def forward(self, images: list[Tensor], pairs: Sequence[Pair]) -> Tensor:
        """Same as `score_pairs`, so that distributed wrappers work."""
        return self.score_pairs(images, pairs)


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The precision of cosines and distances: float64 for float64, float32 for everything else."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def check_pairs(pairs: Sequence[Pair], count: int) -> None:
    """Refuse an empty list of pairs, and what `check_entries` refuses, for `count` images."""
    check_entries(pairs, [("images", count)] * 2, "pairs")
    if not pairs:
        raise TPIPSError("score_pairs got no pairs; give at least one (index, index, aspect).")


def check_triplets(triplets: Sequence[Triplet], count: int) -> None:
    """Refuse an empty list of triplets, and what `check_entries` refuses, for `count` images."""
    check_entries(triplets, [("images", count)] * 3, "triplets")
    if not triplets:
        raise TPIPSError("There are no triplets; give at least one (index, index, index, aspect).")


def check_entries(entries: Sequence[Any], sides: Sequence[tuple[str, int]], what: str) -> None:
    """Refuse anything but a list of (index ..., aspect) whose indices name images.

    Args:
        entries: may be empty.
        sides: what each index counts in: a name and how many there are.
        what: what an error calls the list.

    Raises:
        TPIPSError: names the entry.
    """
    form = f"({'index, ' * len(sides)}aspect)"
    if not isinstance(entries, Sequence):
        raise TPIPSError(f"{what} must be a list of {form}, got {type(entries).__name__}.")
    for position, entry in enumerate(entries):
        if not isinstance(entry, Sequence) or len(entry) != len(sides) + 1:
            raise TPIPSError(f"{what}[{position}] is {entry!r}; give {form}.")
        for index, (name, size) in zip(entry, sides, strict=False):
            try:
                place = operator.index(index)
            except (TypeError, ValueError, RuntimeError):
                raise TPIPSError(f"{what}[{position}] has the index {index!r}; give a whole number.") from None
            if not 0 <= place < size:
                raise TPIPSError(f"{what}[{position}] names {name}[{place}], but there are only {size}.")
