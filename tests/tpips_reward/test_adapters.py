"""The reward inside other trainers: TRL's own trainer, and faithful stubs of the signatures that the others publish."""

from __future__ import annotations

import asyncio
import inspect
import io
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from serving_workers import LocalWorker, TroubleMetric, encoded, picture, running

from tpips_reward import RemoteReward, TPIPSReward
from tpips_reward.adapters import EditScorer, aspects_of
from tpips_reward.adapters.flow_factory import reward_model
from tpips_reward.adapters.flow_grpo import score_factory, score_function
from tpips_reward.adapters.loss import LossAdapter
from tpips_reward.adapters.trl import TRLReward
from tpips_reward.adapters.verl import compute_score_function
from tpips_reward.aspects import propose
from tpips_reward.errors import TPIPSError
from tpips_reward.evaluation.image_files import decode

EDITS, SOURCES = [picture(n) for n in (1, 2, 3)], [picture(n) for n in (7, 8, 9)]
PROMPTS = ["make the car red", "remove the dog", "make it night"]
ROWS = [{"preserve": ["background"], "target": ["color"]}, {"preserve": ["lighting"], "target": ["size"]},
        {"preserve": ["background", "lighting"], "target": ["color"]}]  # fmt: skip


@pytest.fixture
def reward():
    return TPIPSReward("tpips:preserve", TroubleMetric())


@pytest.fixture
def expected(reward):
    out = reward(EDITS, SOURCES, [row["preserve"] for row in ROWS], [row["target"] for row in ROWS])
    return pytest.approx(out.scores.tolist())


# --- the core


def test_aspects_are_the_samples_own_then_the_given_then_proposed():
    own = {"preserve": "background", "target": np.array(["color"])}
    assert aspects_of("make it red", own, ["x"], ["y"]).preserve == ("background",)
    assert aspects_of("make it red", json.dumps({"preserve": ["a"], "target": ["b"]})).target == ("b",)
    assert aspects_of("make it red", {"other": 1}, ["x"], ["y"]).target == ("y",)
    proposal, found = propose(PROMPTS[0]), aspects_of(PROMPTS[0], None)
    assert (found.preserve, found.target) == (proposal.preserve, proposal.target)


@pytest.mark.parametrize(
    ("metadata", "words"),
    [("no json", "no JSON"), ("[1]", "list"), ({"preserve": [1]}, "preserve=[1]"), ({"target": 5}, "target=5")],
)
def test_metadata_that_are_none(metadata, words):
    with pytest.raises(TPIPSError) as caught:
        aspects_of("make it red", metadata)
    assert words in str(caught.value)


def test_one_string_is_one_aspect():
    assert aspects_of("", None, "background", "color") == aspects_of("", None, ["background"], ["color"])
    scorer = EditScorer(TPIPSReward(metric=TroubleMetric()), "background", None)
    assert (scorer.preserve, scorer.target) == (("background",), ())
    with pytest.raises(TPIPSError, match="target=5"):
        EditScorer(TPIPSReward(metric=TroubleMetric()), (), 5)


def test_neither_aspects_nor_an_instruction():
    with pytest.raises(TPIPSError, match="names no aspects"):
        aspects_of("  ", {})


def test_the_core_refuses_what_would_be_misaligned(reward):
    scorer = EditScorer(reward)
    for arguments in (
        (EDITS, SOURCES[:2], PROMPTS),
        (EDITS, SOURCES, PROMPTS[:2]),
        (EDITS, SOURCES, PROMPTS, ROWS[:1]),
    ):
        with pytest.raises(TPIPSError, match="for 3 images"):
            scorer(*arguments)
    with pytest.raises(TPIPSError, match="Sample 1 has no source"):
        scorer(EDITS, [SOURCES[0], None, SOURCES[2]], PROMPTS, ROWS)


def test_a_score_that_is_no_number_stops():
    class Broken:
        def __call__(self, images: Any, *_: Any, **__: Any) -> Any:
            from tpips_reward import RewardOutput

            return RewardOutput(torch.tensor([0.5, float("nan")]), [{}, {}], {})

    with pytest.raises(TPIPSError, match="nan for sample 1"):
        EditScorer(Broken())(EDITS[:2], SOURCES[:2], PROMPTS[:2], ROWS[:2])


# --- TRL


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


# --- the flow_grpo family, with PaCo-RL


