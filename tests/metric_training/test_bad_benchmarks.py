"""Bad files of benchmarks: a row that is none is listed, a file that is none is one sentence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from bad_input import OVERFLOWING, draw_pictures
from PIL import Image

from metric_training.benchmarks.protocol import Settings
from metric_training.benchmarks.registry import BENCHMARKS
from tpips_reward import TPIPSError


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pictures")
    draw_pictures(folder)
    return folder


NIGHTS = "id,left_vote,right_vote,votes,ref_path,left_path,right_path,split\n0,0,1,6,3.png,4.png,5.png,test\n"


@pytest.mark.parametrize("cells", ["nan,1,6", "inf,1,6", "0,1,nan", "0,many,6"])
def test_nights_votes_that_are_no_numbers(cells: str, pictures: Path) -> None:
    (pictures / "data.csv").write_text(f"{NIGHTS}1,{cells},0.png,1.png,2.png,test\n")
    loaded = BENCHMARKS["nights"].load(pictures, Settings())
    assert len(loaded.content.comparisons) == 1 and [line for line, _ in loaded.problems.found] == [3]


def genecis(folder: Path, **reference: Any) -> None:
    for number in range(3):
        Image.open(folder / f"{number}.png").save(folder / f"{number}.jpg")
    image = {"image_id": 0, "instance_bbox": [0, 0, 9, 9]}
    template = {"condition": "color", "reference": image, "target": image | {"image_id": 1}, "gallery": [image | {"image_id": 2}]}
    content = json.dumps([template, template | {"reference": image | reference}])
    (folder / "focus_attribute.json").write_text(content)


@pytest.mark.parametrize(
    "reference",
    [{"image_id": float("inf")}, {"instance_bbox": [0, 0, OVERFLOWING, 1]}, {"instance_bbox": [float("nan"), 0, 1, 1]},
     {"instance_bbox": None}, {"image_id": 99}],
)  # fmt: skip
def test_genecis_images_that_are_none(reference: dict[str, Any], pictures: Path) -> None:
    genecis(pictures, **reference)
    loaded = BENCHMARKS["genecis"].load(pictures, Settings())
    assert len(loaded.content) == 1 and len(loaded.problems.found) == 1


@pytest.mark.parametrize(
    ("name", "files", "message"),
    [
        ("genecis", {"focus_attribute.json": f"[{'9' * 5000}]"}, "cannot be read"),
        ("edir", {"queries.jsonl": '{"id": "q", "image": "0.png", "text": "redder"}', "corpus.jsonl": '{"id": "c", "image": "1.png"}',
                  "instances.jsonl": '{"qid": "q", "pos": ["c"], "score": "abc"}'}, "score must be a number, not 'abc'"),
        ("subtle", {"test.jsonl": '{"image_1": "0.png", "image_2": "1.png", "category": ["action"]}'}, "category must be one of"),
    ],
)  # fmt: skip
def test_benchmarks_with_values_of_another_type(name: str, files: dict[str, str], message: str, pictures: Path) -> None:
    for file, content in files.items():
        (pictures / file).write_text(content + "\n")
    with pytest.raises(TPIPSError, match=message):
        BENCHMARKS[name].load(pictures, Settings())
