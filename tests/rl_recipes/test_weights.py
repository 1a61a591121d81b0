"""A second set of weights: it follows, is swapped in and out, and is kept to the bit."""

from __future__ import annotations

import pytest
import torch

from rl_recipes.weights import MovingAverage, ShadowWeights
from tpips_reward.errors import TPIPSError


def _parameters() -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((3, 2), (4,))]


def test_it_begins_equal_and_follows() -> None:
    parameters = _parameters()
    shadow = ShadowWeights(parameters)
    start = [p.detach().clone() for p in parameters]
    with torch.no_grad():
        for parameter in parameters:
            parameter.add_(1.0)
    assert all(map(torch.equal, shadow.tensors, start))
    shadow.follow(0.75)
    for tensor, first in zip(shadow.tensors, start, strict=True):
        torch.testing.assert_close(tensor, first + 0.25)
    shadow.follow(0.0)
    assert all(map(torch.equal, shadow.tensors, parameters))


def test_it_is_swapped_in_for_a_block_whatever_happens_there() -> None:
    parameters = _parameters()
    shadow = ShadowWeights(parameters)
    with torch.no_grad():
        parameters[0].add_(1.0)
    trained = [p.detach().clone() for p in parameters]
    with pytest.raises(KeyboardInterrupt), shadow.swapped():
        assert all(map(torch.equal, parameters, shadow.tensors))
        raise KeyboardInterrupt
    assert all(map(torch.equal, parameters, trained))


def test_its_state_goes_into_another() -> None:
    parameters = _parameters()
    shadow, other = ShadowWeights(parameters), ShadowWeights(_parameters())
    with torch.no_grad():
        parameters[0].mul_(3.0)
    shadow.follow(0.3)
    other.load_state_dict(shadow.state_dict())
    assert all(map(torch.equal, other.tensors, shadow.tensors))
    with pytest.raises(TPIPSError, match="of another editor or adapter"):
        other.load_state_dict({"tensors": shadow.state_dict()["tensors"][:1]})


def test_the_moving_average_is_that_of_the_weights_after_each_step_alone() -> None:
    parameters = _parameters()
    average, generator, seen = MovingAverage(parameters, 0.9), torch.Generator().manual_seed(1), []
    for step in range(5):
        with torch.no_grad():
            parameters[0].add_(torch.randn(3, 2, generator=generator))
        average.update()
        seen.append(parameters[0].detach().clone())
        weights = torch.tensor([0.9 ** (step - i) for i in range(step + 1)])
        expected = (torch.stack(seen) * weights[:, None, None]).sum(dim=0) / weights.sum()
        torch.testing.assert_close(average.tensors[0], expected)
    other = MovingAverage(parameters, 0.9)
    other.load_state_dict(average.state_dict())
    for one in (average, other):
        one.update()
    assert torch.equal(other.tensors[0], average.tensors[0])
    with pytest.raises(TPIPSError, match="of another version"):
        other.load_state_dict({"tensors": average.tensors})
