"""Chunks on several threads: the same numbers and gradients as on one, and the caller's own settings stay."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from rl_recipes.editors.workers import map_chunks


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_numbers_and_gradients_are_those_of_one_thread(two_threads: None) -> None:
    weight = torch.randn(64, 64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    chunks = list(torch.randn(7, 5, 64, generator=torch.Generator().manual_seed(1)))
    seen: set[str] = set()

    def layer(x: torch.Tensor) -> torch.Tensor:
        seen.add(threading.current_thread().name)
        return torch.tanh(x @ weight)

    out = torch.stack(map_chunks(layer, chunks, 2))
    assert len(seen) == 2 and threading.current_thread().name not in seen
    (gradient,) = torch.autograd.grad(out.sum(), weight)
    for _ in range(20):
        (again,) = torch.autograd.grad(torch.stack(map_chunks(layer, chunks, 2)).sum(), weight)
        assert torch.equal(again, gradient)
    alone = torch.stack(map_chunks(layer, chunks, 1))
    (expected,) = torch.autograd.grad(alone.sum(), weight)
    torch.testing.assert_close(out, alone, atol=1e-6, rtol=0)
    torch.testing.assert_close(gradient, expected, atol=1e-5, rtol=0)
    assert torch.equal(out, torch.stack(map_chunks(layer, chunks, 2)))


def test_the_caller_keeps_its_threads_and_decides_on_gradients(two_threads: None) -> None:
    used = map_chunks(lambda _: torch.get_num_threads(), [0, 1, 2, 3], 2)
    assert set(used) == {1} and torch.get_num_threads() == 2
    weight = torch.ones(2, requires_grad=True)
    with torch.no_grad():
        assert not any(y.requires_grad for y in map_chunks(lambda x: x * weight, [1, 2], 2))
    assert all(y.requires_grad for y in map_chunks(lambda x: x * weight, [1, 2], 2))


def test_an_error_in_a_chunk_reaches_the_caller(two_threads: None) -> None:
    with pytest.raises(ZeroDivisionError):
        map_chunks(lambda x: 1 / x, [1, 0], 2)


def test_autocast_stays_in_one_thread(two_threads: None) -> None:
    x = torch.randn(4, 4)
    with torch.autocast("cpu", torch.bfloat16):
        assert map_chunks(lambda y: (y @ y).dtype, [x, x], 2) == [torch.bfloat16] * 2
