"""What sharing saves: a group of edits of one source in several aspects, against a full pass for each (image, aspect).

    python tests/benchmarks/metric.py speed --fusion late
    python tests/benchmarks/metric.py gradient --fusion late
    python tests/benchmarks/metric.py loading
    python tests/benchmarks/metric.py speed --fusion late --size 8b      (one GPU; nothing is downloaded)
    python tests/benchmarks/metric.py gradient --fusion late --size 8b   (4 edits: 16 would keep about 145 GB, by estimate)

Weights are random. The baseline is the same model on one pair and one aspect at a time, as the formulas say; it is timed
on all aspects of a few edits and scaled to the group. Seconds are the processor's on a CPU, so that other work on the
machine does not count; run with one thread (OMP_NUM_THREADS=1). Each command checks that both ways give equal scores.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode
from transformers import Qwen3VLConfig, Qwen3VLModel

from tpips_reward import TPIPSError, load_metric
from tpips_reward.backbone import Backbone
from tpips_reward.backbone_files import read_json, read_settings, read_tokenizer
from tpips_reward.dtypes import parse_dtype
from tpips_reward.errors import exit_on_errors
from tpips_reward.fusion import FUSIONS
from tpips_reward.metric import Metric
from tpips_reward.released import LAYOUTS

FILES = Path(__file__).parents[1] / "data" / "parity" / "backbone"
ASPECTS = ("background", "lighting", "color of the car", "shape", "camera angle", "position", "texture", "mood")
EDITS, EDITS_8B = 16, 4  # the latter where activations are kept
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2}

# width, MLP, layers, heads, key heads, head width, M-RoPE | vision: width, MLP, blocks, heads, injected | pixels a side
SIZES: dict[str, dict[str, Any]] = {
    "tiny": {"text": (64, 128, 6, 4, 2, 16, (4, 2, 2)), "vision": (48, 96, 3, 4, (0, 1)), "pixels": 96},
    "small": {"text": (512, 1536, 8, 8, 2, 64, (12, 10, 10)), "vision": (192, 768, 4, 4, (0, 1, 2)), "pixels": 512},
    "1gb": {"text": (1024, 3072, 20, 16, 4, 64, (12, 10, 10)), "vision": (192, 768, 4, 4, (0, 1, 2)), "pixels": 128},
    "8b": {
        "text": (4096, 12288, 36, 32, 8, 128, (24, 20, 20)),
        "vision": (1152, 4304, 27, 16, (8, 16, 24)),
        "pixels": 1024,
    },
}


def build_config(size: str) -> Qwen3VLConfig:
    """A Qwen3-VL config of this size, with the test files' vocabulary and patches."""
    content = read_json(FILES / "config.json")
    width, inner, layers, heads, key_heads, head, sections = SIZES[size]["text"]
    content["text_config"] |= {
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": key_heads,
        "head_dim": head,
    }
    content["text_config"]["rope_parameters"]["mrope_section"] = list(sections)
    vision_width, vision_inner, depth, vision_heads, injected = SIZES[size]["vision"]
    content["vision_config"] |= {
        "hidden_size": vision_width,
        "intermediate_size": vision_inner,
        "depth": depth,
        "num_heads": vision_heads,
        "deepstack_visual_indexes": list(injected),
        "out_hidden_size": width,
        "num_position_embeddings": 2304,
    }
    return Qwen3VLConfig(**content)


def build_metric(fusion: str, size: str, device: str, dtype: torch.dtype) -> Metric:
    """A metric with random weights, made where it runs."""
    torch.manual_seed(0)
    with torch.device(device):
        model = Qwen3VLModel._from_config(build_config(size), dtype=dtype)
        backbone = Backbone(model, read_tokenizer(FILES), read_settings(FILES))
        probes = {"num_probes": min(20, backbone.config.text_config.num_hidden_layers)} if fusion == "mid" else {}
        found = FUSIONS[fusion](backbone, **probes)
    return Metric(found.requires_grad_(False)).to(device, dtype).set_attention(None)


