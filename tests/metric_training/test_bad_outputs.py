"""Places that cannot be written to, and errors of the disk, in one sentence."""

from __future__ import annotations

import errno
import tempfile
from pathlib import Path
from typing import Any

import pytest

from metric_training.evaluation.report import check_outputs
from tpips_reward import TPIPSError


def test_outputs_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_outputs(tmp_path / "new" / "folder", tmp_path / "file.json")
    (tmp_path / "file").touch()
    file, folder = "cannot be a folder, since .*file is a file", "is a folder; name a file"
    for arguments, message in (
        ((tmp_path / "file",), file), ((tmp_path / "file" / "below",), file), ((None, tmp_path / "file" / "x.json"), file),
        ((None, tmp_path), folder),
    ):  # fmt: skip
        with pytest.raises(TPIPSError, match=f"{message}.* for the output"):
            check_outputs(*arguments)  # type: ignore[arg-type]
    monkeypatch.setattr("os.access", lambda path, mode: False)  # root may write everywhere
    with pytest.raises(TPIPSError, match=f"{tmp_path} may not be written to; mend its rights"):
        check_outputs(tmp_path / "new")


def test_errors_of_the_disk_name_the_file_and_not_a_temporary_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tpips_reward.files import write_atomic

    def full(temporary: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match=r"No space left on device: .*report\.md"):
        write_atomic(tmp_path / "report.md", full)

    def refused(dir: Path, **_: Any) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", f"{dir}/.tmp-x")

    monkeypatch.setattr(tempfile, "mkstemp", refused)
    with pytest.raises(PermissionError) as found:
        write_atomic(tmp_path / "report.md", full)
    assert found.value.filename == str(tmp_path / "report.md")
