"""EDIR in both layouts, with the backbone's own embedding of image and text, and with a composition of aspects."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from benchmark_files import gray, save
from torch import Tensor
from transformers import AutoProcessor, Qwen3VLModel

from metric_training.benchmark import run
from metric_training.benchmarks import edir
from metric_training.benchmarks.composed_query import composed_embeddings
from metric_training.benchmarks.protocol import Settings
from metric_training.benchmarks.registry import BENCHMARKS
from metric_training.data.comparison import DataError
from metric_training.evaluation.judges import PairwiseJudge, metric_judge
from tpips_reward import Metric, TPIPSError, load_metric
from tpips_reward.images import to_tensors

PARITY = Path(__file__).parents[1] / "data" / "parity"
TEXTS = {"q1": "make the car red", "q2": "remove the tree", "q3": "show it at night"}


@pytest.fixture(scope="module")
def late() -> Metric:
    return load_metric(PARITY / "embedding", device="cpu")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Queries of levels 20, 80 and 200; the right image is 4 brighter, and three others are farther."""
    levels = {"q1": 20, "q2": 80, "q3": 200}
    queries, corpus, instances = [], [], []
    for name, level in levels.items():
        save(tmp_path / "imgs" / f"{name}.png", level, (40, 40))
        save(tmp_path / "imgs" / f"{name}_right.png", level + 4, (40, 40))
        queries.append({"id": name, "image": f"{name}.png", "text": TEXTS[name], "metadata": {"subcategory": "color"}})
        corpus.append({"id": f"{name}_right.png", "image": f"{name}_right.png"})
        instances.append({"qid": name, "pos": [f"{name}_right.png"], "neg": []})
    for number in range(3):
        save(tmp_path / "imgs" / f"other{number}.png", 60 + 90 * number, (40, 40))
        corpus.append({"id": f"other{number}.png", "image": f"other{number}.png"})
    for name, rows in (("queries", queries), ("corpus", corpus), ("instances", instances)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def bright() -> PairwiseJudge:
    """Embeds the brightness as an angle: what is nearer in it is more similar, in every aspect that is not asked to change."""

    def embed(images: list[Tensor], aspects: list[str]) -> Tensor:
        angles = torch.tensor([float(image.mean()) for image in images])[:, None] * np.pi / 2
        sign = torch.tensor([1.0 for _ in aspects])
        return torch.stack([angles.cos() * sign, angles.sin() * sign], -1)

    def score(images: list[Tensor], pairs: Any) -> Tensor:
        vectors = embed(images, ["overall"])[:, 0]
        # nothing is alike in the car's color, so that the composition is decided by what stays
        return torch.stack([vectors[i] @ vectors[j] if "color" not in a else torch.tensor(0.0) for i, j, a in pairs])

    return PairwiseJudge("bright", score, embed=embed)


def test_the_authors_layout_and_a_composition_of_aspects(folder: Path) -> None:
    results = run(BENCHMARKS["edir"], folder, [bright], Settings(query="aspects", images_per_call=4))
    assert results["size"] == {"queries": 3, "corpus images": 6} and results["query"] == "aspects"
    figures = results["metrics"]["bright"]["figures"]
    assert figures["shortlisted"] == 1 and figures["recall@10"] == 1
    groups = results["metrics"]["bright"]["groups"]["subcategory"]
    assert groups["color"]["examples"] == 3 and groups["color"]["recall@1"] == figures["recall@1"]


def test_a_composition_weighs_what_stays_against_what_changes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = edir.load(folder, Settings()).content
    proposal = edir.propose(TEXTS["q1"], "color")
    (scores, *_) = list(edir.by_aspects(bright(), content, Settings()))
    image = content.queries[0].image.load()
    for place, source in enumerate(content.corpus):
        similar = bright().similarities(
            [image, source.load()], [(0, 1, a) for a in (*proposal.preserve, *proposal.target)]
        )
        kept = float(similar[: len(proposal.preserve)].mean())
        changed = float(similar[len(proposal.preserve) :].mean())
        assert scores[place] == pytest.approx(kept - changed, abs=1e-6)
    monkeypatch.setattr(edir, "SHORTLIST", 2)
    (short, *_) = list(edir.by_aspects(bright(), content, Settings()))
    assert np.isfinite(short).sum() == 2 and np.isfinite(short[0])  # the right image is the nearest overall


def test_what_is_not_shortlisted_is_not_found(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(edir, "SHORTLIST", 1)
    rows = [json.loads(line) for line in (folder / "instances.jsonl").read_text().splitlines()]
    rows[0]["pos"] = ["q3_right.png"]  # far away
    (folder / "instances.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    figures = run(BENCHMARKS["edir"], folder, [bright], Settings(query="aspects"))["metrics"]["bright"]["figures"]
    assert figures["shortlisted"] == figures["recall@1"] == figures["recall@10"] == pytest.approx(2 / 3)


def test_image_and_text_are_embedded_as_the_backbone_does_it(late: Metric) -> None:
    """Against the plain transformers model: chat template, full causal pass, last token."""
    processor = AutoProcessor.from_pretrained(PARITY / "backbone")
    image = to_tensors(torch.rand(3, 64, 96, generator=torch.Generator().manual_seed(0)))[0]
    for text in ("make the car red", None):
        turns = [
            {"role": "system", "content": [{"type": "text", "text": edir.INSTRUCTION}]},
            {"role": "user", "content": [{"type": "image"}, *([{"type": "text", "text": text}] if text else [])]},
        ]
        chat = processor.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        inputs = processor(text=[chat], images=[image], return_tensors="pt", do_rescale=False)
        model = late.backbone.model
        assert isinstance(model, Qwen3VLModel)
        with torch.no_grad():
            state = model(**inputs).last_hidden_state[0, -1]
        expected = torch.nn.functional.normalize(state.float(), dim=-1)
        (found,) = composed_embeddings(late, [image], [text], edir.INSTRUCTION)
        assert torch.allclose(found, expected, atol=2e-3), (found - expected).abs().max()
    (plain,) = composed_embeddings(late, [image], [None], edir.INSTRUCTION)
    (asked,) = composed_embeddings(late, [image], ["make the car red"], edir.INSTRUCTION)
    assert float(plain @ asked) < 0.9999
    with pytest.raises(TPIPSError, match="control token"):
        composed_embeddings(late, [image], ["a <|im_end|> b"])


def test_text_queries_rank_the_whole_corpus(folder: Path, late: Metric) -> None:
    judge = metric_judge("late", late)
    results = run(BENCHMARKS["edir"], folder, [lambda: judge], Settings(images_per_call=2))
    content = edir.load(folder, Settings()).content
    corpus = composed_embeddings(late, [source.load() for source in content.corpus], [None] * 6)
    queries = composed_embeddings(
        late, [q.image.load() for q in content.queries], list(TEXTS.values()), edir.INSTRUCTION
    )
    ranks = [int((row > row[k]).sum()) for k, row in enumerate(queries @ corpus.T)]
    assert results["metrics"]["late"]["figures"]["recall@1"] == pytest.approx(np.mean([rank == 0 for rank in ranks]))
    assert results["metrics"]["late"]["figures"]["recall@5"] == pytest.approx(np.mean([rank < 5 for rank in ranks]))


def test_metrics_without_an_embedding_are_refused(folder: Path) -> None:
    early = metric_judge("early", load_metric(PARITY / "early_fusion", device="cpu"))
    with pytest.raises(TPIPSError, match="early fusion has no embedding of image and text"):
        run(BENCHMARKS["edir"], folder, [lambda: early])
    with pytest.raises(TPIPSError, match="gray has no embedding of image and text"):
        run(BENCHMARKS["edir"], folder, [gray])
    with pytest.raises(TPIPSError, match="gray has no embedding, which a search"):
        run(BENCHMARKS["edir"], folder, [gray], Settings(query="aspects"))


def test_mtebs_copy_has_the_same_content(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    datasets = pytest.importorskip("datasets", reason="the extra 'data' is not installed")
    copy = tmp_path_factory.mktemp("mteb")
    ours = edir.load(folder, Settings()).content
    images = {path.name: str(path) for path in (folder / "imgs").iterdir()}
    rows = {
        name: [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]
        for name in ("queries", "corpus")
    }
    queries = [
        {"id": r["id"], "image": images[r["image"]], "text": r["text"], "subcategory": "color"} for r in rows["queries"]
    ]
    corpus = [{"id": r["id"], "image": images[r["image"]]} for r in rows["corpus"]]
    qrels = [{"query-id": name, "corpus-id": f"{name}_right.png", "score": 1} for name in TEXTS]
    for name, content in (("queries", queries), ("corpus", corpus), ("qrels", qrels)):
        table = datasets.Dataset.from_list(content)
        if name != "qrels":
            table = table.cast_column("image", datasets.Image())
        datasets.DatasetDict({"test": table}).save_to_disk(copy / name)
    theirs = edir.load(copy, Settings()).content
    assert [(q.text, q.targets, q.subcategory) for q in theirs.queries] == [
        (q.text, q.targets, q.subcategory) for q in ours.queries
    ]
    assert all(torch.equal(a.load(), b.load()) for a, b in zip(ours.corpus, theirs.corpus, strict=True))


def test_edir_bad_files(folder: Path) -> None:
    rows = [json.loads(line) for line in (folder / "queries.jsonl").read_text().splitlines()]
    (folder / "queries.jsonl").write_text(
        "".join(json.dumps(r) + "\n" for r in (rows[0] | {"text": ""}, rows[1] | {"id": "q9"}, rows[2]))
    )
    loaded = edir.load(folder, Settings())
    assert len(loaded.content.queries) == 1
    messages = [message for _, message in loaded.problems.found]
    assert "must have id, image and text" in messages[0] and "'q9' has no right image" in messages[1]
    with pytest.raises(DataError, match="line 1"):
        edir.load(folder, Settings(strict=True))
    (folder / "imgs" / "other1.png").unlink()
    with pytest.raises(DataError, match="other1.png is nowhere below .*unpack the tar"):
        edir.load(folder, Settings())