def group(options: argparse.Namespace, dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
    """A smooth picture and edits of it: each has another patch of noise."""
    generator = torch.Generator().manual_seed(1)
    side = SIZES[options.size]["pixels"]
    coarse = torch.rand(1, 3, 8, 8, generator=generator)
    source = torch.nn.functional.interpolate(coarse, size=(side, side), mode="bicubic")[0].clamp(0, 1)
    edits = []
    for _ in range(options.edits):
        edit = source.clone()
        edit[:, side // 4 : side // 2, side // 4 : side // 2] = torch.rand(3, side // 4, side // 4, generator=generator)
        edits.append(edit.to(options.device))
    return source.to(options.device), edits


def timed(options: argparse.Namespace, call: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds: of the processor on a CPU, of the clock on a GPU."""
    clock = time.process_time
    if options.device != "cpu":
        torch.cuda.synchronize()
        clock = time.perf_counter
    begin = clock()
    result = call()
    if options.device != "cpu":
        torch.cuda.synchronize()
    return clock() - begin, result


def flops(call: Callable[[], Any]) -> int:
    with FlopCounterMode(display=False) as counter:
        call()
    return counter.get_total_flops()


def prepared(options: argparse.Namespace) -> tuple[Metric, Tensor, list[Tensor], list[str]]:
    dtype = parse_dtype(options.dtype or ("float32" if options.device == "cpu" else "bfloat16"))
    metric = build_metric(options.fusion, options.size, options.device, dtype)
    if options.compile:
        metric.compile()
    source, edits = group(options, dtype)
    return metric, source, edits, list(ASPECTS[: options.aspects])


def speed(options: argparse.Namespace) -> dict[str, Any]:
    """Scores of a group, together and one by one."""
    metric, source, edits, aspects = prepared(options)

    def together() -> Tensor:
        return metric.similarity(edits, source, aspects)

    def alone(count: int) -> Tensor:
        rows = [[metric.similarity(edit, source, aspect)[0] for aspect in aspects] for edit in edits[:count]]
        return torch.stack([torch.stack(row) for row in rows])

    metric.similarity(edits[0], source, aspects[0])  # warms up
    if options.compile:
        together()
    seconds, scores = timed(options, together)
    peak = peak_memory(options)
    alone_seconds, expected = timed(options, lambda: alone(options.alone))
    alone_seconds *= len(edits) / options.alone
    difference = float((scores[: options.alone] - expected).abs().max())
    check(difference, metric.dtype)
    bound = flops(lambda: alone(1)) * len(edits) / flops(together)
    vision = flops(lambda: metric.backbone.encode_images([source])) * (1 + len(edits)) / flops(together)
    ratio = alone_seconds / seconds
    return {
        **described(options, metric),
        "together_seconds": round(seconds, 3),
        "alone_seconds": round(alone_seconds, 3),
        "alone_timed_edits": options.alone,
        "times_faster": round(ratio, 2),
        "bound_by_flops": round(bound, 2),
        "share_of_bound": round(ratio / bound, 2),
        "vision_share_of_flops": round(vision, 2),
        "largest_difference": difference,
        "peak_gib": round(peak / 2**30, 3),
    }


def gradient(options: argparse.Namespace) -> dict[str, Any]:
    """The gradient of the mean score to all edits, together and one by one; peak memory with and without checkpointing."""
    metric, source, edits, aspects = prepared(options)

    def together() -> tuple[list[Tensor], Tensor]:
        leaves = [edit.clone().requires_grad_() for edit in edits]
        scores = metric.similarity(leaves, source, aspects)
        return list(torch.autograd.grad(scores.sum(), leaves)), scores.detach()

    def alone(count: int) -> tuple[list[Tensor], Tensor]:
        found, rows = [], []
        for edit in edits[:count]:
            total = torch.zeros_like(edit)
            for aspect in aspects:
                leaf = edit.clone().requires_grad_()
                score = metric.similarity(leaf, source, aspect)
                total += torch.autograd.grad(score.sum(), leaf)[0]
                rows.append(score.detach()[0])
            found.append(total)
        return found, torch.stack(rows).view(count, len(aspects))

    leaf = edits[0].clone().requires_grad_()
    metric.similarity(leaf, source, aspects[0]).sum().backward()  # warms up
    seconds, (gradients, scores) = timed(options, together)
    alone_seconds, (expected, rows) = timed(options, lambda: alone(options.alone))
    alone_seconds *= len(edits) / options.alone
    difference = float((scores[: options.alone] - rows).abs().max())
    check(difference, metric.dtype)
    far = max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(gradients, expected, strict=False))
    bound = flops(lambda: alone(1)) * len(edits) / flops(together)
    del gradients, expected
    if options.device != "cpu":
        torch.cuda.empty_cache()  # the processes that measure memory load the model again
    memory = {name: step_memory(options, name) for name in ("plain", "checkpointing")}
    return {
        **described(options, metric),
        "together_seconds": round(seconds, 3),
        "alone_seconds": round(alone_seconds, 3),
        "alone_timed_edits": options.alone,
        "times_faster": round(alone_seconds / seconds, 2),
        "bound_by_flops": round(bound, 2),
        "largest_difference": difference,
        "largest_gradient_difference": far,
        "step_gib": {name: round(value / 2**30, 3) for name, value in memory.items()},
        "checkpointing_saves": round(memory["plain"] / max(memory["checkpointing"], 1), 2),
    }


def step_memory(options: argparse.Namespace, kind: str) -> int:
    """Bytes that one gradient step adds at its peak, in a process of its own on a CPU."""
    arguments = [f"--{name}={getattr(options, name)}" for name in ("fusion", "size", "device", "edits", "aspects")]
    arguments += [f"--dtype={options.dtype}"] if options.dtype else []
    return int(child("memory", *arguments, *(["--checkpointing"] if kind == "checkpointing" else []))["bytes"])


def child(*arguments: str) -> dict[str, Any]:
    """What this file's command answers in a process of its own; what that says on stderr passes on."""
    found = subprocess.run([sys.executable, __file__, *arguments], check=False, stdout=subprocess.PIPE, text=True)
    if found.returncode:
        raise TPIPSError(f"The command {arguments[0]!r} ended with status {found.returncode}; what it said stands above.")
    return json.loads(found.stdout)


def memory(options: argparse.Namespace) -> dict[str, Any]:
    """See `step_memory`."""
    metric, source, edits, aspects = prepared(options)
    if options.checkpointing:
        metric.gradient_checkpointing_enable()
    metric.similarity(edits[0], source, aspects[0])  # what stays is there before
    before = peak_memory(options)
    leaves = [edit.clone().requires_grad_() for edit in edits]
    metric.similarity(leaves, source, aspects).sum().backward()
    return {"bytes": peak_memory(options) - before}


def peak_memory(options: argparse.Namespace) -> int:
    if options.device == "cpu":
        return peak_rss()
    return torch.cuda.max_memory_allocated()


def peak_rss() -> int:
    """Bytes that this process has had in memory at most; `ru_maxrss` would count what its parent had too."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


def loading(options: argparse.Namespace) -> dict[str, Any]:
    """Peak memory of loading a checkpoint of about 1 GB in the released layout, adapters folded in, over its size."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_released(folder, options)
        size = (folder / "checkpoint" / "model.pt").stat().st_size
        weights = [path.name for path in (folder / "backbone").iterdir() if path.suffix in (".safetensors", ".bin")]
        found = child("load", "--folder", str(folder / "checkpoint"), "--size", options.size)
    check(found["largest_difference"], torch.float32)
    return {
        "size": options.size,
        "file_gib": round(size / 2**30, 3),
        "backbone_weights_on_disk": weights,
        "python_gib": round(found["before"] / 2**30, 3),
        "peak_gib": round(found["loaded"] / 2**30, 3),
        "peak_over_file": round(found["loaded"] / size, 3),
        "added_over_file": round((found["loaded"] - found["before"]) / size, 3),
        "peak_after_a_score_over_file": round(found["scored"] / size, 3),
        "seconds": round(found["seconds"], 2),
        "largest_difference_from_unmerged": found["largest_difference"],
    }


def write_released(folder: Path, options: argparse.Namespace) -> None:
    """A late-fusion checkpoint with random weights and adapters, float32."""
    config = build_config(options.size)
    torch.manual_seed(0)
    state = Qwen3VLModel._from_config(config, dtype=torch.float32).state_dict()
    layout, rank, found = LAYOUTS["embedding"], 16, {}
    for key, value in state.items():
        if key.startswith("visual."):
            found[layout.visual + key.removeprefix("visual.")] = value
            continue
        layer = key.removeprefix("language_model.").removesuffix(".weight")
        stem = f"{layout.language}base_model.model.{layer}"
        if layer.endswith(layout.lora_targets):
            found[f"{stem}.base_layer.weight"] = value
            found[f"{stem}.lora_A.default.weight"] = torch.randn(rank, value.shape[1]) * 0.02
            found[f"{stem}.lora_B.default.weight"] = torch.randn(value.shape[0], rank) * 0.02
        else:
            found[f"{stem}.weight"] = value
    (folder / "checkpoint").mkdir()
    torch.save(found, folder / "checkpoint" / "model.pt")
    content = {"type": "embedding", "backbone_family": "qwen3_vl_embed", "name": "backbone", "lora_r": rank}
    (folder / "checkpoint" / "config.json").write_text(json.dumps({"model": content}), encoding="utf-8")
    shutil.copytree(FILES, folder / "backbone")
    config.save_pretrained(folder / "backbone")


def load(options: argparse.Namespace) -> dict[str, Any]:
    """See `loading`; in a process of its own."""
    import peft  # noqa: F401  its memory is no checkpoint's

    options.device, options.edits = "cpu", 1
    before = resident()
    begin = time.perf_counter()
    metric = load_metric(options.folder, device="cpu", dtype="float32")
    seconds = time.perf_counter() - begin
    loaded = peak_memory(options)
    source, edits = group(options, torch.float32)
    score = metric.similarity(edits, source, "lighting")
    scored = peak_memory(options)
    apart = load_metric(options.folder, device="cpu", dtype="float32", merge_lora=False)
    difference = float((apart.similarity(edits, source, "lighting") - score).abs().max())
    return {"before": before, "loaded": loaded, "scored": scored, "seconds": seconds, "largest_difference": difference}


def resident() -> int:
    """Bytes that this process holds now."""
    pages = Path("/proc/self/statm").read_text(encoding="utf-8").split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def check(difference: float, dtype: torch.dtype) -> None:
    if not difference <= TOLERANCE[dtype]:
        raise TPIPSError(f"Both ways must give equal scores to {TOLERANCE[dtype]}, but they differ by {difference}.")


def described(options: argparse.Namespace, metric: Metric) -> dict[str, Any]:
    return {
        "fusion": options.fusion,
        "size": options.size,
        "device": options.device,
        "dtype": str(metric.dtype).removeprefix("torch."),
        "attention": metric.backbone.attention,
        "compiled": options.compile,
        "pixels": SIZES[options.size]["pixels"],
        "edits": options.edits,
        "aspects": options.aspects,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(required=True)
    for run in (speed, gradient, memory, loading, load):
        command = commands.add_parser(run.__name__, help=(run.__doc__ or "").splitlines()[0])
        command.set_defaults(run=run, compile=False, checkpointing=False)
        command.add_argument("--size", choices=list(SIZES), default="1gb" if run in (loading, load) else "small")
        if run is load:
            command.add_argument("--folder", required=True)
        if run in (speed, gradient, memory):
            command.add_argument("--fusion", choices=["late", "mid", "early"], default="late")
            command.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
            command.add_argument("--dtype", help="default: float32 on a CPU, else bfloat16")
            command.add_argument("--edits", type=int, help=f"of one source (default: {EDITS}, with gradients at 8b {EDITS_8B})")
            command.add_argument("--aspects", type=int, default=8)
            command.add_argument("--alone", type=int, default=1, help="edits that the baseline is timed on")
        if run is speed:
            command.add_argument("--compile", action="store_true", help="of both")
        if run is memory:
            command.add_argument("--checkpointing", action="store_true")
    options = parser.parse_args()
    if getattr(options, "edits", 0) is None:
        options.edits = EDITS_8B if options.size == "8b" and options.run is not speed else EDITS
    with exit_on_errors("metric benchmark"):
        try:
            answer = options.run(options)
        except torch.OutOfMemoryError as error:
            reason = str(error).splitlines()[0]
            raise TPIPSError(f"The GPU's memory is too small ({reason}); give fewer --edits or --aspects.") from error
        print(json.dumps(answer))


if __name__ == "__main__":
    main()
