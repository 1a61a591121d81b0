"""Search by aspect: the paper's ranking, exact neighbours, and indexes that are whole, checked and of one metric."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from serving_workers import BROKEN_EXIF, with_exif

from tpips_reward.cli import main
from tpips_reward.errors import NotFinite, TPIPSError
from tpips_reward.search.index import Index, build_index, probe, write_index
from tpips_reward.search.ranking import OVERALL, Query, combine, scores
from tpips_reward.search.staging import Staged, _prefix

ASPECTS = ["lighting", "background color"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory, photos) -> Path:
    """Twelve images in two folders, and two files that are none."""
    home = tmp_path_factory.mktemp("photos")
    for name, photo in photos.items():
        path = home / name.split("_")[0] / f"{name}.png"
        path.parent.mkdir(exist_ok=True)
        photo.save(path)
    (home / "broken.png").write_bytes(b"no image")
    (home / "cat" / "cut.jpg").write_bytes((home / "cat" / "cat_0.png").read_bytes()[:300])
    (home / "notes.txt").write_text("not even called an image")
    return home


@pytest.fixture(scope="module")
def index(folder, metric, tmp_path_factory) -> Index:
    output = tmp_path_factory.mktemp("out") / "index"
    return build_index(folder, ASPECTS, metric, output, metric_name="parity", batch_images=5)


def unit(count: int, width: int = 8, seed: int = 0) -> np.ndarray:
    vectors = np.random.default_rng(seed).standard_normal((count, width)).astype(np.float32)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


# --- the formula


def test_one_query_is_ranked_by_aspect_minus_three_tenths_of_overall():
    aspect, overall, images = unit(1)[0], unit(1, seed=1)[0], {"lighting": unit(20, seed=2), OVERALL: unit(20, seed=3)}
    combined = combine([Query("lighting", aspect, overall)])
    expected = images["lighting"] @ aspect - 0.3 * (images[OVERALL] @ overall)
    np.testing.assert_allclose(scores(combined, images), expected, atol=1e-6)


def test_several_queries_are_added_as_they_are_or_with_the_share_that_is_given():
    q = [
        Query("lighting", *unit(2, seed=1)),
        Query("color", *unit(2, seed=2), weight=0.5),
        Query("lighting", *unit(2, seed=3), weight=-2),
    ]
    images = {"lighting": unit(9, seed=4), "color": unit(9, seed=5), OVERALL: unit(9, seed=6)}
    plain = sum(query.weight * (images[query.aspect] @ query.vector) for query in q)
    np.testing.assert_allclose(scores(combine(q), images), plain, atol=1e-5)
    assert OVERALL not in combine(q)
    shared = plain - 0.1 * sum(query.weight * (images[OVERALL] @ query.overall) for query in q)
    np.testing.assert_allclose(scores(combine(q, 0.1), images), shared, atol=1e-5)


def test_overall_itself_may_be_asked_for():
    vector = unit(1)[0]
    np.testing.assert_allclose(combine([Query(OVERALL, vector, vector)])[OVERALL], 0.7 * vector, atol=1e-6)


@pytest.mark.parametrize(("weight", "share"), [(0.0, None), (float("nan"), None), (1.0, float("inf"))])
def test_weights_that_are_none(weight, share):
    with pytest.raises(TPIPSError, match="give a number"):
        combine([Query("lighting", unit(1)[0], unit(1)[0], weight)], share)
    with pytest.raises(TPIPSError, match="at least one query"):
        combine([])


# --- the index


def test_the_index_holds_the_metrics_own_embeddings(index, folder, metric, photos):
    assert index.aspects == [OVERALL, *ASPECTS] and len(index) == 12
    assert set(index.info["skipped"]) == {"broken.png", "cat/cut.jpg"}
    row = index.files.index("coffee/coffee_1.png")
    wanted = metric.embed(photos["coffee_1"], index.aspects)[0]
    for k, aspect in enumerate(index.aspects):
        torch.testing.assert_close(torch.tensor(index.vectors(aspect)[row]), wanted[k], atol=1e-5, rtol=0)
    assert not list(index.folder.parent.glob(".tmp-*"))


def test_neighbours_are_exact_for_any_combination(index, metric, photos):
    lighting, color, overall = metric.embed(photos["cat_2"], ["lighting", "background color", OVERALL])[0].numpy()
    for queries, share in (
        ([Query("lighting", lighting, overall)], None),
        ([Query("lighting", lighting, overall), Query("background color", color, overall, 0.5)], None),
        ([Query("background color", color, overall, -1.0)], 0.2),
    ):
        combined = combine(queries, share)
        wanted = scores(combined, {aspect: index.vectors(aspect) for aspect in combined})
        found = index.search(combined, 5)
        np.testing.assert_allclose([item.score for item in found], np.sort(wanted)[::-1][:5], atol=1e-5)
        assert [wanted[item.row] for item in found] == pytest.approx([item.score for item in found], abs=1e-5)
        assert index.files[found[0].row] == found[0].file
    assert len(index.search(combined, 100)) == 12


def test_equal_scores_come_in_the_order_of_the_index(tmp_path):
    same = np.tile(unit(1), (6, 1))
    index = write_index(
        tmp_path / "i", [f"{n}.png" for n in range(6)], {OVERALL: same}, metric_name="x", probe_vector=same[0]
    )
    assert [item.row for item in index.search({OVERALL: same[0]}, 4)] == [0, 1, 2, 3]


def test_only_the_aspects_of_a_search_are_read(index, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(index.folder, copy)
    (copy / "vectors-2.npy").write_bytes(b"damaged")
    other = Index(copy)
    assert other.search({"lighting": index.vectors("lighting")[3].copy()}, 1)[0].row == 3
    with pytest.raises(TPIPSError, match="vectors-2.npy cannot be read.*build the index again"):
        other.search({"background color": index.vectors("lighting")[3].copy()}, 1)


def test_vectors_that_are_not_finite_leave_no_index(index, folder, metric, tmp_path):
    """Rows are images, and in each overall and the aspects: 4 is the second image's first one."""

    class Broken:
        def __getattr__(self, name: str) -> Any:
            return getattr(metric, name)

        def embed(self, *_: Any) -> Any:
            raise NotFinite("as a metric says it", 4)

    with pytest.raises(NotFinite, match=f"no finite number for {index.files[1]} in 'lighting'"):
        build_index(folder, ASPECTS, Broken(), tmp_path / "index", metric_name="broken", batch_images=5)
    assert list(tmp_path.iterdir()) == []


