"""A comparison: images, the aspects asked of them, and how people voted. Every source of data ends in these."""

from __future__ import annotations

import filecmp
import json
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any, Literal

import numpy as np
from PIL import Image
from torch import Tensor

from metric_training.data.votes import PAIRS
from tpips_reward import TPIPSError
from tpips_reward.images import check_size, to_tensors

Task = Literal["odd_one_out", "two_afc"]

#: The pair of images whose similarity speaks for each choice: the pair without the odd image (paper, §4), or the
#: reference (image 0) and a candidate.
CHOICE_PAIRS: dict[Task, tuple[tuple[int, int], ...]] = {"odd_one_out": PAIRS, "two_afc": ((0, 1), (0, 2))}
#: What the images are called in files and messages.
IMAGE_NAMES: dict[Task, tuple[str, str, str]] = {
    "odd_one_out": ("p0", "p1", "p2"),
    "two_afc": ("reference", "candidate_0", "candidate_1"),
}
#: Shares are written with two or three decimals: 0.33 three times is 0.99.
_SUM_TOLERANCE = 0.0101


class DataError(TPIPSError):
    """Data that cannot be used: a file, a row, or an image."""


@dataclass(frozen=True, eq=False)
class ImageSource:
    """Where an image's pixels come from.

    Attributes:
        key: equal for the same file, so that it is decoded and encoded once.
        content: a path, encoded bytes, a function that gives them, or (H, W, 3) uint8 pixels.
    """

    key: str
    content: Path | bytes | np.ndarray | Callable[[], bytes]

    def load(self) -> Tensor:
        """Decodes it: EXIF orientation applied, transparency on white, grayscale expanded.

        Returns:
            (3, H, W) float32 in [0, 1].

        Raises:
            DataError: when it does not open.
        """
        try:
            if isinstance(self.content, np.ndarray):
                return to_tensors(self.content, name=self.key)[0]
            with Image.open(self.content if isinstance(self.content, Path) else BytesIO(self.encoded())) as image:
                return to_tensors(image, name=self.key)[0]
        except Exception as error:  # Pillow's decoders raise many kinds, struct.error and SyntaxError among them
            reason = " ".join(str(error).split()) or type(error).__name__
            raise DataError(f"the image {self.key} does not open ({reason}).") from error

    def encoded(self) -> bytes:
        """The file's bytes; of pixels, theirs."""
        if isinstance(self.content, Path):
            return self.content.read_bytes()
        if isinstance(self.content, np.ndarray):
            return self.content.tobytes()
        return self.content if isinstance(self.content, bytes) else self.content()

    @property
    def is_file(self) -> bool:
        """Whether it names a file that is there."""
        # os.path answers False, where Path raises, for a name that no file can have
        return isinstance(self.content, Path) and os.path.isfile(self.content)

    def check(self) -> None:
        """Reads the header of a file, so that one that no metric takes is found before anything is computed.

        Raises:
            DataError: when there is no such file, it is no image, or its size is none that a metric takes.
        """
        if not isinstance(self.content, Path):
            return
        name = shortened(self.content)
        if os.path.isdir(self.content):
            raise DataError(f"the image {name} is a folder; name a file.")
        if not self.is_file:
            raise DataError(f"the image {name} does not exist; check the image root (--image_root).")
        try:
            with Image.open(self.content) as image:
                width, height = image.size
        except Exception as error:  # as in load
            reason = shortened(" ".join(str(error).split()) or type(error).__name__)
            raise DataError(f"the image {name} does not open ({reason}); is it an image, whole, and not too large?") from error
        try:
            check_size(height, width, f"the image {name}")
        except TPIPSError as error:
            raise DataError(str(error)) from error

    def same_as(self, other: ImageSource) -> bool:
        """Whether both hold the same file contents (or pixels)."""
        if self.key == other.key:
            return True
        mine, theirs = self.content, other.content
        if isinstance(mine, np.ndarray) and isinstance(theirs, np.ndarray):
            return np.array_equal(mine, theirs)
        if isinstance(mine, Path) and isinstance(theirs, Path):
            # sizes first: reading every file of a large set would take minutes
            return mine.stat().st_size == theirs.stat().st_size and filecmp.cmp(mine, theirs, shallow=False)
        return self.encoded() == other.encoded()


