"""Where edits to train on come from: procedural scenes, or a user's own photographs listed in a JSONL file.

Both sources are pure functions of a position: the same seed and position always give the same prompt, so a run that
resumes, or that is spread over several processes, needs no state from them.
"""

from __future__ import annotations

import copy
import difflib
import hashlib
import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
import torch
from PIL import ExifTags, Image

from rl_recipes.logs import each_process
from tpips_reward.errors import TPIPSError, reason
from tpips_reward.images import to_tensors
from tpips_reward.rewards.aspects import aspect_lists, check_disjoint
from tpips_reward.scenes import Edit, render, sample_edit, to_tensor

log = logging.getLogger(__name__)

#: Larger photographs are refused before they are decoded.
MAX_PIXELS = 64_000_000
#: Longer by shorter side; what lies beyond is a strip that no editor was trained for.
MAX_ASPECT_RATIO = 8.0
#: Shorter sides are refused: an image of a few pixels is a mistake, not a photograph.
MIN_SIDE = 16
_MAX_NAMED = 20
#: Of a row of --data.
_KEYS = ("image", "instruction", "preserve", "target")
EXAMPLE = '{"image": "photo.jpg", "instruction": "make the car red", "preserve": ["background"], "target": ["car color"]}'


class PromptError(TPIPSError):
    """A data file or a row that cannot be used."""


@dataclass(frozen=True, eq=False)
class Prompt:
    """One edit to ask for.

    Attributes:
        image: the source, (3, H, W) float32 in [0, 1]; or several, for editors of several condition images.
        instruction: the sentence for the editor.
        preserve: aspects that must stay.
        target: aspects that must change; may be empty where the user named none.
        key: names the prompt in logs and files.
        edit: the procedural edit with its known ideal, or None.
    """

    image: torch.Tensor | tuple[torch.Tensor, ...]
    instruction: str
    preserve: tuple[str, ...]
    target: tuple[str, ...]
    key: str
    edit: Edit | None = None


class PromptSource(Protocol):
    """What a run needs of a source of prompts."""

    def __getitem__(self, position: int) -> Prompt:
        """The prompt at any position >= 0; a source of finite length starts over."""
        ...

    def key_at(self, position: int) -> str:
        """The key of the prompt at a position, without loading it."""
        ...

    @property
    def period(self) -> int | None:
        """So many positions hold each prompt once; None where none comes again."""
        ...


class ProceduralPrompts:
    """Procedural edits; the prompt at a position depends on the seed, the split and the position alone.

    Args:
        seed: a run's seed.
        split: "train", or "test" for combinations of edit, shape and value that never occur in training.
        size: side of the rendered images in pixels.
        count: so many edits, over and over; 0: endless.
    """

    def __init__(self, seed: int, split: Literal["train", "test"] = "train", size: int = 64, count: int = 0) -> None:
        self.seed, self.split, self.size, self.count = seed, split, size, count

    @property
    def period(self) -> int | None:
        """How many edits there are; None for endless ones."""
        return self.count or None

    def key_at(self, position: int) -> str:
        """The key of the prompt at a position."""
        return f"{self.split}-{position % self.count if self.count else position:06d}"

    def __getitem__(self, position: int) -> Prompt:
        position = position % self.count if self.count else position
        rng = np.random.default_rng([self.seed, self.split == "test", position])
        edit = sample_edit(rng, self.split)
        return Prompt(
            image=to_tensor(render(edit.source, self.size)),
            instruction=edit.instruction,
            preserve=tuple(edit.preserve),
            target=tuple(edit.target),
            key=self.key_at(position),
            edit=edit,
        )


@dataclass(frozen=True)
class Row:
    """A checked row of a data file; sizes are (width, height) of each image."""

    line: int
    images: tuple[Path, ...]
    sizes: tuple[tuple[int, int], ...]
    bytes: tuple[int, ...]
    instruction: str
    preserve: tuple[str, ...]
    target: tuple[str, ...]


