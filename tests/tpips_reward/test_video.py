"""Similarity over time: frames of folders and of video files, the right numbers, and what cannot be read."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest
import torch
from fake_metrics import RegionMetric
from PIL import Image

from tpips_reward.cli import main
from tpips_reward.errors import NotFinite, TPIPSError
from tpips_reward.video.frames import Frame, frame_at, read_frames
from tpips_reward.video.timeline import measure


class Similar(RegionMetric):
    """With the call that a timeline needs."""

    def similarity(self, a: list[torch.Tensor], b: torch.Tensor, aspects: list[str]) -> torch.Tensor:
        pairs = [(row, 0, aspect) for row in range(len(a)) for aspect in aspects]
        return self.similarity_pairs(a, [b], pairs).view(len(a), len(aspects))


def brighter(number: int, size: int = 64) -> np.ndarray:
    return np.full((size, size, 3), 20 * number, np.uint8)


@pytest.fixture
def frames(tmp_path) -> Path:
    """Eleven frames whose names sort differently as text."""
    home = tmp_path / "frames"
    home.mkdir()
    for number in range(11):
        Image.fromarray(brighter(number)).save(home / f"f{number}.png")
    (home / "notes.txt").write_text("x")
    return home


@pytest.fixture
def clip(tmp_path) -> Path:
    """The same frames at 10 a second, in a lossless codec."""
    import av

    path = tmp_path / "clip.mkv"
    with av.open(str(path), "w") as container:
        stream = container.add_stream("ffv1", rate=10)
        stream.width = stream.height = 64
        stream.pix_fmt = "bgr0"
        for number in range(11):
            for packet in stream.encode(av.VideoFrame.from_ndarray(brighter(number), format="rgb24")):
                container.mux(packet)
        for packet in stream.encode():
            container.mux(packet)
    return path


def test_a_folder_in_the_order_of_its_numbers(frames):
    found = list(read_frames(frames, every=2, fps=4))
    assert [frame.number for frame in found] == [0, 2, 4, 6, 8, 10]
    assert [frame.seconds for frame in found] == [0, 0.5, 1, 1.5, 2, 2.5]
    assert [round(float(frame.pixels.mean()) * 255) for frame in found] == [0, 40, 80, 120, 160, 200]


def test_a_link_to_nothing_moves_no_other_frame(frames, tmp_path):
    for number in (0, 2):
        (tmp_path / f"{number}.png").symlink_to(frames / f"f{number}.png")
    (tmp_path / "1.png").symlink_to(tmp_path / "nowhere.png")
    assert [frame.number for frame in read_frames(tmp_path, every=2)] == [0, 2]
    with pytest.raises(TPIPSError, match="1.png does not exist"):
        list(read_frames(tmp_path))


def test_a_video_file_is_its_frames(clip, frames):
    for one, other in zip(read_frames(clip, 3), read_frames(frames, 3, fps=10), strict=True):
        assert one.number == other.number and one.seconds == pytest.approx(other.seconds, abs=1e-3)
        torch.testing.assert_close(one.pixels, other.pixels, atol=1 / 255, rtol=0)


@pytest.mark.parametrize("number", [0, 1, 7, 10])
def test_a_reference_anywhere(clip, frames, number):
    for source in (clip, frames):
        frame = frame_at(source, number)
        assert frame.number == number and round(float(frame.pixels.mean()) * 255) == pytest.approx(20 * number, abs=1)


def test_the_similarities_are_the_metrics_own(frames):
    metric = Similar()
    timeline = measure(read_frames(frames), frame_at(frames, 0).pixels, ["lighting", "shape"], metric, batch=4)
    assert timeline.similarities.shape == (11, 2)
    expected = [max(-1.0, 1 - 4 * 20 * number / 255) for number in range(11)]
    torch.testing.assert_close(timeline.similarities[:, 0], torch.tensor(expected), atol=1e-5, rtol=0)
    assert [len(call[0]) for call in metric.calls] == [4, 4, 3]


def test_the_command_writes_a_table_and_a_picture(frames, tmp_path, parity, capsys, metric):
    arguments = ["video", str(frames), "--aspect", "lighting", "--aspect", "shape", "--every", "5", "--reference", "5",
                 "--output", str(tmp_path / "out"), "--metric", str(parity / "embedding")]  # fmt: skip
    assert main(arguments) == 0 and "3 frames in 2 aspects" in capsys.readouterr().out
    rows = list(csv.reader((tmp_path / "out" / "timeline.csv").open()))
    assert rows[0] == ["frame", "seconds", "lighting", "shape"] and [row[0] for row in rows[1:]] == ["0", "5", "10"]
    wanted = metric.similarity(brighter(10), brighter(5), ["lighting", "shape"])[0]
    assert [float(value) for value in rows[3][2:]] == pytest.approx(wanted.tolist(), abs=1e-4)
    assert float(rows[2][2]) == pytest.approx(1.0, abs=1e-5)  # the reference itself
    with Image.open(tmp_path / "out" / "timeline.png") as plot:
        assert plot.format == "PNG" and plot.width > 500
    assert main(arguments) == 2 and "--overwrite" in capsys.readouterr().err
    assert main([*arguments, "--overwrite"]) == 0


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("none.mp4", [], "does not exist"),
        ("bad.mp4", [], "cannot be read as a video"),
        ("empty", [], "has no frames"),
        ("frames", ["--reference", "11"], "fewer than 12 frames"),
        ("frames", ["--reference", "-1"], "count from 0"),
        ("frames", ["--every", "0"], "--every is 0"),
        ("frames", ["--fps", "0"], "must be positive"),
    ],
)
def test_what_the_command_refuses(frames, tmp_path, capsys, name, options, words):
    (tmp_path / "bad.mp4").write_bytes(b"no video" * 100)
    (tmp_path / "empty").mkdir()
    assert main(["video", str(tmp_path / name), "--aspect", "x", "--output", str(tmp_path / "out"), *options]) == 2
    error = capsys.readouterr().err
    assert words in error and len(error.splitlines()) == 1


def test_an_output_that_is_a_file(frames, tmp_path, capsys):
    (tmp_path / "file").write_text("x")
    for output in ("file", "file/x"):
        assert main(["video", str(frames), "--aspect", "x", "--output", str(tmp_path / output)]) == 2
        error = capsys.readouterr().err
        assert "file is a file" in error and len(error.splitlines()) == 1


def test_an_output_where_nothing_can_be_written_is_one_sentence(frames, parity, capsys, monkeypatch):
    monkeypatch.setattr("os.access", lambda *_: True)  # as root is told
    arguments = ["--aspect", "lighting", "--every", "5", "--metric", str(parity / "embedding")]
    assert main(["video", str(frames), *arguments, "--output", "/proc/x"]) == 2
    error = capsys.readouterr().err
    assert "/proc/x cannot be used: " in error and len(error.splitlines()) == 1


def test_a_cut_video_is_an_error_or_its_frames(clip, tmp_path):
    """Never a number for a frame that is not there."""
    cut = tmp_path / "cut.mkv"
    cut.write_bytes(clip.read_bytes()[: len(clip.read_bytes()) // 2])
    try:
        found = list(read_frames(cut))
    except TPIPSError:
        return
    assert 0 < len(found) < 11 and [frame.number for frame in found] == list(range(len(found)))


def test_aspects_and_scores_that_are_none(frames):
    first = frame_at(frames, 0)
    for aspects in ([], [" "], ["a", "A"]):
        with pytest.raises(TPIPSError, match="The aspects"):
            measure([first], first.pixels, aspects, Similar())
    with pytest.raises(TPIPSError, match="no frames"):
        measure([], first.pixels, ["a"], Similar())

    class Broken:
        def similarity(self, *_: object) -> torch.Tensor:
            if self.raises:
                raise NotFinite("as a metric of ours says it", 3)
            return torch.tensor([[0.0, 0.0], [0.0, float("nan")]])

    for Broken.raises in (False, True):
        with pytest.raises(NotFinite, match="no finite number for frame 8 and the reference in 'b'"):
            measure([Frame(number, 0.0, first.pixels) for number in (7, 8)], first.pixels, ["a", "b"], Broken())
