"""Chunks of a batch: each sample once, one prompt length each, none above the limit."""

from __future__ import annotations

import pytest
import torch

from rl_recipes.editors.chunks import equal_length_chunks


@pytest.mark.parametrize("limit", [1, 3, 5, 100])
@pytest.mark.parametrize("lengths", [[4], [4] * 7, [2, 2, 5, 5, 5, 2], [1, 2, 3], [3] * 4 + [5] * 11])
def test_chunks_cover_the_batch(lengths, limit):
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    covered = []
    for part, length in equal_length_chunks(mask, len(lengths), limit):
        own = list(range(len(lengths)))[part]
        assert 0 < len(own) <= limit
        assert {lengths[index] for index in own} == {length}
        covered += own
    assert covered == list(range(len(lengths)))


def test_without_a_mask_chunks_are_even():
    parts = [part for part, length in equal_length_chunks(None, 14, 6) if length is None]
    assert [part.stop - part.start for part in parts] == [4, 5, 5]
