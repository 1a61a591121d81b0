"""Mid fusion: a weighted distance between the image tokens of two separate passes (paper, section 4, Eq. 2).

At each probe layer the image tokens are brought to unit length; their squared difference, token by token, is weighted
by channel and averaged over tokens. The weights come from an MLP that reads the layer's text tokens, so they depend on
the aspect. The layers are mixed by a softmax of learned logits. The similarity is minus the distance.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tpips_reward.backbone import ImageFeatures, split_by_budget
from tpips_reward.errors import TPIPSError
from tpips_reward.fusion.base import Pair, TextFirstFusion, accumulation_dtype, check_pairs
from tpips_reward.fusion.distance import DEFAULT_PROBES, Activations, DistanceHead, check_layers, spread_layers
from tpips_reward.fusion.image_first import mrope_positions
from tpips_reward.fusion.sharing import Shared, windows
from tpips_reward.preprocess import ImageSettings, resize, target_size
from tpips_reward.prompts import normalize_aspect

TEXT_POOLS = ("mean", "last")


class View(NamedTuple):
    """An image as it is, or resized to `size` (height, width) so that it has another image's patch grid."""

    image: int
    size: tuple[int, int] | None


def views(pair: tuple[int, int], shapes: Sequence[tuple[int, int]], settings: ImageSettings) -> tuple[View, View]:
    """A pair's images, brought to one patch grid: where the grids differ, the larger image is resized to the smaller's
    size.

    Args:
        pair: two indices into `shapes`.
        shapes: (height, width) of all images.
        settings: how large the grid of an image is.

    Returns:
        The two views, in an order that does not depend on the pair's.
    """
    first, second = (target_size(*shapes[index], settings) for index in pair)
    if first == second:
        return View(min(pair), None), View(max(pair), None)
    # of two equally large ones the taller is resized: the choice must not depend on the order
    small, large = sorted(pair, key=lambda index: (shapes[index][0] * shapes[index][1], shapes[index]))
    return View(small, None), View(large, shapes[small])


class _Node(NamedTuple):
    """What one language pass is made for."""

    view: View
    aspect: str | None


class _Job(NamedTuple):
    """One distance; the order of the two makes no difference, so they come in that of `views`."""

    first: _Node
    second: _Node