def test_another_metrics_vectors_are_refused(index, metric, monkeypatch):
    index.check_metric(metric)
    monkeypatch.setattr("tpips_reward.search.index.probe", lambda metric: -probe(metric))
    with pytest.raises(TPIPSError, match="other weights"):
        index.check_metric(metric)


def test_a_stopped_build_leaves_nothing(run, folder, metric, tmp_path, monkeypatch):
    """SIGTERM in the middle, as a scheduler sends it."""

    class Stopping:
        def __getattr__(self, name: str) -> Any:
            return getattr(metric, name)

        def embed(self, *arguments: Any) -> Any:
            os.kill(os.getpid(), signal.SIGTERM)
            return metric.embed(*arguments)

    monkeypatch.setattr("tpips_reward.cli._load", lambda options: Stopping())
    status, _, err = run("index", folder, "--aspect", "lighting", "--output", tmp_path / "index", "--batch-images", 4)
    assert status == 130 and "interrupted" in err and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda f: (f / "index.json").unlink(), "is no index"),
        (lambda f: (f / "index.json").write_text("{"), "cannot be read"),
        (
            lambda f: (f / "index.json").write_text('{"format": 9, "aspects": [], "files": [], "metric": ""}'),
            "format 9",
        ),
        (lambda f: (f / "vectors-1.npy").unlink(), "cannot be read"),
        (lambda f: np.save(f / "vectors-1.npy", np.zeros((2, 2), np.float32)), "not float32 (12"),
    ],
)
def test_damaged_indexes(index, tmp_path, change, words):
    copy = tmp_path / "copy"
    shutil.copytree(index.folder, copy)
    change(copy)
    with pytest.raises(TPIPSError) as caught:
        Index(copy).search({"lighting": unit(1, 64)[0]}, 1)
    assert words in str(caught.value)


