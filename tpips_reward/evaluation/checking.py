"""What can be known of the images before a metric is loaded: that they open, and that a metric takes their sizes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from tpips_reward.errors import TPIPSError
from tpips_reward.evaluation.image_files import ImageRef, image_size
from tpips_reward.evaluation.rows import Dataset, Problem, Row

SIZE_POLICIES = ("resize", "keep", "skip")
#: Proportions that differ by less are the same: editors round sides to multiples of 8 to 32.
SHAPE_TOLERANCE = 0.02


def check_images(dataset: Dataset, sizes: str = "resize") -> Dataset:
    """Leaves out images that do not open or that no metric takes, and lists outputs of another size than their source.

    Args:
        dataset: rows as they were read.
        sizes: what will happen to outputs of another size: "resize" to the source's, "keep" as they are, or "skip"
            them.

    Raises:
        TPIPSError: an unknown policy.
    """
    if sizes not in SIZE_POLICIES:
        raise TPIPSError(f"Outputs of another size are treated by {', '.join(SIZE_POLICIES)}, not {sizes!r}.")
    seen: dict[str, tuple[int, int] | TPIPSError] = {}

    def size_of(ref: ImageRef) -> tuple[int, int] | TPIPSError:
        if ref.label not in seen:
            try:
                seen[ref.label] = image_size(ref)
            except TPIPSError as error:
                seen[ref.label] = error
        return seen[ref.label]

    rows, problems = [], []
    for row in dataset.rows:
        source = size_of(row.source)
        if isinstance(source, TPIPSError):
            problems.append(Problem("unreadable_source", str(source), row.key))
            continue
        kept, found = _check_outputs(row, source, size_of, sizes)
        rows.append(kept)
        problems += found
    return dataset.with_rows(rows, problems)


def _check_outputs(
    row: Row, source: tuple[int, int], size_of: Callable[[ImageRef], tuple[int, int] | TPIPSError], sizes: str
) -> tuple[Row, list[Problem]]:
    outputs, problems = {}, []
    for model, ref in row.outputs.items():
        size = size_of(ref)
        if isinstance(size, TPIPSError):
            problems.append(Problem("unreadable_output", str(size), row.key, model))
            continue
        if size != source:
            problems.append(_size_problem(row.key, model, ref.label, source, size, sizes))
        if size == source or sizes != "skip":
            outputs[model] = ref
    return replace(row, outputs=outputs), problems


def _size_problem(
    key: str, model: str, label: str, source: tuple[int, int], size: tuple[int, int], sizes: str
) -> Problem:
    ratio = (size[0] / size[1]) / (source[0] / source[1])
    kind = "other_size" if abs(ratio - 1) <= SHAPE_TOLERANCE else "other_shape"
    done = {
        "resize": "it is resized to the source's",
        "keep": "it is scored as it is",
        "skip": "it is left out",
    }[sizes]
    detail = f"{label} has {size[0]}x{size[1]} pixels and its source {source[0]}x{source[1]}; {done}."
    return Problem(kind, detail, key, model, left_out=sizes == "skip")
