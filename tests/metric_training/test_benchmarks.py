"""Published benchmarks on small files in their own layouts: what is read, and figures that can be computed by hand."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from benchmark_files import constant, gray, save
from PIL import Image
from torch import Tensor

from metric_training import benchmark as command
from metric_training.benchmark import run
from metric_training.benchmarks import genecis, qare, subtle
from metric_training.benchmarks.protocol import Settings
from metric_training.benchmarks.ranking import area_under_curve, average_precision, expected_recall
from metric_training.benchmarks.registry import BENCHMARKS
from metric_training.benchmarks.report import as_markdown
from metric_training.data.comparison import DataError
from metric_training.evaluation.baselines import load_judge
from metric_training.evaluation.judges import PairwiseJudge
from metric_training.evaluation.vlm import score_judge
from tpips_reward import TPIPSError


def channels(names: Sequence[str], embedding: bool = True) -> PairwiseJudge:
    """Looks at red, green or blue for the first, second or third aspect; embeds a level as an angle in a plane of its own."""

    def embed(images: list[Tensor], aspects: list[str]) -> Tensor:
        rows = torch.zeros(len(images), len(aspects), 6)
        for i, image in enumerate(images):
            for k, aspect in enumerate(aspects):
                channel = names.index(aspect)
                angle = image[channel].mean() * np.pi / 2
                rows[i, k, 2 * channel : 2 * channel + 2] = torch.stack([angle.cos(), angle.sin()])
        return rows

    def score(images: list[Tensor], pairs: Sequence[tuple[int, int, str]]) -> Tensor:
        return torch.stack([(embed([images[i]], [a]) * embed([images[j]], [a])).sum() for i, j, a in pairs])

    return PairwiseJudge("channels", score, embed=embed if embedding else None)


# ---------------------------------------------------------------------------------------------------------- measures


def test_recall_by_hand_and_as_if_ties_were_broken_at_random() -> None:
    scores = np.array([3.0, 5.0, 1.0, 4.0])
    first = np.arange(4) == 0
    assert [expected_recall(scores, first, k) for k in (1, 2, 3)] == [0, 0, 1]
    assert [expected_recall(np.zeros(4), first, k) for k in (1, 2, 4)] == pytest.approx([0.25, 0.5, 1])
    two = np.array([True, True, False, False])
    # one of two right ones in two places out of four: 1 - (2/4)(1/3)
    assert expected_recall(np.zeros(4), two, 2) == pytest.approx(5 / 6)


def test_average_precision_by_hand_and_over_all_orders_of_ties() -> None:
    assert average_precision(np.array([4.0, 3.0, 2.0, 1.0]), np.array([True, False, True, False])) == pytest.approx(
        (1 + 2 / 3) / 2
    )
    rng = np.random.default_rng(0)
    scores, relevant = np.array([2.0, 1.0, 1.0, 1.0, 1.0, 0.0]), np.array([0, 1, 0, 1, 0, 1], bool)
    drawn = [average_precision(scores + rng.uniform(0, 0.1, 6), relevant) for _ in range(4000)]
    assert average_precision(scores, relevant) == pytest.approx(np.mean(drawn), abs=0.01)


def test_area_under_the_curve_counts_ties_half() -> None:
    assert area_under_curve(np.array([1.0, 2.0]), np.array([0.0, 1.0])) == pytest.approx((1 + 0.5 + 1 + 1) / 4)


# ------------------------------------------------------------------------------------------------------------ NIGHTS


@pytest.fixture
def nights(tmp_path: Path) -> Path:
    folder = tmp_path / "nights"
    lines = ["id,left_vote,right_vote,votes,ref_path,left_path,right_path,prompt,split,is_imagenet"]
    for number, (left, right, vote, votes, split, imagenet) in enumerate(
        [
            (110, 200, 1, 8, "test", True),
            (200, 110, 1, 7, "test", False),
            (110, 200, 0, 5, "test", True),
            (1, 2, 1, 9, "train", True),
        ]
    ):
        save(folder / "ref" / "000" / f"{number:03d}.png", 100)
        for side, level in enumerate((left, right)):
            save(folder / "distort" / "000" / f"{number:03d}_{side}.png", level)
        paths = f"ref/000/{number:03d}.png,distort/000/{number:03d}_0.png,distort/000/{number:03d}_1.png"
        lines.append(f"{number},{vote},{1 - vote},{votes},{paths},a cat,{split},{imagenet}")
    (folder / "data.csv").write_text("\n".join(lines) + "\n")
    return folder


def test_nights_keeps_unanimous_triplets_of_the_test_split(nights: Path) -> None:
    results = run(BENCHMARKS["nights"], nights, [gray, constant])
    assert results["size"] == {"triplets": 2}
    row = results["metrics"]["gray"]
    # of the first the left one is nearer and was chosen; of the second the right one is nearer, the left was chosen
    assert row["figures"]["2AFC"] == 0.5 and row["groups"]["subset"]["imagenet"] == {"2AFC": 1, "examples": 1}
    assert results["metrics"]["constant"]["figures"]["2AFC"] == 0.5 and row["figures"]["consensus"] == 1
    assert run(BENCHMARKS["nights"], nights, [gray], Settings(split="train"))["size"] == {"triplets": 1}


def test_nights_with_a_missing_image_or_column(nights: Path) -> None:
    (nights / "ref" / "000" / "000.png").unlink()
    assert [line for line, _ in run(BENCHMARKS["nights"], nights, [gray])["problems"]] == [2]
    with pytest.raises(DataError, match="line 2: the image .* does not exist"):
        run(BENCHMARKS["nights"], nights, [gray], Settings(strict=True))
    (nights / "data.csv").write_text("id,vote\n1,2\n")
    with pytest.raises(DataError, match="left_vote, right_vote, votes.* missing among id, vote"):
        run(BENCHMARKS["nights"], nights, [gray])


# ------------------------------------------------------------------------------------------------------------- BAPPS


def bapps(folder: Path, subset: str, rows: Sequence[tuple[int, int, float]]) -> None:
    for number, (p0, p1, share) in enumerate(rows):
        for part, level in (("ref", 100), ("p0", p0), ("p1", p1)):
            save(folder / subset / part / f"{number:06d}.png", level)
        (folder / subset / "judge").mkdir(exist_ok=True)
        np.save(folder / subset / "judge" / f"{number:06d}.npy", np.array([share], np.float32))


def test_bapps_weighs_by_peoples_shares(tmp_path: Path) -> None:
    bapps(tmp_path, "val/cnn", [(110, 200, 0.2), (110, 200, 1.0)])
    bapps(tmp_path, "val/color", [(200, 90, 0.6)])
    bapps(tmp_path, "train/mix", [(200, 90, 0.0)])
    results = run(BENCHMARKS["bapps"], tmp_path, [gray])
    row = results["metrics"]["gray"]
    assert results["size"] == {"triplets": 3, "subsets": 2}
    assert row["figures"]["2AFC"] == pytest.approx((0.8 + 0 + 0.6) / 3)
    assert row["figures"]["mean of subsets"] == pytest.approx((0.4 + 0.6) / 2)
    assert row["groups"]["subset"]["color"]["2AFC"] == pytest.approx(0.6)
    alone = run(BENCHMARKS["bapps"], tmp_path / "val" / "cnn", [gray])
    assert alone["size"]["triplets"] == 2


def test_bapps_that_does_not_pair(tmp_path: Path) -> None:
    bapps(tmp_path, "val/cnn", [(110, 200, 0.2), (110, 200, 0.4)])
    np.save(tmp_path / "val" / "cnn" / "judge" / "000001.npy", np.array([3.0]))
    assert "share in .0, 1., not 3" in run(BENCHMARKS["bapps"], tmp_path, [gray])["problems"][0][1].replace(
        "[", "."
    ).replace("]", ".")
    (tmp_path / "val" / "cnn" / "judge" / "000001.npy").write_bytes(b"\x80\x04pickle")
    assert "NumPy file" in run(BENCHMARKS["bapps"], tmp_path, [gray])["problems"][0][1]
    (tmp_path / "val" / "cnn" / "p1" / "000000.png").unlink()
    with pytest.raises(DataError, match="2 in ref, 2 in p0, 1 in p1, 2 in judge"):
        run(BENCHMARKS["bapps"], tmp_path, [gray])


# ----------------------------------------------------------------------------------------------------------- GeneCIS


@pytest.fixture
def gallery(tmp_path: Path) -> Path:
    """Focus Object by brightness of whole images, Focus Attribute by that of a box."""
    folder = tmp_path / "genecis"
    for number, level in ((1, 100), (2, 110), (3, 150), (4, 85), (5, 250)):
        save(folder / "val2017" / f"{number:012d}.jpg", level)
    objects = [
        {"condition": "brick wall", "reference": {"val_image_id": 1}, "target": {"val_image_id": target},
         "gallery": [{"val_image_id": k} for k in (3, 4, 5) if k != target]}
        for target in (2, 3)
    ]  # fmt: skip
    (folder / "focus_object.json").write_text(json.dumps(objects))
    for number, (inside, outside) in enumerate([(0, 255), (10, 0), (250, 0)], 11):
        canvas = np.full((60, 80, 3), outside, np.uint8)
        canvas[20:40, 30:50] = inside
        (folder / "VG_100K_2").mkdir(exist_ok=True)
        Image.fromarray(canvas).save(folder / "VG_100K_2" / f"{number}.jpg", quality=95, subsampling=0)
    attribute = {"condition": "color", "reference": box(11), "target": box(12), "gallery": [box(13)]}
    (folder / "focus_attribute.json").write_text(json.dumps([attribute]))
    return folder


def box(number: int, sides: Sequence[float] = (36, 26, 12, 12)) -> dict[str, Any]:
    return {"image_id": number, "instance_bbox": list(sides)}


def test_genecis_recall_by_subset(gallery: Path) -> None:
    asked: list[str] = []

    def score(images: list[Tensor], pairs: Sequence[tuple[int, int, str]]) -> Tensor:
        asked.extend(pair[2] for pair in pairs)
        return gray().similarities(images, list(pairs))

    results = run(
        BENCHMARKS["genecis"], gallery, [lambda: PairwiseJudge("gray", score), constant], Settings(images_per_call=5)
    )
    row = results["metrics"]["gray"]["groups"]["subset"]
    # the first target (by 10) is the nearest; of the second (by 50) image 4 is nearer (by 15)
    assert row["focus_object"] == {"recall@1": 0.5, "recall@2": 1.0, "recall@3": 1.0, "examples": 2}
    assert row["focus_attribute"]["recall@1"] == 1
    assert set(asked) == {"color", "scene context and presence of brick wall"}
    blind = results["metrics"]["constant"]["groups"]["subset"]
    assert (
        blind["focus_object"]["recall@1"] == pytest.approx((1 / 4 + 1 / 3) / 2)
        and blind["focus_attribute"]["recall@1"] == 0.5
    )


def test_genecis_crops_are_dilated_and_enlarged() -> None:
    image = torch.zeros(3, 60, 80)
    image[:, 26:38, 36:48] = 1
    part = genecis.crop(image, (36, 26, 12, 12), "x")
    # 3.6 pixels to the left and above, 1.3 times as large: to the box's right and lower edge
    assert part.shape[-2] * part.shape[-1] >= genecis.LEAST_PIXELS
    assert part.mean().item() == pytest.approx((12 / 16) ** 2, abs=0.02)
    assert genecis.crop(torch.rand(3, 900, 900), (100, 100, 600, 600), "x").shape == (3, 780, 780)
    with pytest.raises(DataError, match="has nothing of x"):
        genecis.crop(image, (500, 500, 10, 10), "x")


def test_genecis_bad_templates(gallery: Path) -> None:
    bad = [
        {"condition": "color", "reference": box(11), "target": box(99), "gallery": [box(13)]},
        {"condition": "color", "reference": box(11), "target": box(12, (1, 2, 3)), "gallery": [box(13)]},
        {"condition": "", "reference": box(11), "target": box(12), "gallery": [box(13)]},
        [1],
    ]
    (gallery / "focus_attribute.json").write_text(json.dumps(bad))
    found = [message for _, message in run(BENCHMARKS["genecis"], gallery, [gray])["problems"]]
    for message, wanted in zip(
        found, ("99.jpg is nowhere below", "instance_bbox must be", "its condition", "must have condition"), strict=True
    ):
        assert wanted in message
    with pytest.raises(DataError, match="template 1: of focus_attribute.json"):
        run(BENCHMARKS["genecis"], gallery, [gray], Settings(strict=True))
    with pytest.raises(DataError, match="change_object"):
        run(BENCHMARKS["genecis"], gallery, [gray], Settings(split="change_object"))


# -------------------------------------------------------------------------------------------------------------- QARE


@pytest.fixture
def attributes(tmp_path: Path) -> Path:
    """Object, background and style as the levels of red, green and blue."""
    for a, red in (("cat", 40), ("dog", 200)):
        for b, green in (("beach", 40), ("forest", 200)):
            for c, blue in (("oil", 40), ("photo", 200)):
                save(tmp_path / "AttriVerse" / "A" / f"{a}_{b}_{c}.png", (red, green, blue))
    return tmp_path


def test_qare_of_a_metric_that_tells_attributes_apart(attributes: Path) -> None:
    names = list(qare.ASPECTS.values())
    row = run(BENCHMARKS["qare"], attributes, [lambda: channels(names)])["metrics"]["channels"]
    assert row["figures"] == pytest.approx({"mAP": 1, "AIS": 0, "mAP of one attribute": 1}, abs=1e-9)
    alone = run(BENCHMARKS["qare"], attributes, [lambda: channels(names, embedding=False)])["metrics"]["channels"]
    assert alone["figures"] == pytest.approx({"mAP of one attribute": 1})


def test_qare_of_a_metric_that_does_not_know_aspects(attributes: Path) -> None:
    def embed(images: list[Tensor], aspects: list[str]) -> Tensor:
        return torch.ones(len(images), len(aspects), 2)

    judge = PairwiseJudge("blind", lambda images, pairs: torch.ones(len(pairs)), embed=embed)
    figures = run(BENCHMARKS["qare"], attributes, [lambda: judge], Settings(images_per_call=3))["metrics"]["blind"][
        "figures"
    ]
    chance = average_precision(np.zeros(24), np.arange(24) < 4)  # 4 of 24 candidates are right
    assert figures["AIS"] == pytest.approx(1) and figures["mAP"] == pytest.approx(chance)
    assert figures["mAP of one attribute"] == pytest.approx(average_precision(np.zeros(7), np.arange(7) < 3))


def test_qare_with_foreign_files(attributes: Path) -> None:
    save(attributes / "AttriVerse" / "A" / "cat_beach.png", 1)
    results = run(BENCHMARKS["qare"], attributes, [gray])
    assert results["size"] == {"images": 8} and "cat_beach.png is not called" in results["problems"][0][1]
    with pytest.raises(DataError, match="fewer than two images"):
        run(BENCHMARKS["qare"], attributes / "AttriVerse", [gray], Settings(limit=1))


# ------------------------------------------------------------------------------------------------------------ Subtle


@pytest.fixture
def pairs(tmp_path: Path) -> Path:
    """Pairs that differ in red ("quantity"), green ("state") or blue ("viewpoint")."""
    rows = []
    for number in range(9):
        category = ("quantity", "state", "viewpoint")[number % 3]
        color = [60 + 9 * number] * 3
        save(tmp_path / "images" / f"{number}.png", (color[0], color[1], color[2]))
        color[number % 3] += 10 + number
        save(tmp_path / "images" / f"{number}_2.png", (color[0], color[1], color[2]))
        second = f"https://huggingface.co/datasets/KRAFTON/VLM-SubtleBench/resolve/main/images/{number}_2.png"
        asked = {"question": "In which image ...?", "answer": "first image", "distractors": ["second image"]}
        kinds = {"category": category, "domain": ("natural", "medical")[number % 2]}
        rows.append({"image_1": f"images/{number}.png", "image_2": second, **asked, **kinds})
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def test_sensitivity_of_a_metric_that_sees_each_difference(pairs: Path) -> None:
    names = [subtle.ASPECTS[name] for name in ("quantity", "state", "viewpoint")]
    results = run(BENCHMARKS["subtle"], pairs, [lambda: channels(names), gray, constant], Settings(images_per_call=4))
    assert results["metrics"]["channels"]["figures"] == pytest.approx({"sensitivity": 1, "rank": 1})
    for blind in ("gray", "constant"):
        assert results["metrics"][blind]["figures"] == pytest.approx({"sensitivity": 0.5, "rank": 0.5})
    groups = results["metrics"]["channels"]["groups"]
    assert groups["category"]["state"]["examples"] == 3 and set(groups["domain"]) == {"natural", "medical"}


def test_subtle_bad_rows(pairs: Path) -> None:
    path = pairs / "data" / "test.jsonl"
    lines = path.read_text().splitlines()
    row = json.loads(lines[0])
    lines[0] = json.dumps(row | {"category": "mood"})
    lines[1] = json.dumps(row | {"image_2": "https://elsewhere.org/a.png"})
    path.write_text("\n".join(lines))
    found = run(BENCHMARKS["subtle"], pairs, [gray])["problems"]
    assert (
        [line for line, _ in found] == [1, 2]
        and "category must be one of" in found[0][1]
        and "download it" in found[1][1]
    )
    path.write_text(lines[2])
    with pytest.raises(DataError, match="fewer than two categories"):
        run(BENCHMARKS["subtle"], pairs, [gray])
    with pytest.raises(DataError, match="holds data/test.jsonl"):
        run(BENCHMARKS["subtle"], pairs / "images", [gray])


# ------------------------------------------------------------------------------------------------------- the command


def test_judges_that_a_protocol_does_not_take(pairs: Path) -> None:
    class Nobody:
        def answer(self, questions: Any) -> list[None]:
            return [None for _ in questions]

        def facts(self) -> dict[str, Any]:
            return {}

    with pytest.raises(TPIPSError, match="vlm cannot run this benchmark"):
        run(BENCHMARKS["subtle"], pairs, [lambda: score_judge("vlm", Nobody())])
    with pytest.raises(TPIPSError, match="gray is there twice"):
        run(BENCHMARKS["subtle"], pairs, [gray, gray])
    broken = PairwiseJudge("broken", lambda images, pairs: torch.full((len(pairs),), float("nan")))
    with pytest.raises(TPIPSError, match="broken gave a similarity that is not finite"):
        run(BENCHMARKS["subtle"], pairs, [lambda: broken])


def test_the_command_writes_a_report(attributes: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    command.main(
        [
            "qare",
            "--data",
            str(attributes),
            "--metric",
            "pixel_l2",
            "--metric",
            "builtin:late",
            "--output_dir",
            str(out),
        ]
    )
    printed = capsys.readouterr().out
    stored = json.loads((out / "report.json").read_text())
    assert (out / "report.md").read_text().strip() == as_markdown(stored) and as_markdown(stored) in printed
    assert set(stored["metrics"]["builtin:late"]["figures"]) == {"mAP", "AIS", "mAP of one attribute"}
    assert "| metric | mAP of one attribute | mAP | AIS |" in printed and "| pixel_l2 | 0." in printed
    judge = load_judge("builtin:late", device="cpu")
    again = run(BENCHMARKS["qare"], attributes, [lambda: judge])["metrics"]["builtin:late"]["figures"]
    assert again == pytest.approx(stored["metrics"]["builtin:late"]["figures"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nights", "--data", "nowhere"], "data.csv does not exist; give the folder of NIGHTS"),
        (["bapps", "--data", "nowhere"], "nowhere is no folder"),
        (["genecis", "--data", "nowhere"], "nowhere is no folder"),
        (["qare", "--data", "nowhere"], "nowhere is no folder"),
        (["edir", "--data", "nowhere"], "nowhere is not EDIR's"),
        (["subtle", "--data", "nowhere"], "test.jsonl does not exist"),
        (["qare", "--data", ".", "--limit", "0"], "--limit must be at least 1"),
        (["qare", "--data", ".", "--output_dir", __file__], "is a file; give another path"),
        (["QARE", "--metric", "psnr"], "Baselines are pixel_l2"),
    ],
)
def test_bad_input_is_one_sentence(
    arguments: list[str], message: str, attributes: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if arguments[0] == "QARE":
        arguments = ["qare", "--data", str(attributes), *arguments[1:]]
    with pytest.raises(SystemExit) as stop:
        command.main(arguments)
    error = capsys.readouterr().err
    assert stop.value.code == 2 and message in error and len(error.strip().splitlines()) == 1