def test_metrics_without_embeddings_and_outputs_that_are_there(folder, mid_metric, metric, index, tmp_path):
    with pytest.raises(TPIPSError, match="use late fusion"):
        build_index(folder, ASPECTS, mid_metric, tmp_path / "x", metric_name="mid")
    with pytest.raises(TPIPSError, match="--overwrite"):
        build_index(folder, ASPECTS, metric, index.folder, metric_name="x")
    (tmp_path / "mine").mkdir()
    with pytest.raises(TPIPSError, match="exists and is no index"):
        build_index(folder, ASPECTS, metric, tmp_path / "mine", metric_name="x", overwrite=True)


# --- the commands


@pytest.fixture
def run(capsys, parity):
    def call(*arguments: Any) -> tuple[int, str, str]:
        status = main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return call


def test_index_and_search_from_the_command_line(run, folder, parity, tmp_path, metric, photos):
    output = tmp_path / "index"
    status, out, err = run(
        "index", folder, "--aspect", "lighting", "--output", output, "--metric", parity / "embedding"
    )
    assert status == 0 and "12 images in 2 aspects" in out and "skipped broken.png" in err
    query = folder / "cat" / "cat_0.png"
    status, out, _ = run("search", output, "--query", query, "lighting", "--top", 3, "--json")
    rows = json.loads(out)["results"]
    assert status == 0 and len(rows) == 3
    photo = photos[Path(rows[0]["file"]).stem]
    expected = metric.similarity(photos["cat_0"], photo, ["lighting", "overall"])[0].tolist()
    assert rows[0]["score"] == pytest.approx(expected[0] - 0.3 * expected[1], abs=1e-4)
    assert rows[0]["similarities"] == pytest.approx(expected[:1], abs=1e-4)
    status, out, _ = run("search", output, "--query", query, "lighting", "--overall-weight", 0, "--top", 1)
    assert out.split()[1] == "cat/cat_0.png"
    status, out, _ = run(
        "search", output, "--query", query, "lighting", "2", "--query", query, "overall", "-1", "--json"
    )
    assert len(json.loads(out)["results"][0]["similarities"]) == 2
    assert run("index", folder, "--aspect", "lighting", "--output", output, "--metric", parity / "embedding")[0] == 2
    status, _, err = run("search", output, "--query", query, "lighting", "--metric", "builtin:late")
    assert status == 2 and "other weights" in err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--query", "a.png"], "IMAGE ASPECT"),
        (["--query", "a.png", "lighting", "much"], "is no number"),
        (["--query", "a.png", "texture"], "it has overall, lighting, background color"),
        (["--query", "a.png", "lighting", "--top", "0"], "at least one"),
        (["--query", "a.png", "lighting"], "a.png does not exist"),
    ],
)
def test_what_search_refuses_before_it_loads_a_metric(run, index, arguments, words):
    status, _, err = run("search", index.folder, *arguments)
    assert status == 2 and words in err


def test_a_thin_image_is_named_as_it_was_given(run, index, metric, tmp_path):
    thin = tmp_path / "photos/thin.png"
    thin.parent.mkdir()
    Image.new("RGB", (3000, 2)).save(thin)
    Image.new("RGB", (30, 20)).save(thin.with_name("good.png"))
    limit = "has 3000x2 pixels: one side is more than 200 times the other; crop it."
    status, _, err = run("search", index.folder, "--query", thin, "lighting")
    assert status == 2 and err.strip() == f"tpips-reward: {thin} {limit}"
    built = build_index(thin.parent, ["lighting"], metric, tmp_path / "built", metric_name="parity")
    assert built.info["skipped"] == {"thin.png": f"thin.png {limit}"}


@pytest.mark.parametrize(("call", "words"), [(1, "an image made to try it in 'overall'"), (3, "{query} in 'lighting'")])
def test_numbers_that_are_not_finite_are_named_by_their_query(run, index, folder, metric, monkeypatch, call, words):
    """The first call is the probe's, the others are the queries'."""
    calls = []

    class Broken:
        def __getattr__(self, name: str) -> Any:
            return getattr(metric, name)

        def embed(self, *arguments: Any) -> Any:
            calls.append(arguments)
            if len(calls) == call:
                raise NotFinite("images[0], as a metric says it", 0)
            return metric.embed(*arguments)

    monkeypatch.setattr("tpips_reward.cli._load", lambda options: Broken())
    good, bad = folder / "cat" / "cat_0.png", folder / "cat" / "cat_1.png"
    status, out, err = run("search", index.folder, "--query", good, "lighting", "--query", bad, "lighting")
    assert status == 2 and not out and f"no finite number for {words.format(query=bad)}:" in err


