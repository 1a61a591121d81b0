"""The reward as a training loss."""

from __future__ import annotations

import pytest
import torch

from tpips_reward import RemoteReward, TPIPSReward
from tpips_reward.adapters.loss import LossAdapter
from tpips_reward.errors import TPIPSError


def test_the_loss_carries_gradients_and_trains_pixels(metric):
    reward = TPIPSReward("tpips:preserve", metric, gate="none", value_range=(-1, 1))
    loss = LossAdapter(reward, weight=2.0, preserve=["background"])
    source = torch.rand(2, 3, 64, 64) * 2 - 1
    edits = (source + 0.5 * torch.randn_like(source)).clamp(-1, 1).requires_grad_()
    value = loss(edits, source)
    torch.testing.assert_close(value, -2 * loss.output.scores.mean())
    value.backward()
    assert edits.grad.abs().sum() > 0 and all(p.grad is None for p in metric.fusion.parameters())
    with torch.no_grad():
        better = (edits - 0.01 * edits.grad / edits.grad.abs().max()).clamp(-1, 1)
        assert loss(better, source) < value


def test_the_loss_of_one_image_is_of_one_image(metric):
    loss = LossAdapter(TPIPSReward("tpips:preserve", metric, gate="none"), preserve=["background"])
    with torch.no_grad():
        edit, source = torch.rand(2, 3, 64, 64)
        torch.testing.assert_close(loss(edit, source), loss(edit[None], source[None]))
        assert len(loss(edit, source).shape) == 0 and len(loss.output.scores) == 1


def test_a_loss_without_a_gradient_is_refused(metric):
    loss = LossAdapter(TPIPSReward(metric=metric, gate_threshold=0.3), preserve=["background"])
    with pytest.raises(TPIPSError, match=r"images\[0\] carries no gradient"):
        loss(torch.rand(1, 3, 64, 64), torch.rand(1, 3, 64, 64))
    with pytest.raises(TPIPSError, match="RemoteReward has none"):
        LossAdapter(RemoteReward("remote:http://x"))
    with pytest.raises(TPIPSError, match="weight"):
        LossAdapter(TPIPSReward(metric=metric, gate_threshold=0.3), weight=0)
