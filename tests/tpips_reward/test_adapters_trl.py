"""The reward inside TRL, with TRL's own trainer."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from adapter_samples import EDITS, PROMPTS, ROWS, SOURCES
from PIL import Image
from serving_workers import picture

from tpips_reward.adapters import EditScorer
from tpips_reward.adapters.trl import TRLReward
from tpips_reward.errors import TPIPSError


def test_trl_takes_images_messages_and_columns(reward, expected):
    columns = {name: [row[name] for row in ROWS] for name in ("preserve", "target")}
    logged: dict[str, float] = {}
    function = TRLReward(reward)
    answer = function(
        prompts=PROMPTS, completions=EDITS, image=SOURCES, **columns, log_metric=logged.__setitem__, trainer_state=None
    )
    assert answer == expected and isinstance(answer, list) and "tpips/preserve" in logged
    chats = [
        [{"role": "assistant", "content": [{"type": "text", "text": "done"}, {"type": "image", "image": e}]}]
        for e in EDITS
    ]
    asked = [[{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": p}]}] for p in PROMPTS]
    assert TRLReward(reward, "images")(asked, chats, images=[[s] for s in SOURCES], **columns) == expected
    proposed = TRLReward(reward)(asked, EDITS, image=SOURCES)
    assert proposed == TRLReward(reward)(PROMPTS, EDITS, image=SOURCES) != answer


def test_trl_without_what_it_needs(reward):
    with pytest.raises(TPIPSError, match="no column 'image'.*it has solution"):
        TRLReward(reward)(PROMPTS, EDITS, solution=PROMPTS)
    with pytest.raises(TPIPSError, match="holds no image"):
        TRLReward(reward)(PROMPTS, ["text"] * 3, image=SOURCES)


def test_trls_own_trainer_trains_with_it(reward, parity, tmp_path, monkeypatch):
    """One step of `GRPOTrainer` whose completions are drawn: TRL calls the function, and its reward is ours."""
    from datasets import Dataset
    from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM
    from trl import GRPOConfig, GRPOTrainer

    tokenizer = AutoTokenizer.from_pretrained(parity / "backbone")
    config = Qwen3Config(vocab_size=len(tokenizer), hidden_size=16, intermediate_size=16, num_hidden_layers=1,
                         num_attention_heads=2, num_key_value_heads=1, head_dim=8, max_position_embeddings=128)  # fmt: skip
    calls: list[list[float]] = []

    def draw(completion: str, source: Any) -> Image.Image:
        return picture(sum(completion.encode()) % 100)

    function = TRLReward(
        reward, "photo", to_image=lambda completion, number: draw(completion, number), preserve=["background"]
    )
    inner = function.scorer.reward

    def watched(images: Any, references: Any, **aspects: Any) -> Any:
        out = inner(images, [picture(number) for number in references], **aspects)
        calls.append(out.scores.tolist())
        return out

    function.scorer = EditScorer(watched, ["background"])
    data = Dataset.from_dict({"prompt": ["make it red", "make it blue"], "photo": [7, 8]})
    arguments = GRPOConfig(
        output_dir=str(tmp_path), per_device_train_batch_size=4, num_generations=2, max_completion_length=4, max_steps=1,
        logging_steps=1, report_to=[], use_cpu=True, save_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    trainer = GRPOTrainer(
        model=Qwen3ForCausalLM(config),
        reward_funcs=function,
        args=arguments,
        train_dataset=data,
        processing_class=tokenizer,
    )
    trainer.train()
    log = next(entry for entry in trainer.state.log_history if "reward" in entry)
    assert len(calls) == 1 and len(calls[0]) == 4
    assert log["rewards/tpips_reward/mean"] == pytest.approx(float(np.mean(calls[0])), abs=1e-5)
    assert log["tpips/preserve"] == pytest.approx(float(np.mean(calls[0])), abs=1e-5)