@dataclass(frozen=True, eq=False)
class Comparison:
    """One odd-one-out triplet, or one reference with two candidates, with the votes on each of its A aspects.

    Attributes:
        key: names it in messages.
        task: what was asked; :data:`CHOICE_PAIRS` has the choices.
        images: three; in 2AFC the reference first.
        aspects: A phrases, as they were asked.
        votes: (A, 3) vote shares of the images ("odd_one_out"), or (A, 2) of the candidates ("two_afc"), float32.
        names: A names under which figures are grouped; the phrases themselves unless given.
        source: group for figures by source, such as the algorithm that made the images.
    """

    key: str
    task: Task
    images: tuple[ImageSource, ImageSource, ImageSource]
    aspects: tuple[str, ...]
    votes: np.ndarray
    names: tuple[str, ...] = ()
    source: str = ""

    def __post_init__(self) -> None:
        shape = (len(self.aspects), len(CHOICE_PAIRS[self.task]))
        if not self.aspects or self.votes.shape != shape:
            raise DataError(
                f"{self.key} has {len(self.aspects)} aspects and votes of shape {self.votes.shape}; {self.task} needs "
                f"at least one aspect and votes of shape {shape}."
            )
        if not self.names:
            object.__setattr__(self, "names", self.aspects)


class Problems:
    """Bad rows of a file, by line number.

    Args:
        where: the file, for messages.
        strict: stop at the first.
        unit: what is counted, "line" or "row".
    """

    def __init__(self, where: str, strict: bool = False, unit: str = "line") -> None:
        self.where, self.strict, self.unit = where, strict, unit
        self.found: list[tuple[int, str]] = []

    def add(self, line: int, message: str) -> None:
        """Lists a problem.

        Raises:
            DataError: where strict.
        """
        if self.strict:
            raise DataError(f"{self.where}, {self.unit} {line}: {message}")
        self.found.append((line, message))

    def describe(self, limit: int = 20) -> str:
        """One line a problem, at most ``limit`` of them; empty where there is none."""
        # lines that are no row are found before the rows are looked at
        found = sorted(self.found, key=lambda problem: problem[0])
        lines = [f"{self.where}, {self.unit} {line}: {message}" for line, message in found[:limit]]
        if len(self.found) > limit:
            lines.append(f"... and {len(self.found) - limit} more.")
        return "\n".join(lines)


@dataclass(eq=False)
class Data:
    """Comparisons of one task, with what was wrong and what was left out.

    Attributes:
        name: of the set.
        task: of all comparisons.
        comparisons: what can be used.
        problems: bad rows, listed.
        dropped: how many of what was left out by rule ("factors without a target", "ties").
    """

    name: str
    task: Task
    comparisons: list[Comparison]
    problems: Problems
    dropped: dict[str, int] = field(default_factory=dict)

    def require_any(self) -> Data:
        """Itself, where there is anything to use.

        Raises:
            DataError: where every row is bad or left out.
        """
        if self.comparisons:
            return self
        left_out = ", ".join(f"{count} {what}" for what, count in self.dropped.items() if count)
        reasons = self.problems.describe(3) or left_out or "it is empty"
        raise DataError(f"{self.name} has no usable comparison: {reasons}")


def show_problems(data: Data) -> Data:
    """The set itself; its bad rows (the first 20), what was left out by rule and how many comparisons are left go to stderr."""
    if data.problems.found:
        print(data.problems.describe(), file=sys.stderr)
    left_out = [f"{count} {what}" for what, count in data.dropped.items() if count]
    if data.problems.found or left_out:
        counts = [f"problems: {len(data.problems.found)}", f"comparisons used: {len(data.comparisons)}"]
        counts += [f"left out: {', '.join(left_out)}"] if left_out else []
        print(f"{data.name}: {'; '.join(counts)}.", file=sys.stderr)
    return data


