"""Attention by sections equals one mask; which kernel is chosen; compiled layers score alike."""

from __future__ import annotations

import shutil
import sys
import types

import pytest
import torch
import torch.nn.functional as F

from tpips_reward.attention import VISION_KERNELS, Section, choose_kernel
from tpips_reward.checkpoints import load_metric
from tpips_reward.errors import TPIPSError

CPU, GPU = torch.device("cpu"), torch.device("cuda:0")
FOLDERS = {"late": "embedding", "mid": "activation_dist", "early": "early_fusion"}
ASPECTS = ["lighting", None, "the color of the subject's left ear"]
pytestmark = pytest.mark.filterwarnings("ignore:.*pairs have images of different sizes")


@pytest.mark.parametrize("kind", ["late", "early"])
def test_sections_equal_one_mask_of_the_whole_sequence(request, crops, monkeypatch, kind):
    """In a batch of unequal rows every section has padding; the whole mask is put together from the sections' rows."""
    metric = request.getfixturevalue("metric" if kind == "late" else "early_metric")
    backbone, passes = metric.backbone, []
    run = backbone.run_language

    def by_one_mask(ids, positions, sections, features, **options):
        length, batch = positions.shape[-1], len(ids)
        mask = torch.zeros(batch, 1, length, length, dtype=torch.bool)
        for start, stop, keys, causal, own in sections:
            rows = torch.ones(batch, 1, stop - start, keys, dtype=torch.bool) if own is None else own
            mask[:, :, start:stop, :keys] = rows.tril() if causal else rows
        passes.append((batch, [section.mask is None for section in sections]))
        return run(ids, positions, None, features, mask=mask, **options)

    expected = metric.similarity(crops[:3], crops[1:], ASPECTS)
    monkeypatch.setattr(backbone, "run_language", by_one_mask)
    torch.testing.assert_close(metric.similarity(crops[:3], crops[1:], ASPECTS), expected, atol=1e-6, rtol=0)
    assert any(batch > 1 for batch, _ in passes)


def test_equal_images_and_aspects_need_masks_for_the_last_tokens_only(metric, early_metric, crops, monkeypatch):
    images = [crops[0], crops[0].flip(1), crops[0].flip(2)]
    for chosen, few in ((metric, 3 * 60), (early_metric, 2)):
        seen = []
        run = chosen.backbone.run_language

        def watched(ids, positions, sections, features, run=run, seen=seen, **options):
            seen.append((positions.shape[-1], sections))
            return run(ids, positions, sections, features, **options)

        monkeypatch.setattr(chosen.backbone, "run_language", watched)
        chosen.similarity(images, images[0], "lighting")
        for length, sections in seen:
            assert sections[0].start == 0 and sections[-1].stop == length
            assert [a.stop for a in sections[:-1]] == [b.start for b in sections[1:]]
            assert all(section.mask is None for section in sections[:-1])
            assert sections[-1].stop - sections[-1].start <= few


@pytest.mark.parametrize(
    "device, dtype, installed, capability, kernel, reason",
    [
        (CPU, torch.bfloat16, True, 9, "sdpa", "needs a GPU, and the device is 'cpu'"),
        (GPU, torch.float32, True, 9, "sdpa", "computes in bfloat16, and the dtype is float32"),
        (GPU, torch.bfloat16, False, 9, "sdpa", "not installed"),
        (GPU, torch.bfloat16, True, 7, "sdpa", "Ampere generation"),
        (GPU, torch.bfloat16, True, 8, "flash", None),
    ],
)
def test_the_kernel_that_is_chosen(monkeypatch, device, dtype, installed, capability, kernel, reason):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object() if installed else None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (capability, 0))
    assert choose_kernel(None, device, dtype) == kernel
    assert choose_kernel("sdpa", device, dtype) == "sdpa"
    if reason is None:
        assert choose_kernel("flash", device, dtype) == "flash"
    else:
        with pytest.raises(TPIPSError, match=f"FlashAttention cannot be used: .*{reason}.*attention='sdpa'"):
            choose_kernel("flash", device, dtype)


def test_kernels_that_do_not_exist_or_do_not_run_here(parity, metric):
    with pytest.raises(TPIPSError, match="attention 'eager' is unknown; use sdpa or flash"):
        load_metric(parity / "embedding", device="cpu", attention="eager")
    with pytest.raises(TPIPSError, match="needs a GPU, and the device is 'cpu'"):
        load_metric(parity / "embedding", device="cpu", attention="flash")
    assert metric.backbone.attention == "sdpa"


def test_a_kernel_that_does_not_run_is_refused_before_weights_are_read_or_moved(parity, metric, tmp_path, monkeypatch):
    with pytest.raises(TPIPSError, match="attention 'eager' is unknown"):
        load_metric(tmp_path, device="cpu", attention="eager")  # an empty folder
    monkeypatch.setattr(metric, "_attention", "flash")
    with pytest.raises(TPIPSError, match="needs a GPU, and the device is 'cpu'"):
        metric.to("cpu", dtype="bfloat16")
    assert metric.dtype == torch.float32


