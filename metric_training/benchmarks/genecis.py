"""GeneCIS, Focus Attribute and Focus Object: in a gallery, the image that is like the reference in a named condition.

Layout, from `facebookresearch/genecis` (README, "GeneCIS annotation format", and its two dataset classes): JSON lists
`focus_attribute.json` and `focus_object.json` of {"condition", "reference", "target", "gallery"}. An image of the first
is {"image_id", "instance_bbox": [left, top, width, height]} in Visual Genome 1.2 (`IMAGE_ID.jpg`), one of the second
{"val_image_id"} in COCO's val2017 (12 digits, `.jpg`). Images are found by these names anywhere below the folder (or
--image_root).

Protocol of the paper (§B.1, table 4): recall at 1, 2 and 3 among gallery and target; the condition itself is the aspect
of an attribute, "scene context and presence of OBJECT" that of an object; boxes are dilated by 0.3 and crops enlarged
to at least 256 vision tokens, whole images stay as they are. A box is dilated as the authors' code does it: its left
and top move out by 0.3 of its size, and its size grows by 0.3. Unlike there, crops are not padded to squares. The
Change subsets ask for edits, to which a similarity does not apply.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch.nn.functional as F
from torch import Tensor
from tqdm.auto import tqdm

from metric_training.benchmarks.protocol import Loaded, Settings, grouped, image_index, mean_figures, pairwise
from metric_training.benchmarks.ranking import expected_recall
from metric_training.data.comparison import DataError, ImageSource, Problems, as_json
from metric_training.evaluation.judges import Judge

SUBSETS = ("focus_attribute", "focus_object")
DILATION = 0.3
#: 256 vision tokens of Qwen3-VL, each 32 x 32 pixels.
LEAST_PIXELS = 256 * 32 * 32
CUTOFFS = (1, 2, 3)


@dataclass(frozen=True)
class Picture:
    """An image, or the part of it in a box.

    Attributes:
        source: the file.
        box: left, top, width and height in pixels; None: the whole.
    """

    source: ImageSource
    box: tuple[float, float, float, float] | None = None

    @property
    def key(self) -> tuple[Any, ...]:
        """Equal for equal pixels."""
        return (self.source.key, self.box)

    def load(self) -> Tensor:
        """(3, H, W) float32 in [0, 1]; a crop has at least :data:`LEAST_PIXELS` pixels.

        Raises:
            DataError: the file does not open, or nothing of the box is in it.
        """
        image = self.source.load()
        return image if self.box is None else crop(image, self.box, self.source.key)


@dataclass(frozen=True)
class Query:
    """One template.

    Attributes:
        aspect: what counts.
        reference, target, gallery: pictures; the gallery is without the target.
        subset: one of :data:`SUBSETS`.
    """

    aspect: str
    reference: Picture
    target: Picture
    gallery: tuple[Picture, ...]
    subset: str


def load(folder: Path, settings: Settings) -> Loaded:
    """The templates of both subsets, as far as the folder has their JSON files; ``settings.split`` names one of them.

    Raises:
        DataError: no such file, no image, or a template that is none and ``strict``.
    """
    if not folder.is_dir():
        raise DataError(
            f"{folder} is no folder; give the one with GeneCIS' focus_attribute.json and focus_object.json."
        )
    wanted = [settings.split] if settings.split else SUBSETS
    if unknown := [name for name in wanted if name not in SUBSETS]:
        raise DataError(f"GeneCIS' subset {unknown[0]!r} is not run here; there are {' and '.join(SUBSETS)} (--split).")
    files = [path for name in wanted if (path := folder / f"{name}.json").is_file()]
    if not files:
        raise DataError(f"{folder} holds none of {', '.join(f'{name}.json' for name in wanted)}.")
    root = Path(settings.image_root).expanduser() if settings.image_root else folder
    if not root.is_dir():
        raise DataError(f"The image root {root} is no folder.")
    index = image_index(root)
    problems = Problems(str(folder), settings.strict, unit="template")
    queries: list[Query] = []
    for path in files:
        for number, template in enumerate(_templates(path), 1):
            if settings.limit is not None and sum(q.subset == path.stem for q in queries) >= settings.limit:
                break
            try:
                queries.append(_query(template, path.stem, index, root))
            except DataError as error:
                problems.add(number, f"of {path.name}: {error}")
    if not queries:
        raise DataError(f"{folder} has no usable template: {problems.describe(3) or 'the files are empty'}")
    return Loaded(queries, {"queries": len(queries)}, problems)


def measure(judge: Judge, loaded: Loaded, settings: Settings) -> dict[str, Any]:
    """Recall at 1, 2 and 3, together and by subset."""
    scorer = pairwise(judge)
    queries: list[Query] = loaded.content
    recalls: dict[str, list[float]] = {f"recall@{k}": [] for k in CUTOFFS}
    batches = _batches(queries, settings.images_per_call)
    for batch in tqdm(batches, desc=judge.name, disable=not settings.progress, leave=False):
        position: dict[tuple[Any, ...], int] = {}
        images: list[Tensor] = []
        pairs: list[tuple[int, int, str]] = []
        for query in batch:
            for picture in (query.reference, query.target, *query.gallery):
                if picture.key not in position:
                    position[picture.key] = len(images)
                    images.append(picture.load())
            own = position[query.reference.key]
            pairs += [(own, position[p.key], query.aspect) for p in (query.target, *query.gallery)]
        scores = scorer.similarities(images, pairs).numpy()
        start = 0
        for query in batch:
            row = scores[start : start + 1 + len(query.gallery)]
            start += len(row)
            for k in CUTOFFS:
                recalls[f"recall@{k}"].append(expected_recall(row, np.arange(len(row)) == 0, k))
    values = {name: np.array(rows) for name, rows in recalls.items()}
    return mean_figures(values) | {"groups": {"subset": grouped(values, [query.subset for query in queries])}}


def crop(image: Tensor, box: Sequence[float], name: str) -> Tensor:
    """The dilated box of an image, enlarged (bicubic) where it is small.

    Raises:
        DataError: the box has nothing of the image.
    """
    height, width = image.shape[-2:]
    left, top = max(0.0, box[0] - DILATION * box[2]), max(0.0, box[1] - DILATION * box[3])
    right, bottom = min(width, left + (1 + DILATION) * box[2]), min(height, top + (1 + DILATION) * box[3])
    part = image[:, round(top) : round(bottom), round(left) : round(right)]
    if not part.numel():
        raise DataError(f"the box {list(box)} has nothing of {name} ({width}x{height}).")
    scale = (LEAST_PIXELS / (part.shape[-2] * part.shape[-1])) ** 0.5
    if scale <= 1:
        return part
    size = (-int(-part.shape[-2] * scale // 1), -int(-part.shape[-1] * scale // 1))
    return F.interpolate(part[None], size, mode="bicubic", antialias=True)[0].clamp(0, 1)


def _templates(path: Path) -> list[Any]:
    try:
        templates = as_json(path.read_bytes())
    except (OSError, DataError) as error:
        raise DataError(f"{path} cannot be read ({error}).") from error
    if not isinstance(templates, list):
        raise DataError(f"{path} must hold a list of templates, not {type(templates).__name__}.")
    return templates


def _query(template: Any, subset: str, index: dict[str, Path], root: Path) -> Query:
    try:
        condition, gallery = template["condition"], template["gallery"]
        reference, target = template["reference"], template["target"]
    except (KeyError, TypeError):
        raise DataError("it must have condition, reference, target and gallery.") from None
    if not isinstance(condition, str) or not condition.strip() or not isinstance(gallery, list) or not gallery:
        raise DataError("its condition must be text and its gallery a list of images.")
    is_object = subset == "focus_object"
    pictures = [_picture(item, is_object, index, root) for item in (reference, target, *gallery)]
    aspect = f"scene context and presence of {condition.strip()}" if is_object else condition.strip()
    return Query(aspect, pictures[0], pictures[1], tuple(pictures[2:]), subset)


def _picture(item: Any, is_object: bool, index: dict[str, Path], root: Path) -> Picture:
    try:
        number = int(item["val_image_id" if is_object else "image_id"])
        box = None if is_object else tuple(float(side) for side in item["instance_bbox"])
    except (KeyError, TypeError, ValueError, OverflowError):
        wanted = "val_image_id" if is_object else "image_id and instance_bbox"
        raise DataError(f"an image must have {wanted}, not {str(item)[:80]}.") from None
    if box is not None and (len(box) != 4 or not np.isfinite(box).all() or min(box[2:]) <= 0):
        raise DataError(f"instance_bbox must be left, top, width and height, not {list(box)}.")
    name = f"{number:012d}.jpg" if is_object else f"{number}.jpg"
    if name not in index:
        raise DataError(f"the image {name} is nowhere below {root}; give the folder of the images with --image_root.")
    return Picture(ImageSource(str(index[name]), index[name]), box)


def _batches(queries: Sequence[Query], images_per_call: int) -> list[list[Query]]:
    result: list[list[Query]] = []
    keys: set[tuple[Any, ...]] = set()
    for query in queries:
        own = {picture.key for picture in (query.reference, query.target, *query.gallery)}
        if not result or len(keys | own) > images_per_call:
            result.append([])
            keys = set()
        result[-1].append(query)
        keys |= own
    return result