def vote_shares(value: Any, choices: int) -> np.ndarray:
    """Probabilities as a file has them → shares that sum to 1 exactly.

    Args:
        value: ``choices`` numbers, at least 0, with a sum of 1 (to 0.01: files have rounded numbers).
        choices: 3 or 2.

    Returns:
        (choices,) float32.

    Raises:
        DataError: naming what is wrong.
    """
    is_list = isinstance(value, Sequence | np.ndarray) and not isinstance(value, str | bytes)
    if not is_list or len(value) != choices or any(isinstance(v, bool) or not _is_number(v) for v in value):
        raise DataError(f"probs must be {choices} numbers, not {value!r}.")
    shares = np.array([as_float(part) for part in value])
    if not np.isfinite(shares).all() or shares.min() < 0:
        raise DataError(f"probs must be at least 0 and finite, not {shortened(repr(value))}.")
    with np.errstate(over="ignore"):
        total = shares.sum()
    if abs(total - 1) > _SUM_TOLERANCE:
        raise DataError(f"probs {value!r} sum to {total:g}, not to 1.")
    return (shares / total).astype(np.float32)


def image_source(value: Any, root: Path | None) -> ImageSource:
    """An image as a row has it (a path relative to ``root``, or a ready source) → a source.

    Raises:
        DataError: when it is neither, or an address on the net.
    """
    if isinstance(value, ImageSource):
        return value
    if not isinstance(value, str) or not value.strip():
        raise DataError(f"an image must be named by its path, not by {value!r}.")
    if "://" in value:
        raise DataError(f"an image must be a local file, not the address {value!r}; download it first.")
    path = (root or Path()) / value
    return ImageSource(os.path.normpath(path), path)


def checked_images(
    values: Sequence[Any], task: Task, root: Path | None
) -> tuple[ImageSource, ImageSource, ImageSource]:
    """Three images that exist and differ.

    Raises:
        DataError: a missing or unreadable file, or two equal ones (a sentinel that belongs in no data set).
    """
    first, second, third = (image_source(value, root) for value in values)
    for image in (first, second, third):
        image.check()
    names = IMAGE_NAMES[task]
    for (i, a), (j, b) in (((0, first), (1, second)), ((0, first), (2, third)), ((1, second), (2, third))):
        if a.same_as(b):
            raise DataError(f"{names[i]} and {names[j]} are the same image ({a.key}); nothing could tell them apart.")
    return first, second, third


def text_field(row: Mapping[str, Any], names: Sequence[str]) -> str:
    """The first of these columns that holds a text or a whole number, as text; else ""."""
    for name in names:
        value = row.get(name)
        if isinstance(value, str | int) and not isinstance(value, bool) and str(value).strip():
            return str(value).strip()
    return ""


def as_float(value: Any) -> float:
    """A number or its text as a float; infinite where it is larger than any.

    Raises:
        ValueError, TypeError: it is no number.
    """
    try:
        return float(value)
    except OverflowError:
        return math.inf


def as_json(text: str | bytes) -> Any:
    """What a JSON text, or its UTF-8 bytes, hold.

    Raises:
        DataError: it is not JSON, or nested or numbered beyond what can be read.
    """
    try:
        return json.loads(text.decode("utf-8-sig") if isinstance(text, bytes) else text)
    except (ValueError, RecursionError) as error:  # too many digits are a plain ValueError
        raise DataError(f"not JSON ({shortened(str(error))}).") from error


def shortened(value: object, limit: int = 200) -> str:
    """A value's text for a message, cut where it is long."""
    text = str(value)
    return text if len(text) <= limit else f"{text[:limit]}…"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float | np.integer | np.floating)
