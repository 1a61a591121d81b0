"""Simulated voters and procedural triplets."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from metric_training.data.triplets import sample_triplet
from metric_training.data.votes import PAIRS, Voters
from metric_training.losses import agreement, consensus, odd_one_out_losses, pair_similarities
from tpips_reward.scenes import aspect_distance, wordings


def test_the_image_outside_the_closest_pair_is_called_odd() -> None:
    # Images 0 and 2 are close: pair (0, 2) is the one without image 1.
    votes = Voters(count=2000, lapse=0.0).vote(np.array([3.0, 0.1, 3.0]), np.random.default_rng(0))
    assert votes is not None and votes.argmax() == 1 and votes.sum() == pytest.approx(1)
    expected = np.exp([-3.3, -0.11, -3.3])
    assert votes == pytest.approx(expected / expected.sum(), abs=0.03)


def test_an_invisible_aspect_is_removed() -> None:
    assert Voters().vote(np.array([0.0, 0.05, 0.05]), np.random.default_rng(0)) is None


def test_most_who_cannot_tell_remove_an_aspect_and_fewer_are_dropped() -> None:
    # At the threshold each voter sees the difference half of the time.
    generator = np.random.default_rng(0)
    results = [Voters().vote(np.array([0.5, 0.0, 0.5]), generator) for _ in range(300)]
    assert 0.3 < np.mean([r is None for r in results]) < 0.7
    shares = {round(float(v), 4) for r in results if r is not None for v in r}
    # Only votes of five, four or three voters remain.
    assert shares <= {round(k / n, 4) for n in (3, 4, 5) for k in range(n + 1)}


def test_triplets_repeat_with_their_seed_and_are_well_formed() -> None:
    first, second = (sample_triplet(np.random.default_rng(5)) for _ in range(2))
    assert first.scenes == second.scenes and first.wordings == second.wordings
    assert all(np.array_equal(a, b) for a, b in zip(first.images, second.images, strict=True))
    generator = np.random.default_rng(1)
    for _ in range(30):
        triplet = sample_triplet(generator, split="test")
        assert triplet.votes.shape == (len(triplet.aspects), 3) and 3 <= len(triplet.aspects) <= 7
        assert np.allclose(triplet.votes.sum(1), 1)
        assert len(set(triplet.aspects)) == len(triplet.aspects)
        for aspect, phrase in zip(triplet.aspects, triplet.wordings, strict=True):
            assert phrase in wordings(aspect, "test") or aspect == "overall"
        if "rotation" in triplet.aspects:
            assert len({s.shape for s in triplet.scenes}) == 1


def test_odd_roles_are_spread_over_the_images() -> None:
    generator = np.random.default_rng(2)
    triplets = [sample_triplet(generator) for _ in range(60)]
    odd = np.concatenate([t.votes.argmax(1) for t in triplets])
    assert np.bincount(odd, minlength=3).min() > 0.25 * len(odd)
    # Within a triplet, too: no image is odd in everything.
    assert np.mean([len(set(t.votes.argmax(1))) == 3 for t in triplets]) > 0.7


def test_votes_follow_the_distances() -> None:
    generator = np.random.default_rng(3)
    shares = []
    for _ in range(60):
        t = sample_triplet(generator)
        for aspect, votes in zip(t.aspects, t.votes, strict=True):
            closest = int(np.argmin([aspect_distance(aspect, t.scenes[i], t.scenes[j]) for i, j in PAIRS]))
            shares.append(votes[closest])
    assert np.mean(shares) > 0.65


def test_loss_is_the_papers_cross_entropy() -> None:
    generator = torch.Generator().manual_seed(0)
    embeddings = torch.nn.functional.normalize(torch.randn(4, 3, 8, generator=generator, dtype=torch.float64), dim=-1)
    votes = torch.rand(4, 3, generator=generator, dtype=torch.float64)
    votes /= votes.sum(-1, keepdim=True)
    tau = 0.05
    expected = 0.0
    for n in range(4):
        x1, x2, x3 = embeddings[n]
        s_bar = torch.stack([x2 @ x3, x1 @ x3, x1 @ x2]) / tau
        p = s_bar.exp() / s_bar.exp().sum()
        expected -= float((votes[n] * p.log()).sum()) / 4
    assert float(odd_one_out_losses(pair_similarities(embeddings), votes, tau).mean()) == pytest.approx(expected, rel=1e-5)


def test_agreement_and_consensus() -> None:
    votes = torch.tensor([[0.6, 0.4, 0.0], [0.2, 0.2, 0.6]])
    similarities = torch.tensor([[0.9, 0.1, 0.2], [0.5, 0.5, 0.5]])
    assert agreement(similarities, votes).tolist() == pytest.approx([0.6, 1 / 3])
    assert consensus(votes).tolist() == pytest.approx([0.52, 0.44])