class JSONLPrompts:
    """A user's own edits: ``{"image": "photo.jpg", "instruction": "…", "preserve": ["…"], "target": ["…"]}`` a line.

    Image paths are relative to the file; editors of several condition images take a list of them. ``target`` may be left
    out. Every epoch has its own order, from the seed.
    Headers of all images are read at once; pixels when a prompt is drawn.

    Args:
        path: the JSONL file.
        on_bad_row: "skip" names each bad row in the log, counts it, and goes on; "error" stops at the first.
        seed: seed of the order; None keeps the file's order.
        check: called with each row; raises a TPIPSError where editor or reward cannot take it.

    Attributes:
        rows: the usable rows.
        bad: (line number, reason) of each row that was skipped, those that this process found later included.
        fingerprint: SHA-256 of the file and of its images' sizes in pixels and bytes, so that a run that resumes can
            tell whether they have changed; of an image that was exchanged for one of equal sizes it knows nothing.

    Raises:
        PromptError: when the file cannot be read, a row is bad and ``on_bad_row="error"``, or no row is usable.
    """

    def __init__(
        self,
        path: str | Path,
        on_bad_row: Literal["skip", "error"] = "skip",
        seed: int | None = None,
        check: Callable[[Row], None] = lambda row: None,
    ) -> None:
        self.path, self.on_bad_row, self.seed = Path(path), on_bad_row, seed
        self.rows: list[Row] = []
        self.bad: list[tuple[int, str]] = []
        try:
            content = self.path.read_bytes()
        except OSError as error:
            raise PromptError(f"The data file {path} cannot be read ({error.strerror}); check its name and rights.") from error
        for number, line in enumerate(content.split(b"\n"), 1):
            if not line.strip():
                continue
            try:
                row = parse_row(line, number, self.path.parent)
                check(row)
                self.rows.append(row)
            except TPIPSError as error:
                self._reject(number, str(error))
        if not self.rows:
            reasons = "; ".join(f"line {n}: {why}" for n, why in self.bad[:3]) or "it is empty"
            raise PromptError(
                f"The data file {path} has no usable row ({reasons}); each line must be one edit, such as {EXAMPLE}"
            )
        self._total = len(self.bad) + len(self.rows)
        if self.bad:
            log.warning("%s: %d of %d rows skipped", self.path.name, len(self.bad), self._total)
        self.fingerprint = _fingerprint(content, self.rows)
        self._broken: set[int] = set()

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def period(self) -> int | None:
        """The number of rows."""
        return len(self.rows)

    def key_at(self, position: int) -> str:
        """The key of the row at a position; of one whose pixels turn out broken it is that row's own."""
        return f"line-{self.rows[self._row_at(position)].line}"

    def __getitem__(self, position: int) -> Prompt:
        # A photograph whose pixels turn out to be broken gives its place to the next row of the same order.
        for shift in range(len(self.rows)):
            row = self.rows[self._row_at(position + shift)]
            if row.line in self._broken:
                continue
            try:
                loaded = tuple(load_image(path) for path in row.images)
            except PromptError as error:
                self._broken.add(row.line)
                self._reject(row.line, str(error), each_process)
                if len(self.bad) <= _MAX_NAMED:
                    each_process.warning("%s: now %d of %d rows skipped", self.path.name, len(self.bad), self._total)
                continue
            image = loaded[0] if len(loaded) == 1 else loaded
            return Prompt(image, row.instruction, row.preserve, row.target, key=f"line-{row.line}")
        raise PromptError(f"No image in {self.path} can be decoded any more; the last reason: {self.bad[-1][1]}")

    def in_file_order(self) -> JSONLPrompts:
        """The same rows in the order of the file, for an evaluation."""
        other = copy.copy(self)
        other.seed = None
        return other

    def _row_at(self, position: int) -> int:
        epoch, place = divmod(position, len(self.rows))
        if self.seed is None:
            return place
        return int(np.random.default_rng([self.seed, epoch]).permutation(len(self.rows))[place])

    def _reject(self, line: int, reason: str, log: logging.Logger = log) -> None:
        if self.on_bad_row == "error":
            raise PromptError(f"{self.path}, line {line}: {reason} (--on_bad_row skip goes on without such rows.)")
        self.bad.append((line, reason))
        if len(self.bad) <= _MAX_NAMED:
            log.warning("%s, line %d skipped: %s", self.path.name, line, reason)
        elif len(self.bad) == _MAX_NAMED + 1:
            log.warning("%s: further bad rows are counted, and listed in summary.json", self.path.name)


