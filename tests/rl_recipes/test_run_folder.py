"""The output folder: nobody's files are lost, and what is there is whole."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rl_recipes.runs import RunError, RunFolder, read_json, write_atomic, write_json


def test_a_used_folder_needs_a_word(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    (tmp_path / "notes.txt").write_text("mine")
    folder = RunFolder(tmp_path)
    with pytest.raises(RunError, match="is in use .*--resume .*--overwrite"):
        folder.check()
    folder.check(resume=True)
    folder.save_config({"reward": "tpips:preserve", "num_generations": 8})
    folder.check(overwrite=True)
    assert folder.metrics.exists()
    folder.clear()
    assert not folder.metrics.exists() and (tmp_path / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("config", [None, "name: another program\n", "[1]"])
def test_overwrite_leaves_what_no_run_has_written(tmp_path: Path, config: str | None) -> None:
    (tmp_path / "logs").mkdir()
    if config is not None:
        (tmp_path / "config.yaml").write_text(config)
    with pytest.raises(RunError, match="--overwrite would delete"):
        RunFolder(tmp_path).check(overwrite=True)
    assert (tmp_path / "logs").is_dir()


def test_a_check_leaves_no_empty_folder(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    RunFolder(tmp_path / "a" / "b" / "c").check()
    assert (tmp_path / "a").is_dir() and not list((tmp_path / "a").iterdir())
    RunFolder(tmp_path / "a").check()
    assert (tmp_path / "a").is_dir(), "it was there before"
    with RunFolder(tmp_path / "a" / "b") as folder:
        folder.save_config({})
    assert (tmp_path / "a" / "b" / "config.yaml").is_file()


@pytest.mark.parametrize(
    ("number", "message"),
    [(errno.ENOSPC, "disk is full"), (errno.EROFS, "read-only"), (errno.EACCES, "may not write there"),
     (errno.ENOENT, "No such file or directory; check the path and the disk, or choose another --output_dir")],
)  # fmt: skip
def test_a_disk_that_refuses_is_one_sentence(
    number: int, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_json(tmp_path / "x.json", {"old": 1})

    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(RunError, match=f"Cannot write .*: .*{message}"):
        write_json(tmp_path / "x.json", {"new": 1})
    monkeypatch.undo()
    assert read_json(tmp_path / "x.json") == {"old": 1}
    assert os.listdir(tmp_path) == ["x.json"]


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="is a file; give a folder"):
        RunFolder(tmp_path / "file").check()
    with pytest.raises(RunError, match="part of the path is a file"):
        RunFolder(tmp_path / "file" / "run").check()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_really_full_device_is_one_sentence(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.metrics.symlink_to("/dev/full")
    with pytest.raises(RunError, match="disk is full"):
        folder.append_metrics({"iteration": 1})


def test_a_write_that_fails_leaves_nothing(tmp_path: Path) -> None:
    def fail(path: Path) -> None:
        path.write_text("half")
        raise KeyError("half way")

    with pytest.raises(KeyError):
        write_atomic(tmp_path / "x", fail)
    assert os.listdir(tmp_path) == []


def test_files_get_ordinary_permissions(tmp_path: Path) -> None:
    write_json(tmp_path / "x.json", 1)
    (tmp_path / "y.json").write_text("1")
    assert stat.S_IMODE((tmp_path / "x.json").stat().st_mode) == stat.S_IMODE((tmp_path / "y.json").stat().st_mode)


def test_metrics_are_rewound_and_a_cut_line_is_dropped(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    for iteration in range(1, 5):
        folder.append_metrics({"iteration": iteration, "reward_mean": 0.1 * iteration})
    with open(folder.metrics, "a") as file:
        file.write('{"iteration": 5, "rew')
    before = folder.metrics.read_text().splitlines()
    assert [line["iteration"] for line in folder.read_metrics()] == [1, 2, 3, 4]
    folder.rewind_metrics(2)
    assert folder.metrics.read_text().splitlines() == before[:2]


def test_nan_never_reaches_a_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        RunFolder(tmp_path).append_metrics({"iteration": 1, "reward_mean": float("nan")})


def test_a_failed_batch_is_kept(tmp_path: Path) -> None:
    nan = torch.full((3, 4, 4), float("nan"))
    path = RunFolder(tmp_path).save_failed_batch("iteration_000003", [nan], [torch.zeros(3, 4, 4)], [{"key": "a"}], "Traceback …")
    assert sorted(p.name for p in path.iterdir()) == ["000_edit.png", "000_source.png", "batch.json", "traceback.txt"]
    assert (path / "traceback.txt").read_text() == "Traceback …"


def test_one_folder_takes_one_run_at_a_time(tmp_path: Path) -> None:
    with RunFolder(tmp_path) as folder:
        folder.check()  # its own lock is no obstacle
        with pytest.raises(RunError, match="Another run is writing"):
            RunFolder(tmp_path).check(resume=True)
        with RunFolder(tmp_path, owner=False):
            pass
    RunFolder(tmp_path).check()
    assert os.listdir(tmp_path) == []


def test_the_lock_ends_with_its_process(tmp_path: Path) -> None:
    code = (
        "import os, sys; from rl_recipes.runs import RunFolder\n"
        "with RunFolder(sys.argv[1]): print('locked', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None and other.stdout.readline() == "locked\n"
        with pytest.raises(RunError, match="Another run is writing"):
            RunFolder(tmp_path).check()
        other.kill()
    RunFolder(tmp_path).check()


def test_hidden_files_do_not_make_a_folder_used(tmp_path: Path) -> None:
    for name in (".DS_Store", ".writable", ".tmp-abc"):
        (tmp_path / name).write_text("")
    RunFolder(tmp_path).check()
    assert os.listdir(tmp_path) == [".DS_Store"]


def test_a_line_that_is_no_iteration_ends_the_metrics(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.append_metrics({"iteration": 1})
    for line in ("[1]", "{}", '{"iteration": "2"}', "7"):
        folder.metrics.write_text('{"iteration": 1}\n' + line + '\n{"iteration": 3}\n')
        assert folder.read_metrics() == [{"iteration": 1}]


def test_a_name_that_is_too_long_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="the name is too long"):
        RunFolder(tmp_path / ("x" * 300)).check()
