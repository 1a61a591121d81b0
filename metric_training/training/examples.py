"""What a training learns from, as a map-style data set of examples: any source of comparisons, or fresh scenes."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from metric_training.data.comparison import CHOICE_PAIRS, Comparison, DataError, Task, show_problems
from metric_training.data.procedural import TEST_SEED
from metric_training.data.sources import DataOptions, load_data
from metric_training.data.triplets import sample_triplet
from metric_training.data.votes import Voters
from metric_training.training.config import TrainConfig
from tpips_reward.scenes import ASPECTS, Scene, render, sample_scene, to_tensor

PROCEDURAL = "procedural"
#: Numbers of the random streams [seed, stream, index]; those of the test sets are 7 to 10.
_TRIPLETS, _SCENES, _PERMUTATIONS, _SHARE = 11, 12, 13, 14
#: An item's number in the whole run, and which item it is.
Key = tuple[int, int]


@dataclass(frozen=True, eq=False)
class Example:
    """One comparison with some of its aspects, decoded.

    Attributes:
        images: three (3, H, W) floats in [0, 1].
        aspects: A phrases; names: the A names under which they are weighted.
        votes: (A, n) vote shares of the task's n choices.
        task: what was asked.
        scenes: the parameters behind procedural images.
    """

    images: tuple[Tensor, ...]
    aspects: tuple[str, ...]
    names: tuple[str, ...]
    votes: Tensor
    task: Task
    scenes: tuple[Scene, ...] = ()

    @property
    def pairs(self) -> tuple[tuple[int, int], ...]:
        """The two images that speak for each choice."""
        return CHOICE_PAIRS[self.task]


def permuted(example: Example, order: Sequence[int]) -> Example:
    """The same triplet with its images, and so its votes, in another order."""
    scenes = tuple(example.scenes[k] for k in order) if example.scenes else ()
    images = tuple(example.images[k] for k in order)
    return Example(images, example.aspects, example.names, example.votes[:, list(order)], example.task, scenes)


class FreshTriplets:
    """Procedural triplets, made when they are asked for; the same ones for the same seed.

    Args:
        config: ``train_samples``, ``train_share``, ``max_aspects`` and ``seed`` are used.
    """

    task: Task = "odd_one_out"
    digest = PROCEDURAL
    names = frozenset(ASPECTS)

    def __init__(self, config: TrainConfig) -> None:
        self.count = max(1, round(config.train_share * config.train_samples))
        self.seed, self.max_aspects = config.seed, config.max_aspects

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Example:
        rng = np.random.default_rng([self.seed, _TRIPLETS, index])
        triplet = sample_triplet(rng, voters=Voters(), max_aspects=self.max_aspects)
        images = tuple(to_tensor(image) for image in triplet.images)
        return Example(
            images, triplet.wordings, triplet.aspects, torch.from_numpy(triplet.votes), self.task, triplet.scenes
        )


class StoredComparisons:
    """Comparisons of any other source; one with many aspects is several items.

    Args:
        comparisons: of one task.
        max_aspects: of an item.
        names: of all aspects of the set that these are from.
    """

    def __init__(self, comparisons: Sequence[Comparison], max_aspects: int, names: frozenset[str]) -> None:
        self.task, self.names = comparisons[0].task, names
        self.items = [
            (comparison, slice(start, start + max_aspects))
            for comparison in comparisons
            for start in range(0, len(comparison.aspects), max_aspects)
        ]

    @cached_property
    def digest(self) -> str:
        """Of what is asked and how people voted, in order, and of images that were made; not of files: a mended one is the same row."""
        found = hashlib.sha256()
        for comparison, rows in self.items:
            asked = [comparison.task, comparison.aspects[rows], comparison.names[rows], comparison.votes[rows].tolist()]
            # their keys have the pixels' digest: other photographs in a folder make other images of the same votes
            made = [image.key for image in comparison.images if isinstance(image.content, np.ndarray)]
            found.update(json.dumps([*asked, made]).encode())
        return found.hexdigest()

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Example:
        comparison, rows = self.items[index]
        images = tuple(image.load() for image in comparison.images)
        votes = torch.from_numpy(comparison.votes[rows])
        return Example(images, comparison.aspects[rows], comparison.names[rows], votes, comparison.task)


class VoteExamples:
    """The examples of a run: the items of a source, their images in a random order where that is asked for."""

    def __init__(self, config: TrainConfig) -> None:
        self.source = FreshTriplets(config) if config.dataset_name == PROCEDURAL else _stored(config)
        self.seed, self.permute = config.seed, config.permute_images
        if self.permute and self.source.task != "odd_one_out":
            raise DataError("permute_images needs odd-one-out data: in 2AFC the first image is the reference.")

    @property
    def digest(self) -> str:
        """Equal for the same rows; of procedural data, which follow from the settings, nothing but their name."""
        return self.source.digest

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, key: Key) -> Example:
        number, index = key
        example = self.source[index]
        if not self.permute:
            return example
        order = np.random.default_rng([self.seed, _PERMUTATIONS, number]).permutation(3)
        return permuted(example, [int(k) for k in order])


def _stored(config: TrainConfig) -> StoredComparisons:
    if config.seed == TEST_SEED:
        raise DataError(f"seed {TEST_SEED} is that of the test sets; train with another one.")
    options = DataOptions(
        count=config.train_samples,
        seed=config.seed,
        split=config.dataset_train_split,
        image_root=config.image_root,
        strict=config.strict,
    )
    comparisons = _loaded(config.dataset_name, options)
    names = frozenset(name for comparison in comparisons for name in comparison.names)
    if config.train_share < 1:
        order = np.random.default_rng([config.seed, _SHARE]).permutation(len(comparisons))
        comparisons = [comparisons[k] for k in order[: max(1, round(config.train_share * len(comparisons)))]]
    return StoredComparisons(comparisons, config.max_aspects, names)


def validation_comparisons(config: TrainConfig) -> list[Comparison]:
    """The comparisons of a validation, never those of training; of a procedural set fresh ones.

    Raises:
        DataError: the set, or its split, is not there, or it is the file that is trained on.
    """
    name = config.eval_dataset_name or config.dataset_name
    check_apart(config.dataset_name, name, "a validation", "--eval_dataset_name, with another file")
    options = DataOptions(
        count=config.eval_samples,
        seed=config.seed + 99,
        split=config.dataset_eval_split,
        image_root=config.image_root,
        limit=config.eval_samples,
        strict=config.strict,
    )
    return _loaded(name, options)


def check_apart(trained: str, measured: str, what: str, remedy: str) -> None:
    """Refuses to measure on the rows that are trained on: of a file, unlike a folder or a Hub set, there is one split.

    Args:
        trained, measured: the data sets.
        what: the measurement is, such as "a validation"; remedy: what to give instead.

    Raises:
        DataError: they are the same file.
    """
    if Path(trained).is_file() and Path(measured).is_file() and Path(trained).resolve() == Path(measured).resolve():
        raise DataError(f"{trained} is one file, without splits, so that {what} would be of the rows that are trained on; give {remedy}.")


def _loaded(name: str, options: DataOptions) -> list[Comparison]:
    """The comparisons of a set, whose bad rows the first process lists."""
    data = load_data(name, options)
    first = os.environ.get("RANK", "0") == "0"  # as accelerate and torchrun say it
    return (show_problems(data) if first else data).comparisons


@dataclass(frozen=True, eq=False)
class Picture:
    """A scene and its image, (3, 64, 64) floats in [0, 1]."""

    image: Tensor
    scene: Scene


class FreshScenes:
    """Single procedural scenes, each at any angle; ``train_samples`` of them."""

    digest = PROCEDURAL

    def __init__(self, config: TrainConfig) -> None:
        self.count, self.seed = config.train_samples, config.seed

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, key: Key) -> Picture:
        # upright ones would teach nothing of rotation but its mean
        scene = sample_scene(np.random.default_rng([self.seed, _SCENES, key[1]]), turned=1.0)
        return Picture(to_tensor(render(scene)), scene)