class MidFusion(TextFirstFusion):
    """Mid fusion on a Qwen3-VL backbone, with its learned distance.

    Args:
        model, tokenizer, settings, chat_template, processor: see `FusionModule`.
        probe_layers: hidden states to compare, counted from 1; None: `num_probes` evenly spaced ones.
        num_probes: see `spread_layers`.
        text_pool: "mean" over the text tokens, or the "last" one.
    """

    kind = "mid"
    range = (float("-inf"), 0.0)
    temperature = 0.0025

    def build(
        self, *, probe_layers: Sequence[int] | None = None, num_probes: int = DEFAULT_PROBES, text_pool: str = "mean"
    ) -> None:
        super().build()
        depth = int(self.backbone.config.text_config.num_hidden_layers)
        self.probe_layers = (
            spread_layers(num_probes, depth) if probe_layers is None else check_layers(probe_layers, depth)
        )
        if text_pool not in TEXT_POOLS:
            raise TPIPSError(f"text_pool {text_pool!r} is unknown; known are {', '.join(TEXT_POOLS)}.")
        self.text_pool = text_pool
        self.head = DistanceHead(self.backbone.hidden_size, len(self.probe_layers))

    @property
    def options(self) -> dict[str, Any]:
        return {"probe_layers": self.probe_layers, "text_pool": self.text_pool}

    def score_pairs(self, images: list[Tensor], pairs: Sequence[Pair]) -> Tensor:
        """Minus the distances of (image a, image b | aspect).

        The vision tower sees each image once, the language tower once for each of its aspects. Where two images have
        different patch grids, the larger one is resized to the smaller one's size, with a warning; that copy counts as
        another image.

        Args:
            images: distinct (3, H, W) floats in [0, 1], of any sizes; may require grad.
            pairs: (index a, index b, aspect), at least one.

        Returns:
            (N,) float32 (float64 for a float64 model), at most 0.

        Raises:
            TPIPSError: a bad aspect, an index out of range, no pairs.
        """
        check_pairs(pairs, len(images))
        wanted = self._jobs(images, pairs)
        jobs = list(dict.fromkeys(wanted))
        sizes = {node.view: self._count(images, node.view) for job in jobs for node in job}
        nodes = dict.fromkeys(node for job in jobs for node in job)
        features: Shared[View, ImageFeatures] = Shared(
            lambda keys: self.backbone.encode_images([self._pixels(images, view) for view in keys]),
            Counter(node.view for node in nodes),
        )
        activations: Shared[_Node, Activations] = Shared(
            lambda batch: self._activations(batch, features), Counter(node for job in jobs for node in job)
        )
        distances: dict[_Job, Tensor] = {}
        for window in windows([(job.first.view, job.second.view) for job in jobs], sizes, self.feature_budget):
            for batch, ready in self._schedule([jobs[index] for index in window], sizes):
                activations.get(batch)
                if ready:
                    both = [tuple(activations.get(job)) for job in ready]
                    distances.update(zip(ready, self.head(both).unbind(), strict=True))
                    activations.release(node for job in ready for node in job)
        return -torch.stack([distances[job] for job in wanted])

    def _jobs(self, images: list[Tensor], pairs: Sequence[Pair]) -> list[_Job]:
        """Each pair, brought to equal grids."""
        shapes = [(int(image.shape[-2]), int(image.shape[-1])) for image in images]
        jobs = []
        for left, right, aspect in pairs:
            first, second = views((left, right), shapes, self.backbone.settings)
            name = normalize_aspect(aspect)
            jobs.append(_Job(_Node(first, name), _Node(second, name)))
        resized = sum(job.second.view.size is not None for job in jobs)
        if resized:
            warnings.warn(
                f"{resized} of {len(pairs)} pairs have images of different sizes; mid fusion compares them token by "
                "token, so the larger one is resized to the smaller one's size first.",
                stacklevel=5,  # whoever called `Metric.similarity`
            )
        return jobs

    def _schedule(self, jobs: list[_Job], sizes: dict[View, int]) -> Iterator[tuple[list[_Node], list[_Job]]]:
        """Batches of language passes, and the distances that can be computed after each.

        Aspect by aspect and like lengths together; an image of many pairs (a source) comes before those of one, so that
        the others can go as soon as they are there.
        """
        degree = Counter(node for job in jobs for node in job)
        order = {name: position for position, name in enumerate(dict.fromkeys(node.aspect for node in degree))}
        nodes = sorted(degree, key=lambda node: (order[node.aspect], sizes[node.view], -degree[node]))
        lengths = [len(self.prompts.text(node.aspect)) + sizes[node.view] for node in nodes]
        done: set[_Node] = set()
        left = jobs
        for group in split_by_budget(lengths, self.token_budget, padded=True):
            batch = [nodes[index] for index in group]
            done.update(batch)
            ready = [job for job in left if done.issuperset(job)]
            left = [job for job in left if not done.issuperset(job)]
            yield batch, ready

    def activations(self, aspects: Sequence[str | None], features: list[ImageFeatures]) -> list[Activations]:
        """One causal pass of each image behind its aspect, padded on the right, where no earlier token sees it.

        Args:
            aspects, features: (N,) each, of `Backbone.encode_images`; all in one pass.

        Returns:
            (N,) what distances need.

        Raises:
            TPIPSError: a bad aspect.
        """
        image_id = self.backbone.config.image_token_id
        rows = [list(self.prompts.full(aspect)) for aspect in aspects]
        starts = [row.index(image_id) for row in rows]
        counts = [feature.grid[0] * feature.grid[1] for feature in features]
        for row, start, count in zip(rows, starts, counts, strict=True):
            row[start : start + 1] = [image_id] * count
        longest = max(map(len, rows))
        ids = np.full((len(rows), longest), rows[0][0])
        positions = np.zeros((3, len(rows), longest), dtype=np.int64)
        for index, (row, feature) in enumerate(zip(rows, features, strict=True)):
            ids[index, : len(row)] = row
            positions[:, index, : len(row)] = mrope_positions(row, image_id, feature.grid)
        device = self.backbone.device
        states = self.backbone.run_language(
            torch.from_numpy(ids).to(device),
            torch.from_numpy(positions).to(device),
            None,
            features,
            output_hidden_states=self.probe_layers,
        ).hidden_states
        probed = [states[layer] for layer in self.probe_layers]
        return [
            self._read([state[index, : len(row)] for state in probed], start, count)
            for index, (row, start, count) in enumerate(zip(rows, starts, counts, strict=True))
        ]

    def _activations(self, nodes: list[_Node], features: Shared[View, ImageFeatures]) -> list[Activations]:
        seen = [node.view for node in nodes]
        found = self.activations([node.aspect for node in nodes], features.get(seen))
        features.release(seen)
        return found

    def _read(self, states: list[Tensor], start: int, count: int) -> Activations:
        """Probed states (L, D) of one pass, whose image tokens are `count` from `start` on -> what distances need."""
        tokens = torch.stack([state[start : start + count] for state in states])
        if self.text_pool == "last":
            text = torch.stack([state[-1:] for state in states])
        else:
            text = torch.stack([torch.cat([state[:start], state[start + count :]]) for state in states])
        text = text.to(accumulation_dtype(text.dtype))
        return Activations(tokens, text.mean(dim=1))

    def _pixels(self, images: list[Tensor], view: View) -> Tensor:
        image = images[view.image].to(self.backbone.device)
        if view.size is None:
            return image
        return resize(image.to(accumulation_dtype(image.dtype)).unsqueeze(0), view.size)[0]

    def _count(self, images: list[Tensor], view: View) -> int:
        return self.backbone.count_tokens(*(view.size or images[view.image].shape[-2:]))
