"""Gradients of all fusions: sharing and checkpointing change nothing about them."""

from __future__ import annotations

import copy

import pytest
import torch

from tpips_reward.checkpoints import load_metric

FOLDERS = {"late": "embedding", "mid": "activation_dist", "early": "early_fusion"}
FIXTURES = {"late": "metric", "mid": "mid_metric", "early": "early_metric"}
pytestmark = pytest.mark.filterwarnings("ignore:.*pairs have images of different sizes")


@pytest.mark.parametrize("kind", FIXTURES)
def test_shared_gradients_equal_those_of_single_calls_and_reach_every_parameter(request, kind, crops):
    own = copy.deepcopy(request.getfixturevalue(FIXTURES[kind]).fusion).requires_grad_(True)
    images = [crop.clone().requires_grad_() for crop in crops[:3]]
    pairs = [(0, 1, "lighting"), (1, 2, None), (0, 2, "lighting")]
    factors = torch.tensor([1.0, -2.0, 0.5])
    names, weights = zip(*own.named_parameters(), strict=True)

    def gradients(scores):
        return torch.autograd.grad((scores * factors).sum(), [*images, *weights], allow_unused=True)

    shared = gradients(own.score_pairs(images, pairs))
    single = gradients(torch.cat([own.score_pairs(images, [pair]) for pair in pairs]))
    for name, a, b in zip(["0", "1", "2", *names], shared, single, strict=True):
        assert a is not None, name
        scale = b.abs().max().clamp(min=1e-6)
        torch.testing.assert_close(a / scale, b / scale, atol=1e-4, rtol=0, msg=name)


@pytest.mark.parametrize("kind", FOLDERS)
def test_checkpointing_gives_the_same_gradient(parity, crops, kind):
    found, calls = [], []
    for enabled in (False, True):
        metric = load_metric(parity / FOLDERS[kind], device="cpu")
        if enabled:
            metric.gradient_checkpointing_enable()
        runs = []
        for layer in (metric.backbone.model.language_model.layers[0], metric.backbone.model.visual.blocks[0]):
            layer.mlp.register_forward_pre_hook(lambda *_, runs=runs: runs.append(1))
        image = crops[0].clone().requires_grad_()
        metric.similarity(image, crops[1], ["lighting", "camera angle"]).sum().backward()
        found.append(image.grad)
        calls.append(len(runs))
    torch.testing.assert_close(found[0], found[1], atol=1e-7, rtol=1e-4)
    assert calls[1] == 2 * calls[0]  # the backward pass ran both towers' layers again