def multi_score(device: str, score_dict: dict[str, float], factories: dict[str, Any], with_sources: tuple[str, ...]) -> Any:
    """As flow_grpo's own (yifan123/flow_grpo at 94e23ee, flow_grpo/rewards.py; Edit-R1's at 244883c is alike).

    It looks into the factory's code for `device`, multiplies scores one by one, and passes `ref_images` only to the
    scores of its own branches, as the branch is that docs/integrations.md adds.
    """
    functions = {
        name: factories[name](device) if "device" in factories[name].__code__.co_varnames else factories[name]()
        for name in score_dict
    }

    def score(images: Any, prompts: Any, metadata: Any, ref_images: Any = None, only_strict: bool = True) -> Any:
        total: list[Any] = []
        all_scores = {}
        for name, weight in score_dict.items():
            sources = (ref_images,) if name in with_sources else ()
            scores, _ = functions[name](images, prompts, metadata, *sources)
            all_scores[name] = scores
            weighted = [weight * one for one in scores]
            total = weighted if not total else [a + b for a, b in zip(total, weighted, strict=True)]
        return {**all_scores, "avg": total}, {}

    return score


def test_flow_grpo_takes_all_its_kinds_of_images(reward, expected):
    score = multi_score("cpu", {"tpips": 1.0}, {"tpips": score_factory(reward)}, ("tpips",))
    arrays = np.stack([np.array(edit) for edit in EDITS])
    tensors = torch.from_numpy(arrays).permute(0, 3, 1, 2) / 255
    refs = torch.stack([torch.from_numpy(np.array(s)).permute(2, 0, 1) / 255 for s in SOURCES])
    for images in (EDITS, arrays, tensors):
        assert score(images, PROMPTS, ROWS, refs)[0]["avg"] == expected
    assert score(EDITS, tuple(PROMPTS), tuple(ROWS), SOURCES)[0]["avg"] == expected
    both = {"tpips": score_factory(reward), "more": score_factory(reward)}
    half = multi_score("cpu", {"tpips": 0.5, "more": 0.5}, both, ("tpips", "more"))
    assert half(EDITS, PROMPTS, ROWS, SOURCES)[0]["avg"] == expected


def test_flow_grpo_without_its_branch_stops(reward):
    """The metadata of its edit sets name the source's file, which is no image."""
    score = multi_score("cpu", {"tpips": 1.0}, {"tpips": score_factory(reward)}, ())
    rows = [{**row, "image": "images/1.png"} for row in ROWS]
    with pytest.raises(TPIPSError, match="Sample 0 has no source image"):
        score(EDITS, PROMPTS, rows, SOURCES)


def test_paco_rls_own_way_to_call(reward, expected):
    """As X-GenGroup/PaCo-RL at 08caac6 does it: named options that the factory takes, PIL images, sources in the metadata."""
    factory = score_factory(reward)
    given = {"device": "cpu", "port": 8000}
    function = factory(**{name: value for name, value in given.items() if name in inspect.signature(factory).parameters})
    metadata = [dict(row) for row in ROWS]
    for row, source in zip(metadata, SOURCES, strict=True):
        row["ref_image"] = source
    scores, details = function(EDITS, PROMPTS, metadata)
    assert isinstance(scores, np.ndarray) and scores.tolist() == expected and details == {}


@pytest.mark.parametrize("key", ["ref_image", "image", "source"])
def test_paco_rl_keeps_the_source_in_the_metadata(reward, expected, key):
    rows = [{**row, key: source} for row, source in zip(ROWS, SOURCES, strict=True)]
    scores, details = score_function(reward)(EDITS, PROMPTS, rows)
    assert scores.tolist() == expected and scores.dtype == np.float32 and details == {}


def test_flow_grpo_loads_the_reward_on_the_trainers_device(parity):
    factory = score_factory("tpips:preserve", metric=str(parity / "embedding"), gate="none")
    images = [picture(n, 64) for n in (1, 2)]
    scores, _ = factory("cpu")(images, PROMPTS[:2], ROWS[:2], [picture(3, 64)] * 2)
    assert scores.shape == (2,) and np.isfinite(scores).all()
    with pytest.raises(TPIPSError, match="Sample 0 has no source"):
        score_function(TPIPSReward(metric=TroubleMetric()))(EDITS, PROMPTS, ROWS)
    with pytest.raises(TPIPSError, match="metadata has 1 entries"):
        score_function(TPIPSReward(metric=TroubleMetric()))(EDITS, PROMPTS, ROWS[:1])


# --- Flow-Factory: X-GenGroup/Flow-Factory at a0b2bc5 (0.1.0); test_adapters_installed.py asks its own classes


@dataclass
class RewardModelOutput:
    rewards: Any
    extra_info: dict[str, Any] | None = None


@dataclass
class RewardArguments:
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    dtype: str = "float32"
    extra_kwargs: dict[str, Any] = field(default_factory=dict)


