"""Rewards of a run: how they are written, several as one, functions of a user's own, and failures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import reward_functions
import torch
from jobs import PixelSource, rewards_of
from tiny_editors import images

from rl_recipes import rewards as module
from rl_recipes.building import check_judge
from rl_recipes.config import ConfigError, RewardArguments
from rl_recipes.prompts import Prompt
from rl_recipes.rewards import Entry, build_rewards, parse_entries
from tpips_reward import TPIPSReward, load_metric
from tpips_reward.errors import TPIPSError
from tpips_reward.rewards import RewardOutput

METRIC = str(Path(__file__).parents[1] / "data" / "parity" / "embedding")
OWN = "reward_functions"


def _settings(**changes: Any) -> RewardArguments:
    return RewardArguments(**{"metric": METRIC, "gate_threshold": 0.1, **changes})


def _prompts(count: int = 2) -> list[Prompt]:
    image = images(1)[0]
    return [Prompt(image, f"edit {i}", ("background", "lighting"), ("color",), str(i)) for i in range(count)]


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    waited: list[float] = []
    monkeypatch.setattr(module.time, "sleep", waited.append)
    return waited


def test_entries() -> None:
    found = parse_entries("tpips:preserve=0.7, tpips:edit[metric=a/b,device=cuda:1]=0.3,my.module:function,x:y = 2e-1")
    assert found == [
        Entry("tpips:preserve", (), 0.7),
        Entry("tpips:edit", (("metric", "a/b"), ("device", "cuda:1")), 0.3),
        Entry("my.module:function"),
        Entry("x:y", (), 0.2),
    ]
    assert parse_entries("remote:http://host:8000/score=0.5") == [Entry("remote:http://host:8000/score", (), 0.5)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tpips:preserve,", "'' cannot be read"),
        ("tpips:edit[metric", "cannot be read"),
        ("tpips:edit[metric]", "must hold option=value"),
        ("a:b=x", "weight 'x' in 'a:b=x' is not a number"),
        ("a:b=-1", "must be positive and finite"),
        ("a:b,a:b=2", "'a:b' stands twice"),
        ("tpips:keep", "Unknown mode 'keep'"),
        ("tpips:edit[colour=red]", "no option 'colour'"),
        ("tpips:edit[gate_weight=much]", "'much' in the brackets"),
        ("brightness", "Unknown reward 'brightness'"),
        (f"{OWN}:brightness[device=cpu]", "takes no options"),
        ("no_such_module:f", "cannot be imported .ModuleNotFoundError"),
        ("tpps:preserve", "rewards that come along are tpips:preserve, tpips:target, tpips:edit"),
        (f"{OWN}:no_such_function", "cannot be imported .AttributeError"),
        (f"{OWN}:NUMBER", "is a int; give a function"),
        (f"{OWN}:asks_for_more", "asks for 'masks'; its arguments may be images, sources"),
        (f"{OWN}:asks_for_nothing", "does not ask for 'images'"),
        ("builtins:max", "'builtins:max' does not say what arguments it has"),
    ],
)
def test_what_cannot_be_a_reward_is_named(text: str, message: str) -> None:
    with pytest.raises(TPIPSError, match=message):
        build_rewards(text, _settings(), "cpu")


def test_tpips_alone_is_the_reward_itself() -> None:
    edits, sources, prompts = images(2, seed=1), images(2, seed=2), _prompts()
    rewards = build_rewards("tpips:preserve=0.7,tpips:target=0.3", _settings(), "cpu")
    out = rewards(edits, sources, prompts)
    reward = TPIPSReward("tpips:preserve=0.7,tpips:target=0.3", load_metric(METRIC, device="cpu"), gate_threshold=0.1)
    expected = reward(edits, sources, preserve=[list(p.preserve) for p in prompts], target=[["color"]] * 2)
    assert torch.equal(out.scores, expected.scores) and out.per_aspect == expected.per_aspect
    torch.testing.assert_close(0.7 * out.parts["tpips:preserve"] + 0.3 * out.parts["tpips:target"], out.scores)
    assert rewards.weights == {"tpips:preserve": 0.7, "tpips:target": 0.3}


def test_several_sources_are_added_with_their_weights_and_keep_their_parts() -> None:
    edits = [image.requires_grad_() for image in images(2, seed=1)]
    text = f"tpips:preserve=0.5,{OWN}:brightness=2,tpips:preserve[gate=none,dtype=bfloat16,device=cpu]=0.25"
    rewards = build_rewards(text, _settings(), "cpu")
    out = rewards(edits, images(2, seed=2), _prompts())
    names = {"tpips:preserve", f"{OWN}:brightness", "tpips:preserve[gate=none,dtype=bfloat16,device=cpu]"}
    assert out.parts.keys() == rewards.weights.keys() == names
    total = sum(weight * out.parts[name] for name, weight in rewards.weights.items())
    torch.testing.assert_close(out.scores, total)
    out.scores.sum().backward()
    assert all(image.grad is not None and float(image.grad.abs().max()) > 0 for image in edits)
    assert [reward.gate.kind for reward in rewards.tpips()] == ["change", "none"]
    assert [str(reward.metric.dtype) for reward in rewards.tpips()] == ["torch.float32", "torch.bfloat16"]  # type: ignore[attr-defined]
    other = "[gate=none,dtype=bfloat16,device=cpu]"
    assert out.per_aspect[0].keys() == {"preserve", "target", f"preserve{other}", f"target{other}"}
    assert {"change", f"change{other}"} <= out.terms.keys()


@pytest.mark.parametrize(
    "text",
    [
        "tpips:preserve[device=cpu]",
        f"{OWN}:brightness=0.1,tpips:preserve[device=cpu]",
        "tpips:target[gate=none],tpips:preserve",
        "tpips:preserve[device=cpu],tpips:edit[gate=none]",
    ],
)
def test_one_source_keeps_the_names_that_the_evaluation_knows(text: str) -> None:
    edits, sources = images(2, seed=1), images(2, seed=2)
    alone = build_rewards("tpips:preserve", _settings(), "cpu")(edits, sources, _prompts())
    rewards = build_rewards(text, _settings(), "cpu")
    out = rewards(edits, sources, _prompts())
    assert out.parts.keys() == rewards.weights.keys()
    for name in ("preserve", "change"):
        assert torch.equal(out.terms[name], alone.terms[name])
    assert {"preserve", "target"} <= out.per_aspect[0].keys()
    assert out.per_aspect[0]["preserve"] == alone.per_aspect[0]["preserve"]
    assert all("[" in name for name in out.terms.keys() - alone.terms.keys())


def test_a_function_gets_what_it_names() -> None:
    edits, prompts = images(2), _prompts()
    for name, expected in (("everything", [2.0, 2.0]), ("whole_output", [0.5, 0.5])):
        out = build_rewards(f"{OWN}:{name}", _settings(), "cpu")(edits, edits, prompts)
        assert out.scores.tolist() == expected
    out = build_rewards(f"{OWN}:brightness_without_gradient=3", _settings(), "cpu")(edits, edits, prompts)
    assert out.scores.tolist() == pytest.approx([3 * float(image.mean()) for image in edits])
    assert out.parts[f"{OWN}:brightness_without_gradient"].tolist() == pytest.approx([float(i.mean()) for i in edits])


def test_the_weight_of_a_whole_output_counts_and_its_parts_are_its_own() -> None:
    edits, name = images(2), f"{OWN}:whole_output"
    out = build_rewards(f"{name}=0.1", _settings(), "cpu")(edits, edits, _prompts())
    assert out.scores.tolist() == pytest.approx([0.05, 0.05])
    assert out.parts.keys() == {name} and out.parts[name].tolist() == [0.5, 0.5]
    mixed = build_rewards(f"{name}=0.1,tpips:preserve", _settings(), "cpu")
    alone = build_rewards("tpips:preserve", _settings(), "cpu")(edits, edits, _prompts())
    both = mixed(edits, edits, _prompts())
    assert both.parts.keys() == mixed.weights.keys() == {name, "tpips:preserve"}
    assert torch.equal(both.terms["preserve"], alone.terms["preserve"]), "the function's own stands beside it"
    assert both.terms[f"preserve[{name}]"].tolist() == [0.5, 0.5]
    assert both.per_aspect[0] == {**alone.per_aspect[0], f"preserve[{name}]": {"background": 0.25}}


def test_a_function_that_writes_into_its_images_spoils_no_others() -> None:
    edits, sources = images(2), images(1, seed=1) * 2
    kept = [image.clone() for image in (*edits, *sources)]
    mixed = build_rewards(f"{OWN}:whitens_in_place,{OWN}:brightness", _settings(), "cpu")
    parts = mixed(edits, sources, _prompts()).parts
    assert all(torch.equal(*both) for both in zip(kept, (*edits, *sources), strict=True))
    assert torch.equal(parts[f"{OWN}:brightness"], torch.stack([image.mean() for image in edits]))


def test_a_message_is_one_line_and_stays_short(no_waiting: list[float]) -> None:
    edits, prompts = images(1) * 12, _prompts() * 6
    with pytest.raises(TPIPSError, match=f"^{OWN}:fails_in_two_lines: RuntimeError: out of memory Try again with less$"):
        build_rewards(f"{OWN}:fails_in_two_lines", _settings(reward_retries=0), "cpu")(edits, edits, prompts)
    expected = r"12 numbers of shape \(12,\), of which 12 are not finite \(the first is nan\); give one finite number an edit$"
    with pytest.raises(TPIPSError, match=expected):
        build_rewards(f"{OWN}:not_a_number", _settings(reward_retries=0), "cpu")(edits, edits, prompts)


def test_a_failing_reward_is_asked_again_and_then_given_up(no_waiting: list[float]) -> None:
    edits, prompts = images(2), _prompts()
    reward_functions.CALLS.clear()
    out = build_rewards(f"{OWN}:fails_twice", _settings(reward_retries=2), "cpu")(edits, edits, prompts)
    assert out.scores.tolist() == [1.0, 1.0] and no_waiting == [1.0, 2.0]
    reward_functions.CALLS.clear()
    with pytest.raises(TPIPSError, match=f"^{OWN}:fails_twice: ConnectionError: the server is down$") as caught:
        build_rewards(f"{OWN}:fails_twice", _settings(reward_retries=1), "cpu")(edits, edits, prompts)
    assert isinstance(caught.value.__cause__, ConnectionError)
    for name, message in (
        ("not_a_number", "its scores for 2 edits are"),
        ("too_few", "its scores for 2 edits are"),
        ("output_without_aspects", "per_aspect has 0 entries for 2 edits"),
        ("output_with_a_bad_term", "term 'gate' for 2 edits is .inf, inf"),
        ("output_with_a_bad_aspect", "per_aspect holds nan"),
    ):
        with pytest.raises(TPIPSError, match=f"^{OWN}:{name}: .*{message}"):
            build_rewards(f"{OWN}:{name}", _settings(), "cpu")(edits, edits, prompts)


def _whole(**changes: Any) -> RewardOutput:
    return RewardOutput(**{"scores": torch.ones(2), "per_aspect": [{}, {}], "terms": {}, **changes})


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (None, "its answer is a NoneType"),
        ([None, 1.0], "its answer is a list .*NoneType.*; give a list, an array or a tensor of 2 numbers"),
        ({"a": 1.0, "b": 2.0}, "its answer is a dict"),
        ((score for score in (1.0, 2.0)), "its answer is a generator"),
        ("11", "its answer is a str"),
        ([[1.0], [1.0, 2.0]], "its answer is a list"),
        ([1j, 2.0], "its score is of torch.complex64; give a tensor of real numbers"),
        (_whole(scores=[1.0, 2.0]), "its score is a list"),
        (_whole(terms=None), "terms is a NoneType"),
        (_whole(terms={"gate": [1.0, 2.0]}), "the term 'gate' is a list"),
        (_whole(per_aspect=None), "per_aspect is no list"),
        (_whole(per_aspect=[1.0, 2.0]), "per_aspect is no list"),
        (_whole(per_aspect=[{}, {"preserve": {"x": None}}]), "per_aspect is no list"),
    ],
)
def test_an_answer_of_another_type_names_its_reward_and_is_not_asked_for_again(
    monkeypatch: pytest.MonkeyPatch, no_waiting: list[float], answer: Any, message: str
) -> None:
    monkeypatch.setattr(reward_functions, "brightness", lambda images: answer)
    rewards = build_rewards(f"tpips:preserve,{OWN}:brightness=0.5", _settings(), "cpu")
    with pytest.raises(TPIPSError, match=f"^{OWN}:brightness: {message}"):
        rewards(images(2), images(2), _prompts())
    assert no_waiting == []


@pytest.mark.parametrize(
    "answer",
    [
        torch.ones(2, dtype=torch.float64),
        torch.tensor([True, True]),
        [1, 1],
        _whole(scores=torch.ones(2).double(), terms={"gate": torch.ones(2).half()}),
    ],
)
def test_numbers_of_any_type_become_float32(monkeypatch: pytest.MonkeyPatch, answer: Any) -> None:
    monkeypatch.setattr(reward_functions, "brightness", lambda images: answer)
    out = build_rewards(f"{OWN}:brightness", _settings(), "cpu")(images(2), images(2), _prompts())
    assert out.scores.tolist() == [1.0, 1.0]
    assert {tensor.dtype for tensor in (out.scores, *out.parts.values(), *out.terms.values())} == {torch.float32}


def test_a_judge_must_not_be_optimised() -> None:
    reward, judge = rewards_of({"a": PixelSource(), "b": PixelSource(1)}), rewards_of({"c": PixelSource(2)})
    check_judge(judge, reward, _settings())
    check_judge(None, reward, _settings())
    with pytest.raises(ConfigError, match="--judge 'b' is a part of the reward"):
        check_judge(rewards_of({"b": PixelSource()}), reward, _settings())


def test_a_judge_that_is_the_reward_on_another_device_is_one_that_is_optimised() -> None:
    reward = rewards_of({"tpips:preserve": PixelSource(), "tpips:edit[gate=none,device=cuda:1]": PixelSource()})
    same = f"tpips:preserve[metric={_settings().metric}]"
    for name in ("tpips:preserve[device=cuda:1]", "tpips:preserve[dtype=bfloat16,device=cpu]", "tpips:edit[gate=none]", same):
        with pytest.raises(ConfigError, match="is a part of the reward"):
            check_judge(rewards_of({name: PixelSource()}), reward, _settings())
    for name in ("tpips:edit", "tpips:preserve[metric=a/b]", "tpips:target[device=cuda:1]"):
        check_judge(rewards_of({name: PixelSource()}), reward, _settings())


def test_a_server_is_asked_like_a_metric(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[tuple[Any, ...]] = []

    class Server:
        def __init__(self, *given: Any, **times: Any) -> None:
            built.append((*given, times))

        def check_aspects(self, preserve: Any, target: Any) -> None:
            raise TPIPSError("the server refuses these aspects")

        def __call__(self, edits: Any, sources: Any, preserve: Any, target: Any) -> RewardOutput:
            assert preserve == [["background", "lighting"]] * 2 and target == [["color"]] * 2
            scores = torch.tensor([1.0, 2.0])  # with its parts, as a server sends them
            aspects = [{"preserve": {"background": 0.9}}] * 2
            return RewardOutput(scores, aspects, {"preserve": torch.ones(2)}, {"tpips:edit": scores})

    monkeypatch.setattr(module, "RemoteReward", Server)
    name, edits = "remote:http://host:8000", images(2)
    alone = build_rewards(f"{name}[reward=tpips:edit,timeout=5]=0.5", _settings(), "cpu")
    out = alone(edits, edits, _prompts())
    assert built == [(name, "tpips:edit", {"timeout": 5.0})]
    assert out.scores.tolist() == [0.5, 1.0] and "preserve" in out.terms
    assert out.parts[f"{name}[reward=tpips:edit,timeout=5]"].tolist() == [1.0, 2.0]
    with pytest.raises(TPIPSError, match="the server refuses these aspects"):
        alone.check_aspects(["a"], [])
    rewards = build_rewards(f"{OWN}:everything=2,{name}", _settings(), "cpu")
    both = rewards(edits, edits, _prompts())
    assert both.parts.keys() == rewards.weights.keys() and both.scores.tolist() == [5.0, 6.0] and both.terms.keys() == {"preserve"}
    two = build_rewards(f"{name},remote:http://other:8000", _settings(), "cpu")(edits, edits, _prompts())
    assert two.terms.keys() == {"preserve", "preserve[remote:http://other:8000]"}
    names = [f"{name}[reward=tpips:{mode}]" for mode in ("edit", "preserve", "target")]
    one_host = build_rewards(",".join(names), _settings(), "cpu")(edits, edits, _prompts())
    assert one_host.terms.keys() == {"preserve", *(f"preserve[{other}]" for other in names[1:])}
    with pytest.raises(ConfigError, match="no option 'colour'"):
        build_rewards(f"{name}[colour=red]", _settings(), "cpu")
