"""What it brings to train on all aspects of a triplet in one step, against a step for each aspect, as the paper does it.

    OMP_NUM_THREADS=1 python tests/benchmarks/training.py

A random backbone, 256 px, LoRA on the language tower, frozen vision tower: forward and backward pass of one triplet with
all its aspects ("shared"), and of the same with one aspect after the other ("separate"). Gradients must agree before
anything is timed. Seconds are those of the processor, so that other work on the machine does not count.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace

import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor, nn
from transformers import Qwen3VLConfig, Qwen3VLModel

from metric_training.builtin_model import build_late_fusion
from metric_training.training.config import TrainConfig
from metric_training.training.examples import Example
from metric_training.training.model import LORA_TARGETS
from metric_training.training.objectives import VoteObjective
from tpips_reward.backbone import Backbone
from tpips_reward.fusion import FUSIONS
from tpips_reward.fusion.base import FusionModule
from tpips_reward.preprocess import ImageSettings

ASPECTS = ("lighting", "background color", "object color", "shape", "size of the cup", "position", "texture of the wall",
           "count", "sharpness", "warmth", "overall", "brightness")  # fmt: skip


def benchmark_fusion(kind: str, hidden: int, layers: int, vision_hidden: int, vision_layers: int) -> FusionModule:
    """A random Qwen3-VL with the real patch and merge sizes (16 and 2), and adapters that change something."""
    small = build_late_fusion(0).backbone
    content = small.config.to_dict()
    head = hidden // 4
    content["text_config"] |= {
        "hidden_size": hidden, "intermediate_size": 3 * hidden, "num_hidden_layers": layers, "head_dim": head,
        "rope_parameters": {
            "rope_type": "default", "rope_theta": 10000.0, "mrope_interleaved": True,
            "mrope_section": [head // 2 - 2 * (head // 6), head // 6, head // 6],
        },
    }  # fmt: skip
    content["vision_config"] |= {
        "hidden_size": vision_hidden, "intermediate_size": 4 * vision_hidden, "depth": vision_layers, "patch_size": 16,
        "num_position_embeddings": 256, "out_hidden_size": hidden,
    }  # fmt: skip
    torch.manual_seed(0)
    model = Qwen3VLModel(Qwen3VLConfig.from_dict(content))
    settings = ImageSettings(min_pixels=4096, max_pixels=1048576)
    backbone = Backbone(model, small.tokenizer, settings, small.chat_template)
    fusion = FUSIONS[kind](backbone, **({"num_probes": min(20, layers)} if kind == "mid" else {}))
    fusion.requires_grad_(False)
    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    targets = [n for n in linear if n.startswith("language_model.") and n.rpartition(".")[2] in LORA_TARGETS[kind]]
    inject_adapter_in_model(LoraConfig(r=16, lora_alpha=32, target_modules=targets), model)
    for name, parameter in model.named_parameters():
        if ".lora_B." in name:
            nn.init.normal_(parameter, std=0.02)
    for name in fusion.own_state():
        fusion.get_parameter(name).requires_grad_(True)
    return fusion


def measure(objective: VoteObjective, batches: list[list[Example]], repeats: int) -> tuple[float, dict[str, Tensor]]:
    """Processor seconds of a step (the best of ``repeats``) and its gradients."""
    times = []
    for _ in range(repeats):
        objective.model.zero_grad()
        begin = time.process_time()
        for batch in batches:
            objective.loss(objective.model, batch, 0.0).backward()
        times.append(time.process_time() - begin)
    gradients = {n: p.grad.clone() for n, p in objective.model.named_parameters() if p.grad is not None}
    return min(times), gradients


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fusion", choices=list(FUSIONS), default="late")
    for option, default in (("aspects", 10), ("size", 256), ("repeats", 3), ("hidden", 256), ("layers", 6),
                            ("vision_hidden", 256), ("vision_layers", 6)):  # fmt: skip
        parser.add_argument(f"--{option}", type=int, default=default)
    options = parser.parse_args()
    names = ASPECTS[: options.aspects]
    fusion = benchmark_fusion(
        options.fusion, options.hidden, options.layers, options.vision_hidden, options.vision_layers
    )
    config = TrainConfig(fusion=options.fusion, dataset_name="procedural", train_samples=1, temperature=0.1)
    objective = VoteObjective(config, fusion)
    objective.model.train()
    images = tuple(torch.rand(3, 3, options.size, options.size, generator=torch.Generator().manual_seed(0)))
    votes = torch.tensor([[0.6, 0.2, 0.2]]).repeat(len(names), 1)
    whole = Example(images, names, names, votes, "odd_one_out")
    separate = [
        replace(whole, aspects=names[k : k + 1], names=names[k : k + 1], votes=votes[k : k + 1]) for k in range(len(names))
    ]
    shared_seconds, shared = measure(objective, [[whole]], options.repeats)
    separate_seconds, alone = measure(objective, [[example] for example in separate], options.repeats)
    gap = max(float((shared[name] - alone[name]).abs().max()) for name in shared)
    if shared.keys() != alone.keys() or gap > 1e-5 * max(1.0, max(float(v.abs().max()) for v in alone.values())):
        raise SystemExit(f"The gradients differ by {gap}; nothing was compared.")
    print(
        json.dumps(
            {
                "fusion": options.fusion,
                "aspects": len(names),
                "size": options.size,
                "largest_gradient_difference": gap,
                "separate_triplet_aspects_per_second": round(len(names) / separate_seconds, 2),
                "shared_triplet_aspects_per_second": round(len(names) / shared_seconds, 2),
                "times_faster": round(separate_seconds / shared_seconds, 2),
            }
        )
    )


if __name__ == "__main__":
    main()