def parse_row(line: bytes, number: int, folder: Path) -> Row:
    """Checks one row and the header of its image.

    Args:
        line: the row's bytes.
        number: its line number, from 1.
        folder: image paths are relative to it.

    Raises:
        PromptError: naming what is wrong with the row.
    """
    try:
        row = json.loads(line.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:  # a ValueError also for numbers of more than 4300 digits
        raise PromptError(f"not JSON ({reason(error)}).") from error
    if not isinstance(row, dict):
        raise PromptError(f'not an object such as {{"image": …}} but {type(row).__name__}.')
    for name in ("image", "instruction", "preserve"):
        if name not in row:
            raise PromptError(f"{name!r} is missing; it has {', '.join(map(repr, row)) or 'no keys'}.")
    for name in row.keys() - set(_KEYS):
        meant = difflib.get_close_matches(str(name).casefold(), _KEYS, n=1, cutoff=0.8)
        if meant:  # any other key may be the user's own
            raise PromptError(f"the key {name!r} is not known; {meant[0]!r} is. Correct it, or choose another name.")
    names = row["image"] if isinstance(row["image"], list) and row["image"] else [row["image"]]
    for name, texts in (("image", names), ("instruction", [row["instruction"]])):
        for text in texts:
            if not isinstance(text, str) or not text.strip():
                raise PromptError(f"{name!r} must be a text, not {text!r}.")
    preserve = _aspects(row["preserve"], "preserve")
    target = _aspects(row.get("target", []), "target", empty=True)
    check_disjoint([preserve], [target])
    for text in names:
        if "://" in text:
            raise PromptError(f"'image' must be a local file, not the address {text!r}; download it first.")
    paths = tuple(folder / text for text in names)
    sizes = tuple(image_size(path) for path in paths)
    lengths = tuple(path.stat().st_size for path in paths)
    return Row(number, paths, sizes, lengths, row["instruction"].strip(), preserve, target)


def _aspects(value: object, name: str, empty: bool = False) -> tuple[str, ...]:
    if not isinstance(value, list):
        raise PromptError(f"{name!r} must be a list of aspects, not {value!r}.")
    if not value and not empty:
        raise PromptError(f"{name!r} is an empty list; name at least one aspect.")
    for aspect in value:
        if not isinstance(aspect, str) or not aspect.strip():
            raise PromptError(f"{name!r} holds {aspect!r}; each aspect must be a text such as 'background'.")
    return tuple(aspect_lists([value], 1, name)[0])


def image_size(path: Path) -> tuple[int, int]:
    """(width, height) after EXIF orientation, read from the header.

    Raises:
        PromptError: when the file is missing, is no image, or has a size that cannot be used.
    """
    try:
        # A pipe would be waited for without end, and a device read without end.
        if path.exists() and not path.is_file():
            raise PromptError(f"the image {path} is no file; give an image file.")
        with Image.open(path) as image:
            width, height = image.size
            # Asking a PNG for EXIF data that its header lacks would decode all of it.
            exif = image.getexif() if image.format != "PNG" or "exif" in image.info else {}
            if exif.get(ExifTags.Base.Orientation, 1) in (5, 6, 7, 8):
                width, height = height, width
    except FileNotFoundError as error:
        raise PromptError(f"the image {path} does not exist.") from error
    except PromptError:
        raise
    except Exception as error:  # Pillow's decoders raise many kinds, struct.error and SyntaxError among them
        raise PromptError(f"the image {path} does not open ({reason(error)}).") from error
    if width * height > MAX_PIXELS:
        raise PromptError(f"the image {path} is too large, {width}x{height}; at most {MAX_PIXELS:,} pixels are read.")
    if min(width, height) < MIN_SIDE:
        raise PromptError(f"the image {path} is too small, {width}x{height}; each side needs {MIN_SIDE} pixels.")
    if max(width, height) > MAX_ASPECT_RATIO * min(width, height):
        raise PromptError(
            f"the image {path} is too narrow, {width}x{height}; crop it to {MAX_ASPECT_RATIO:g}:1 or less."
        )
    return width, height


def load_image(path: Path) -> torch.Tensor:
    """Decodes a photograph: EXIF orientation applied, transparency on white, grayscale expanded.

    Returns:
        (3, H, W) float32 in [0, 1].

    Raises:
        PromptError: when it does not decode.
    """
    try:
        with Image.open(path) as opened:
            return to_tensors([opened])[0]
    except Exception as error:  # as above
        raise PromptError(f"the image {path} does not open ({reason(error)}).") from error


def _fingerprint(content: bytes, rows: list[Row]) -> str:
    digest = hashlib.sha256(content)
    for row in rows:
        digest.update(f"{row.line} {row.sizes} {row.bytes}\n".encode())
    return digest.hexdigest()