class PointwiseRewardModel:
    """The part of the trainer's class that subclasses meet."""

    required_fields: tuple[str, ...] = ("image", "prompt")
    use_tensor_inputs = False

    def __init__(self, config: RewardArguments, accelerator: Any) -> None:
        self.accelerator, self.config, self.device = accelerator, config, config.device


def filtered(model: Any, fields: dict[str, Any]) -> dict[str, Any]:
    """Arguments are chosen by the names of parameters, as the trainer does it; **kwargs would take every field."""
    parameters = inspect.signature(model.__call__).parameters
    assert all(parameter.kind is not parameter.VAR_KEYWORD for parameter in parameters.values())
    return {name: fields[name] for name in parameters if name in fields}


def test_flow_factory_makes_and_calls_the_model(parity):
    options = {"reward": "tpips:edit", "metric": str(parity / "embedding"), "gate_threshold": 0.3}
    model = reward_model(PointwiseRewardModel, RewardModelOutput)(RewardArguments(extra_kwargs=options), None)
    assert set(model.required_fields) == {"prompt", "image", "condition_images"}
    edits, sources = [picture(n, 64) for n in (1, 2, 3)], [picture(n, 64) for n in (7, 8, 9)]
    fields = {"prompt": PROMPTS, "image": edits, "condition_images": [[source] for source in sources], "audio": None,
              "metadata": [json.dumps(row) for row in ROWS]}  # fmt: skip
    answer = model(**filtered(model, fields))
    wanted = TPIPSReward("tpips:edit", str(parity / "embedding"), gate_threshold=0.3, device="cpu")(
        edits, sources, [row["preserve"] for row in ROWS], [row["target"] for row in ROWS]
    )
    torch.testing.assert_close(answer.rewards, wanted.scores)
    with pytest.raises(TPIPSError, match="condition_images"):
        model(prompt=PROMPTS, image=edits)
    with pytest.raises(TPIPSError, match="Sample 2 has no source"):
        model(prompt=PROMPTS, image=edits, condition_images=[[sources[0]], [sources[1]], []])


def test_flow_factory_with_a_server():
    with running([LocalWorker()]) as address:
        options = {"reward": f"remote:{address}", "preserve": "background", "target": ["color"]}
        model = reward_model(PointwiseRewardModel, RewardModelOutput)(RewardArguments(extra_kwargs=options), None)
        answer = model(prompt=PROMPTS, image=EDITS, condition_images=[[source] for source in SOURCES])
    wanted = TPIPSReward(metric=TroubleMetric())(EDITS, SOURCES, [["background"]] * 3, [["color"]] * 3)
    torch.testing.assert_close(answer.rewards, wanted.scores)


# --- verl, verl-omni: verl-project/verl-omni at a1139ba, which needs vLLM-Omni and so a GPU; verl 0.9.1, whose own manager
# --- test_adapters_installed.py asks


def verl_calls(function: Any, info: list[dict[str, Any]]) -> list[Any]:
    """As verl-omni's VisualRewardManager does: single samples, a plain function in threads of an event loop."""

    async def run_all() -> list[Any]:
        loop = asyncio.get_running_loop()
        assert not inspect.iscoroutinefunction(function)

        def one(index: int) -> Any:
            image = torch.from_numpy(np.array(EDITS[index])).permute(2, 0, 1)
            return function(
                data_source="edits", solution_image=image, ground_truth=PROMPTS[index], extra_info=info[index]
            )

        return list(await asyncio.gather(*(loop.run_in_executor(None, one, index) for index in range(len(EDITS)))))

    answers = asyncio.run(run_all())
    for name in answers[0]:  # the reward loop makes a column of each name that the first sample has
        np.array([answer[name] for answer in answers])
    return answers


def test_verl_scores_single_samples_from_threads(reward, expected):
    info = [{**row, "source_img": source, "num_turns": None} for row, source in zip(ROWS, SOURCES, strict=True)]
    answers = verl_calls(compute_score_function(reward), info)
    assert [answer["score"] for answer in answers] == expected
    assert all(isinstance(value, float) for answer in answers for value in answer.values())
    ungated = [{**row, "target": [] if n else row["target"]} for n, row in enumerate(info)]
    ungated[1]["preserve"] = ungated[2]["preserve"] = ["background"]
    assert [np.isnan(answer["gate"]) for answer in verl_calls(compute_score_function(reward), ungated)] == [False, True, True]
    stored = [{**row, "source_img": {"bytes": encoded(row["source_img"]), "path": None}} for row in info]
    assert [answer["score"] for answer in verl_calls(compute_score_function(reward), stored)] == expected