def test_a_photograph_with_broken_notes_is_skipped(metric, tmp_path, photos):
    home = tmp_path / "photos"
    home.mkdir()
    photos["cat_0"].save(home / "good.png")
    (home / "bad.png").write_bytes(with_exif(photos["cat_0"], BROKEN_EXIF))
    built = build_index(home, ["lighting"], metric, tmp_path / "built", metric_name="parity")
    assert built.files == ["good.png"] and "bad.png cannot be read" in built.info["skipped"]["bad.png"]


def test_a_link_to_nothing_is_named_among_the_skipped(metric, tmp_path, photos):
    home = tmp_path / "photos"
    (home / "sub").mkdir(parents=True)
    photos["cat_0"].save(home / "good.png")
    (home / "sub" / "gone.jpg").symlink_to(tmp_path / "nowhere.jpg")
    (home / "loop.png").symlink_to(home / "loop.png")
    (home / "linked.png").symlink_to(home / "good.png")
    (home / "folder.png").mkdir()
    built = build_index(home, ["lighting"], metric, tmp_path / "built", metric_name="parity")
    assert built.files == ["good.png", "linked.png"] and set(built.info["skipped"]) == {"sub/gone.jpg", "loop.png"}
    assert built.info["skipped"]["sub/gone.jpg"] == f"{home / 'sub' / 'gone.jpg'} does not exist."


def test_what_a_killed_build_left_is_cleared_and_a_living_ones_is_not(folder, metric, tmp_path, monkeypatch):
    import fcntl

    output = tmp_path / "photos.index"
    mine, others_own = _prefix("photos.index"), _prefix("other.index")
    assert mine.startswith(".tmp-photos.index-")
    with monkeypatch.context() as patch:
        patch.setattr("tpips_reward.search.staging.gethostname", lambda: "another")
        elsewhere = tmp_path / f"{_prefix('photos.index')}abcdefgh"
    foreign = {tmp_path / f"{others_own}abcdefgh", elsewhere}

    def killed(done: int, total: int) -> None:
        (building,) = set(tmp_path.glob(".tmp-*")) - foreign
        handle = os.open(building, os.O_RDONLY)
        with pytest.raises(BlockingIOError):  # it is held as long as the build lives
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(handle)
        raise KeyboardInterrupt

    for path in foreign:
        path.mkdir()
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(shutil, "rmtree", lambda *_, **__: None)  # it had no time to clear up
        build_index(folder, ASPECTS, metric, output, metric_name="x", progress=killed)
    (left,) = tmp_path.glob(f"{mine}????????")
    assert list(left.glob("vectors-*.npy"))
    held, aside = tmp_path / f"{mine}abcdefgh", tmp_path / f"{mine}bcdefghi-old"
    for path in (held, aside):
        path.mkdir()
    living = os.open(held, os.O_RDONLY)
    fcntl.flock(living, fcntl.LOCK_EX)
    others = {held, *foreign, output}
    build_index(folder, ASPECTS, metric, output, metric_name="x")
    assert set(tmp_path.iterdir()) == {*others, aside}  # an index that was moved aside may have been the only one
    os.close(living)
    build_index(folder, ASPECTS, metric, output, metric_name="x", overwrite=True)
    assert set(tmp_path.iterdir()) == others - {held}


def test_an_output_may_have_the_longest_name_of_all(tmp_path):
    names = ("x" * 255, "x" * 254 + "y", "xä" * 85)
    for text in ("old", "new"):
        for name in names:
            with Staged(tmp_path / name, lambda: None) as staging:
                (staging / "index.json").write_text(text)
    assert {path.name: (path / "index.json").read_text() for path in tmp_path.iterdir()} == dict.fromkeys(names, "new")
    assert _prefix("x" * 255) != _prefix("x" * 254 + "y")  # a build of one clears nothing of the other's