@pytest.mark.parametrize("kind", FOLDERS)
def test_flash_attention_gets_the_sections_without_a_mask(parity, crops, monkeypatch, kind):
    """A stand-in for the kernel, by its documented arguments; with it the scores are the same."""
    calls = []

    def flash_attn_func(q, k, v, softmax_scale=None, causal=False):
        assert q.shape[2:] == (4, 16) and k.shape[2:] == v.shape[2:] == (2, 16)  # (B, L, H, d), grouped heads
        calls.append((q.shape[1], k.shape[1], causal))
        q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
        found = F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=softmax_scale, enable_gqa=True)
        return found.transpose(1, 2)

    metric = load_metric(parity / FOLDERS[kind], device="cpu")
    expected = metric.similarity(crops[0], crops[0].flip(1), "lighting")
    monkeypatch.setitem(sys.modules, "flash_attn", types.SimpleNamespace(flash_attn_func=flash_attn_func))
    monkeypatch.setattr("tpips_reward.backbone.choose_kernel", lambda *_: "flash")
    monkeypatch.setitem(VISION_KERNELS, "flash", "sdpa")  # transformers' own route, which needs the real kernel
    metric.set_attention("flash")
    assert metric.backbone.attention == "flash"
    found = metric.similarity(crops[0], crops[0].flip(1), "lighting")
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)
    assert all(q == k for q, k, causal in calls if causal)
    assert {causal for *_, causal in calls} == ({True, False} if kind == "early" else {True})


def test_the_kernel_is_chosen_anew_when_the_metric_moves(parity, monkeypatch):
    metric = load_metric(parity / "embedding", device="cpu")
    asked = []
    monkeypatch.setattr("tpips_reward.backbone.choose_kernel", lambda *given: asked.append(given) or "sdpa")
    metric.to(dtype="bfloat16")
    metric.set_attention("sdpa").to(dtype="float32")
    assert asked == [(None, CPU, torch.bfloat16), ("sdpa", CPU, torch.bfloat16), ("sdpa", CPU, torch.float32)]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("c++") is None and shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
@pytest.mark.parametrize("kind", ["late"])  # the layers are those of every fusion, and each takes the compiler half a minute
def test_compiled_layers_give_equal_scores_and_gradients(parity, crops, kind, monkeypatch):
    """With torch.compile's default compiler; batches of other sizes need no further compilation."""
    plain = load_metric(parity / FOLDERS[kind], device="cpu")
    torch._dynamo.reset()
    compiled = load_metric(parity / FOLDERS[kind], device="cpu", compile=True)
    counters = torch._dynamo.utils.counters
    counters.clear()
    for count in (1, 2, 3):
        expected = plain.similarity(crops[:count], crops[3], ASPECTS)
        torch.testing.assert_close(compiled.similarity(crops[:count], crops[3], ASPECTS), expected, atol=1e-5, rtol=0)
        if count == 1:
            graphs = counters["stats"]["unique_graphs"]
    assert 0 < graphs <= counters["stats"]["unique_graphs"] <= graphs + 2
    images = [crops[0].clone().requires_grad_() for _ in range(2)]
    for metric, image in zip((plain, compiled), images, strict=True):
        metric.similarity(image, crops[1], ASPECTS).sum().backward()
    scale = images[0].grad.abs().max()
    torch.testing.assert_close(images[1].grad / scale, images[0].grad / scale, atol=1e-3, rtol=0)
    torch._dynamo.reset()


def test_compile_reaches_the_layers_and_changes_no_weight(parity, crops, monkeypatch):
    """Quick: the eager backend stands in for the compiler."""
    compiled = []
    monkeypatch.setattr(torch.nn.Module, "compile", lambda module, **options: compiled.append((type(module), options)))
    metric = load_metric(parity / "embedding", device="cpu")
    names = set(metric.fusion.state_dict())
    assert not compiled
    metric.compile()
    model = metric.backbone.model
    assert len(compiled) == len(model.language_model.layers) + len(model.visual.blocks)
    assert set(metric.fusion.state_dict()) == names


def test_a_section_is_what_its_fields_say():
    q, k = torch.randn(1, 4, 5, 16), torch.randn(1, 2, 7, 16)
    from tpips_reward.attention import _sdpa_sections

    module = types.SimpleNamespace(num_key_value_groups=2)
    found, _ = _sdpa_sections(module, q, k, k, None, scaling=0.25,
                              sections=(Section(0, 2, 2, causal=True), Section(2, 5, 7)))  # fmt: skip
    keys = k.repeat_interleave(2, dim=1)
    scores = q @ keys.transpose(-1, -2) * 0.25
    scores[:, :, 0, 1:] = scores[:, :, 1, 2:] = float("-inf")
    torch.testing.assert_close(found, (scores.softmax(-1) @ keys).transpose(1, 2), atol=1e-6, rtol=0)