def test_verl_with_a_server_makes_batches():
    worker = LocalWorker()
    with running([worker]) as address:
        function = compute_score_function(RemoteReward(f"remote:{address}"))
        info = [{**row, "source_img": source} for row, source in zip(ROWS, SOURCES, strict=True)]
        wanted = verl_calls(compute_score_function(TPIPSReward(metric=TroubleMetric())), info)
        assert [a["score"] for a in verl_calls(function, info)] == pytest.approx([a["score"] for a in wanted])


def test_verl_names_the_image_that_is_bad(reward):
    info = {"source_img": SOURCES[0], "target_img": {"bytes": b"no image"}, "preserve": ["lighting"], "target": ["color"]}
    with pytest.raises(TPIPSError, match="^target_img is no image"):
        compute_score_function(reward)(EDITS[0], "make it red", info)


def test_decoding_leaves_the_warning_filters_of_the_process_alone(monkeypatch):
    """They belong to all threads, and verl calls a reward from many."""

    def touched(*_: Any, **__: Any) -> None:
        raise AssertionError("the filters were changed")

    content = encoded(SOURCES[0])
    for name in ("catch_warnings", "simplefilter", "filterwarnings"):
        monkeypatch.setattr(f"warnings.{name}", touched)
    assert decode(content, "source_img").shape[0] == 3


def test_verl_without_a_source_stops(reward):
    function = compute_score_function(reward)
    with pytest.raises(TPIPSError, match="source_img"):
        function(EDITS[0], "make it red", {})
    with pytest.raises(TPIPSError, match="no bytes"):
        function(EDITS[0], "make it red", {"source_img": {"path": "/x.png"}})
    with pytest.raises(TPIPSError, match="to_image"):
        function(data_source="edits", solution_str="a text", ground_truth="", extra_info={"source_img": SOURCES[0]})
    with pytest.raises(TPIPSError, match="no answer: neither solution_image"):
        function(ground_truth="", extra_info={"source_img": SOURCES[0]})
    answer = function(
        torch.zeros(1, 3, 8, 8, dtype=torch.uint8), "make it red", {"source_img": SOURCES[0], "target_img": SOURCES[1]}
    )
    assert set(answer) >= {"score", "preserve"}


# --- UniRL: the client's half of the wire format, as its remote backend speaks it (Tencent-Hunyuan/UniRL; at 1a7b501 without
# --- identities); test_adapters_installed.py asks the backend itself


def test_unirls_remote_backend_gets_its_rewards():
    import base64

    import httpx2 as httpx

    def wire(image: Image.Image) -> str:
        buffer = io.BytesIO()
        image.save(buffer, format="PNG")
        return base64.b64encode(buffer.getvalue()).decode("ascii")

    required = ["tpips:preserve"]
    with running([LocalWorker()]) as address:
        health = httpx.get(f"{address}/health").json()
        assert set(required) <= set(health["rewards"])
        requests = [
            {"history": [{"text": p, "image_b64": wire(s)}, {"text": p, "image_b64": wire(e)}], "required_rewards": required,
             "metadata": row, "request_id": str(n), "sample_id": str(n), "group_id": None, "source_rank": 0,
             "policy_version": 1, "scorer_version": None, "idempotency_key": f"k{n}"}
            for n, (p, s, e, row) in enumerate(zip(PROMPTS, SOURCES, EDITS, ROWS, strict=True))
        ]  # fmt: skip
        answer = httpx.post(f"{address}/score", json={"protocol_version": "1", "requests": requests}).json()
    assert answer["protocol_version"] == "1" and len(answer["results"]) == len(answer["errors"]) == 3
    for sent, echoed in zip(requests, answer["identities"], strict=True):
        for key in ("request_id", "sample_id", "group_id", "source_rank", "policy_version", "idempotency_key"):
            assert echoed[key] == sent[key]
    first = [next(iter(row["tpips:preserve"].values())) for row in answer["results"]]  # "first" is its way to reduce
    wanted = TPIPSReward(metric=TroubleMetric())(
        EDITS, SOURCES, [r["preserve"] for r in ROWS], [r["target"] for r in ROWS]
    )
    assert first == pytest.approx(wanted.scores.tolist())


# --- a training loss


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


# --- all of them with a server that is down: an error, never zeros


def test_every_adapter_stops_when_the_server_is_gone():
    gone = RemoteReward("remote:http://127.0.0.1:9", patience=0.2)
    calls = [
        lambda: TRLReward(gone)(PROMPTS, EDITS, image=SOURCES),
        lambda: score_function(gone)(EDITS, PROMPTS, ROWS, SOURCES),
        lambda: compute_score_function(gone)(EDITS[0], PROMPTS[0], {"source_img": SOURCES[0]}),
    ]
    with ThreadPoolExecutor(3) as pool:
        for call in [pool.submit(call) for call in calls]:
            with pytest.raises(TPIPSError, match="No score is made of it"):
                call.result()
