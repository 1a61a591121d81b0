"""Uploading to the Hub, with a client that keeps what it is given."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import CommitOperationAdd
from jobs import settings

from rl_recipes import grpo_edit, hub
from rl_recipes.runs import RunError

Flags = Callable[..., list[str]]


@pytest.fixture
def uploads(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What was uploaded: the repository's options, and the content of each file."""
    seen: list[dict[str, Any]] = []

    class Client:
        def create_repo(self, name: str, **options: Any) -> str:
            seen.append({"name": name, **options})
            return f"https://hub.example/{name}"

        def create_commit(self, repo_id: str, operations: list[CommitOperationAdd], *, commit_message: str) -> None:
            if repo_id == "me/refused":
                raise ConnectionError("no network")
            seen[-1]["files"] = {o.path_in_repo: o.path_or_fileobj for o in operations}

    monkeypatch.setattr(hub, "HfApi", Client)
    monkeypatch.setattr(hub.huggingface_hub, "get_token", lambda: "token")
    return seen


def test_a_run_is_uploaded_with_its_card(flags: Flags, tmp_path: Path, uploads: list[dict[str, Any]]) -> None:
    run = tmp_path / "run"
    assert grpo_edit.main(flags(run, "--push_to_hub", hub_model_id="me/lora", max_steps=1)) == 0
    (upload,) = uploads
    assert upload["name"] == "me/lora" and upload["private"] is True and upload["exist_ok"] is True
    files = upload["files"]
    assert {"README.md", "pytorch_lora_weights.safetensors", "report.html", "samples/grid_00.png"} <= files.keys()
    assert files["summary.json"] == str(run / "summary.json"), "what lies on the disk is not copied"
    assert files["pytorch_lora_weights.safetensors"] == str(run / "adapter" / "pytorch_lora_weights.safetensors")
    card = files["README.md"].decode()
    assert card.startswith("---\nlibrary_name: diffusers\n") and 'pipe.load_lora_weights("me/lora")' in card
    assert f"| drift | {json.loads((run / 'summary.json').read_text())['before']['drift']:.4f} |" in card


def test_an_upload_that_fails_costs_no_run(
    flags: Flags, tmp_path: Path, uploads: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    assert grpo_edit.main(flags(run, "--push_to_hub", hub_model_id="me/refused", max_steps=1, eval_samples=0)) == 0
    assert "Not uploaded: me/refused could not be uploaded (ConnectionError: no network)" in capsys.readouterr().out
    assert (run / "adapter" / "pytorch_lora_weights.safetensors").is_file()


def test_a_file_that_cannot_be_read_costs_no_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    (tmp_path / "adapter").mkdir()
    monkeypatch.setattr(hub, "card", lambda *_: "")
    monkeypatch.setattr(hub, "CommitOperationAdd", refuse)
    with pytest.raises(RunError, match=r"me/lora could not be uploaded \(OSError: .*Input/output error\)"):
        hub.push(tmp_path, {}, settings(push_to_hub=True, hub_model_id="me/lora"))


def test_without_a_login_nothing_is_begun(
    flags: Flags, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(hub.huggingface_hub, "get_token", lambda: None)
    assert grpo_edit.main(flags(tmp_path / "run", "--push_to_hub", hub_model_id="me/lora")) == 2
    assert "--push_to_hub needs a login" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