@pytest.mark.parametrize("place", ["/proc/x.index", "/proc/new/x.index"])
def test_an_output_where_nothing_can_be_written_is_one_sentence(run, folder, parity, place, monkeypatch):
    monkeypatch.setattr(os, "access", lambda *_: True)  # as root is told
    status, _, err = run("index", folder, "--aspect", "lighting", "--output", place, "--metric", parity / "embedding")
    assert status == 2 and err.startswith(f"tpips-reward: {place} cannot be written (") and err.count("\n") == 1


def test_overwrite_deletes_nothing_but_an_index(folder, index, metric, tmp_path):
    def build(output: Path) -> Index:
        return build_index(folder, ASPECTS, metric, output, metric_name="x", overwrite=True)

    site = tmp_path / "site"
    site.mkdir()
    (site / "index.json").write_text('{"pages": []}')
    mine = tmp_path / "mine"
    shutil.copytree(index.folder, mine)
    (mine / "notes.txt").write_text("precious")
    more = tmp_path / "more"
    shutil.copytree(index.folder, more)
    (more / "vectors-3.npy").write_bytes(b"precious")
    old = tmp_path / "old"
    shutil.copytree(index.folder, old)
    (old / "index.json").write_text(json.dumps(index.info | {"format": 0}))
    (tmp_path / "link").symlink_to(index.folder)
    (tmp_path / "file").write_text("x")
    before = sorted(tmp_path.rglob("*"))
    for name, words in (
        ("site", "no index of this version"),
        ("old", "no index of this version; move it, or give another --output.$"),
        ("mine", "holds notes.txt"),
        ("more", "holds vectors-3.npy"),
        ("link", "symbolic link"),
        ("file/x", "file is a file"),
    ):
        with pytest.raises(TPIPSError, match=words):
            build(tmp_path / name)
    assert sorted(tmp_path.rglob("*")) == before
    (mine / "notes.txt").unlink()
    assert build(mine).metric == "x"


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_the_old_index_stays_where_the_new_one_cannot_take_its_place(folder, index, metric, tmp_path, monkeypatch, error):
    output, replace = tmp_path / "index", os.replace
    shutil.copytree(index.folder, output)

    def fail(source: Path, target: Path) -> None:
        if Path(target) == output and not Path(source).name.endswith("-old"):
            raise error
        replace(source, target)

    with monkeypatch.context() as patch, pytest.raises((TPIPSError, KeyboardInterrupt)) as caught:
        patch.setattr(os, "replace", fail)
        build_index(folder, ASPECTS, metric, output, metric_name="new", overwrite=True)
    if isinstance(error, OSError):
        assert str(caught.value) == f"The index cannot take its place at {output} ({error.strerror}); what was there is kept."
    assert Index(output).metric == "parity" and list(tmp_path.iterdir()) == [output]


def test_an_index_may_be_named_from_within(folder, index, metric, tmp_path, monkeypatch):
    shutil.copytree(index.folder, tmp_path / "index")
    monkeypatch.chdir(tmp_path / "index")
    assert build_index(folder, ASPECTS, metric, Path(), metric_name="new", overwrite=True).metric == "new"
    assert Index(tmp_path / "index").metric == "new" and list(tmp_path.iterdir()) == [tmp_path / "index"]


def test_a_folder_that_appears_during_the_build_stays(folder, metric, tmp_path):
    output = tmp_path / "new.index"

    def come(done: int, total: int) -> None:
        output.mkdir(exist_ok=True)
        (output / "precious.txt").write_text("mine")

    with pytest.raises(TPIPSError, match="exists and is no index"):
        build_index(folder, ASPECTS, metric, output, metric_name="x", progress=come)
    assert (output / "precious.txt").read_text() == "mine" and [p.name for p in tmp_path.glob(".tmp-*")] == []


def test_one_string_is_one_aspect(folder, metric, tmp_path):
    made = build_index(folder, "lighting", metric, tmp_path / "one.index", metric_name="x")
    assert set(made.aspects) == {"overall", "lighting"}


def test_what_index_refuses(run, tmp_path, folder):
    (tmp_path / "empty").mkdir()
    for arguments, words in (
        ((tmp_path / "none", "--aspect", "x"), "is no folder"),
        ((tmp_path / "empty", "--aspect", "x"), "has no images"),
        ((folder, "--aspect", " "), "--aspect is empty"),
    ):
        status, _, err = run("index", *arguments, "--output", tmp_path / "out")
        assert status == 2 and words in err
