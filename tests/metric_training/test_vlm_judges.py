"""Vision-language models as judges: all orders are asked, nothing is guessed; a tiny random Qwen3-VL against its logits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoProcessor, Qwen3VLForConditionalGeneration

from metric_training.data.comparison import Comparison, Data, DataError, ImageSource, Problems
from metric_training.evaluation.baselines import load_judge
from metric_training.evaluation.judges import PairwiseJudge
from metric_training.evaluation.local_vlm import LocalVLM, answer_tree, load_local_vlm
from metric_training.evaluation.report import as_markdown
from metric_training.evaluation.runner import evaluate
from metric_training.evaluation.vlm import (
    SCORES,
    ChoiceJudge,
    Question,
    choice_prompt,
    layouts,
    score_judge,
    score_prompt,
    side_by_side,
)
from tpips_reward import TPIPSError

BACKBONE = Path(__file__).parents[1] / "data" / "parity" / "backbone"
WIDTH = 4


def picture(level: int, name: str = "") -> ImageSource:
    return ImageSource(name or str(level), np.full((WIDTH, WIDTH, 3), level, np.uint8))


def comparison(levels: Sequence[int], task: Any = "odd_one_out", aspects: tuple[str, ...] = ("color",)) -> Comparison:
    votes = np.tile(np.eye(3 if task == "odd_one_out" else 2, dtype=np.float32)[0], (len(aspects), 1))
    first, second, third = (picture(level) for level in levels)
    return Comparison(f"c{levels}", task, (first, second, third), aspects, votes)


class Scripted:
    """Answers by a function of the levels that it sees from left to right; None is no answer."""

    def __init__(self, answer: Callable[[list[float], Question], list[float] | None]) -> None:
        self.rule = answer
        self.seen: list[tuple[list[float], str]] = []

    def answer(self, questions: Sequence[Question]) -> list[Tensor | None]:
        found: list[Tensor | None] = []
        for question in questions:
            levels = [round(float(part.mean()) * 255) for part in question.image.split(WIDTH, dim=-1)]
            self.seen.append(([float(level) for level in levels], question.prompt))
            probabilities = self.rule([float(level) for level in levels], question)
            found.append(None if probabilities is None else torch.tensor(probabilities))
        return found

    def facts(self) -> dict[str, Any]:
        return {"questions": len(self.seen)}


def decoded(*comparisons: Comparison) -> dict[str, Tensor]:
    return {image.key: image.load() for c in comparisons for image in c.images}


def test_prompts_name_the_aspect_or_overall() -> None:
    assert "images are in terms of hair color on a scale" in score_prompt(" hair color ")
    assert "these two images are overall on a scale" in score_prompt("Overall")
    assert "among the three in terms of pose? You need" in choice_prompt("odd_one_out", "pose")
    assert "similar to the reference? Answer with one word" in choice_prompt("two_afc", "overall")


def test_a_pair_is_asked_in_both_orders_and_the_scores_are_averaged() -> None:
    def rule(levels: list[float], question: Question) -> list[float]:
        # likes a dark image on the left; sure of 3, or half 10 and half 5
        row = [0.0] * 11
        if levels[0] < levels[1]:
            row[5] = row[10] = 0.5
        else:
            row[3] = 1.0
        return row

    respondent = Scripted(rule)
    judge = score_judge("vlm", respondent)
    scores = judge.similarities([picture(0).load(), picture(100).load()], [(0, 1, "color")])
    assert [levels for levels, _ in respondent.seen] == [[0, 100], [100, 0]]
    assert scores.tolist() == [pytest.approx((7.5 + 3) / 2)]


@pytest.mark.parametrize(("task", "orders"), [("odd_one_out", 6), ("two_afc", 2)])
def test_a_preferred_position_cancels_out(task: Any, orders: int) -> None:
    respondent = Scripted(lambda levels, question: [1.0] + [0.0] * (len(question.choices) - 1))
    one = comparison((0, 50, 200), task)
    (table,) = ChoiceJudge("left", respondent)([one], decoded(one))
    assert len(respondent.seen) == orders == len(layouts(task))
    assert table[0].tolist() == pytest.approx([1 / table.shape[1]] * table.shape[1])


def test_positions_are_mapped_back_to_the_images() -> None:
    def brightest(levels: list[float], question: Question) -> list[float]:
        shown = levels if len(question.choices) == 3 else [levels[0], levels[2]]
        return [0.75 if level == max(shown) else 0.25 / (len(shown) - 1) for level in shown]

    for levels, task, right in (((0, 50, 200), "odd_one_out", 2), ((90, 50, 20), "odd_one_out", 0),
                                ((255, 50, 20), "two_afc", 0), ((255, 50, 120), "two_afc", 1)):  # fmt: skip
        respondent = Scripted(brightest)
        one = comparison(levels, task, ("color", "overall"))
        (table,) = ChoiceJudge("bright", respondent)([one], decoded(one))
        assert table.argmax(1).tolist() == [right, right]
        assert table[0, right].item() == pytest.approx(0.75)
        if task == "two_afc":
            assert {seen[1] for seen, _ in respondent.seen} == {255}  # the reference stays in the middle


def test_unequal_heights_meet_at_the_lowest() -> None:
    joined = side_by_side([torch.zeros(3, 20, 10), torch.ones(3, 10, 30)])
    assert joined.shape == (3, 10, 35) and joined[:, :, :5].max() == 0 and joined[:, :, 5:].min() == 1


def test_examples_without_an_answer_are_left_out_for_all_and_counted() -> None:
    def rule(levels: list[float], question: Question) -> list[float] | None:
        if "gloss" in question.prompt and levels[0] > levels[-1]:
            return None  # one order of one aspect is enough
        return [0.2, 0.3, 0.5] if len(question.choices) == 3 else [0.0] * 10 + [1.0]

    both, gloss = comparison((0, 9, 90), aspects=("color", "gloss")), comparison((0, 50, 90), aspects=("gloss",))
    data = Data("set", "odd_one_out", [both, gloss, comparison((5, 60, 70))], Problems("set"))
    judges: list[Callable[[], Any]] = [
        lambda: ChoiceJudge("triplet", Scripted(rule)),
        lambda: score_judge("score", Scripted(rule)),
        lambda: load_judge("pixel_l2"),
    ]
    results = evaluate(judges, data, draws=5)
    assert results["data"]["examples"] == 2 and results["data"]["comparisons"] == 2
    assert results["data"]["unanswered"] == {"triplet": 2, "score": 2}
    assert set(results["metrics"]["pixel_l2"]["per_aspect"]) == {"color"}
    assert "2 examples that triplet did not answer" in as_markdown(results)
    assert "triplet: questions 24." in as_markdown(results)
    silent = ChoiceJudge("triplet", Scripted(lambda *_: None))
    with pytest.raises(DataError, match="triplet left 4 examples unanswered"):
        evaluate([lambda: silent], data, draws=5)


def test_nan_from_a_metric_is_an_error_and_no_missing_answer() -> None:
    data = Data("set", "odd_one_out", [comparison((0, 9, 90))], Problems("set"))
    broken = PairwiseJudge("broken", lambda images, pairs: torch.full((len(pairs),), float("nan")))
    with pytest.raises(TPIPSError, match="broken gave a similarity that is not finite"):
        evaluate([lambda: broken], data, draws=5)


def test_the_answer_tree_is_cut_where_one_answer_is_left() -> None:
    def characters(text: str) -> list[int]:
        return [ord(letter) for letter in text]

    tree = answer_tree(characters, SCORES)
    one, zero, space = ord("1"), ord("0"), ord(" ")
    assert tree.following[()][ord("7")] == 7 and tree.following[()][one] is None
    assert tree.following[(one,)] == {zero: 10} and tree.whole[(one,)] == 1
    assert tree.following[(space,)][one] is None and tree.whole[(space, one)] == 1
    words = answer_tree(characters, ("left", "middle", "right"))
    assert words.following[()][ord("l")] == 0 and words.following[()][ord("R")] == 2 and not words.whole
    with pytest.raises(TPIPSError, match="does not tell the answers left, right apart"):
        answer_tree(lambda text: [1], ("left", "right"))


@pytest.fixture(scope="module")
def tiny() -> LocalVLM:
    torch.manual_seed(0)
    model = Qwen3VLForConditionalGeneration(AutoConfig.from_pretrained(BACKBONE))
    with torch.no_grad():
        model.lm_head.weight.normal_(0, 0.3)
    return LocalVLM(model, AutoProcessor.from_pretrained(BACKBONE), batch_size=3)


def next_token(tiny: LocalVLM, question: Question, begun: Sequence[int]) -> Tensor:
    """Probabilities after the prompt and some tokens, by a plain pass of one question."""
    inputs = tiny._inputs([question])
    for token in begun:
        for name, value in {"input_ids": token, "attention_mask": 1, "mm_token_type_ids": 0}.items():
            if name in inputs:
                inputs[name] = torch.cat([inputs[name], torch.tensor([[value]])], 1)
    with torch.no_grad():
        return torch.softmax(tiny.model(**inputs).logits[0, -1].double(), -1)


def test_a_tiny_models_scores_are_its_token_probabilities(tiny: LocalVLM) -> None:
    image = torch.rand(3, 32, 64, generator=torch.Generator().manual_seed(1))
    question = Question(image, score_prompt("pose"), SCORES)
    (answer,) = tiny.answer([question])
    expected = torch.zeros(11, dtype=torch.float64)
    for lead in ("", " "):
        tokens = [tuple(tiny._tokenize(f"{lead}{score}")) for score in SCORES]
        for score in range(11):
            if score == 1:
                continue
            probability = 1.0
            for place, token in enumerate(tokens[score]):
                probability *= float(next_token(tiny, question, tokens[score][:place])[token])
            expected[score] += probability
            if score == 10:
                begun = 1.0
                for place, token in enumerate(tokens[1]):
                    begun *= float(next_token(tiny, question, tokens[1][:place])[token])
                expected[1] += begun if tokens[10][: len(tokens[1])] != tokens[1] else begun - probability
    assert answer is not None and torch.allclose(answer, expected / expected.sum(), atol=2e-4)
    assert 0 < tiny.facts()["probability on allowed answers"] <= 1


def test_batches_of_unequal_questions_give_the_same_answers(tiny: LocalVLM) -> None:
    generator = torch.Generator().manual_seed(2)
    sizes = ((32, 32), (64, 96), (40, 50), (32, 64))
    questions = [
        Question(
            torch.rand(3, *size, generator=generator), choice_prompt("odd_one_out", aspect), ("left", "middle", "right")
        )
        for size, aspect in zip(sizes, ("pose", "the color of the small car", "x", "overall"), strict=True)
    ]
    mixed = [*questions, Question(questions[0].image, score_prompt("pose"), SCORES)]
    together = tiny.answer(mixed)
    for question, answer in zip(mixed, together, strict=True):
        (alone,) = tiny.answer([question])
        assert answer is not None and alone is not None and torch.allclose(answer, alone, atol=1e-5)
        assert float(answer.sum()) == pytest.approx(1)


def test_a_saved_model_is_loaded_by_its_folder_and_judges(tiny: LocalVLM, tmp_path: Path) -> None:
    tiny.model.save_pretrained(tmp_path / "vlm")
    tiny.processor.save_pretrained(tmp_path / "vlm")
    data = Data("set", "two_afc", [comparison((0, 90, 200), "two_afc", ("pose", "overall"))], Problems("set"))
    names = [f"{kind}:{tmp_path / 'vlm'}" for kind in ("vlm-score", "vlm-triplet")]
    results = evaluate([lambda name=name: load_judge(name, device="cpu") for name in names], data, draws=5)
    assert [results["metrics"][name]["facts"]["questions"] for name in names] == [8, 4]
    assert all(np.isfinite(results["metrics"][name]["agreement"]) for name in names)


def test_what_is_no_vision_language_model_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(TPIPSError, match="cannot be loaded .*give a Hub id or a folder"):
        load_local_vlm(str(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(TPIPSError, match="cannot be loaded"):
        load_local_vlm(str(tmp_path))


def test_logits_that_are_not_finite_are_an_error(tiny: LocalVLM, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = tiny.model.lm_head.weight
    kept = weight.detach().clone()
    with torch.no_grad():
        weight.fill_(float("nan"))
    try:
        with pytest.raises(TPIPSError, match="logits that are not finite"):
            tiny.answer([Question(torch.zeros(3, 32, 32), "x", SCORES)])
    finally:
        with torch.no_grad():
            weight.copy_(kept)
