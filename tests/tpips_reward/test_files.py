"""Places that cannot be written to, and errors of the disk, in one sentence."""

from __future__ import annotations

import errno
import tempfile
from pathlib import Path
from typing import Any

import pytest

from tpips_reward import TPIPSError
from tpips_reward.files import check_writable, write_atomic


def test_outputs_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_writable(tmp_path / "new" / "folder", tmp_path / "file.json")
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    file, folder = "cannot be a folder, since .*file is a file", "is a folder; name a file"
    link, name = "since .*link is a link to nothing", "has a name that no file can have"
    for arguments, message in (
        ((tmp_path / "file",), file), ((tmp_path / "file" / "below",), file), ((None, tmp_path / "file" / "x.json"), file),
        ((None, tmp_path), folder), ((tmp_path / "link",), link), ((tmp_path / "link" / "below",), link),
        ((tmp_path / ("ä" * 128),), name), ((tmp_path / "new" / ("x" * 256),), name), ((tmp_path / "a\0b",), name),
        ((None, tmp_path / "\ud800.json"), name),
    ):  # fmt: skip
        with pytest.raises(TPIPSError, match=f"{message}.* for the output"):
            check_writable(*arguments)  # type: ignore[arg-type]
    with monkeypatch.context() as patch:  # NTFS counts letters
        patch.setattr("os.name", "nt")
        check_writable(tmp_path / ("ä" * 255))
        for letters in ("ä" * 256, "\N{GRINNING FACE}" * 128):
            with pytest.raises(TPIPSError, match=name):
                check_writable(tmp_path / letters)
    monkeypatch.setattr("os.access", lambda path, mode: False)  # root may write everywhere
    with pytest.raises(TPIPSError, match=f"{tmp_path} may not be written to; mend its rights"):
        check_writable(tmp_path / "new")


def test_errors_of_the_disk_name_the_file_and_not_a_temporary_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
