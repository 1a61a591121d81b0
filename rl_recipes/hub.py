"""Uploading a finished run to the Hugging Face Hub: adapter, card, report, figures and samples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import huggingface_hub
from huggingface_hub import CommitOperationAdd, HfApi

from rl_recipes.config import Arguments, ConfigError
from rl_recipes.runs import RunError

#: What is uploaded of the run's folder beside the content of ``adapter/``.
FILES = ("summary.json", "config.yaml", "metrics.jsonl", "curves.png", "report.html", "samples")


def check_login(args: Arguments) -> None:
    """Refuses --push_to_hub without a login, before hours are spent.

    Raises:
        ConfigError: there is no token.
    """
    if args.run.push_to_hub and huggingface_hub.get_token() is None:
        raise ConfigError("--push_to_hub needs a login: run `hf auth login` once, or set HF_TOKEN.")


def push(folder: Path, summary: dict[str, Any], args: Arguments) -> str:
    """Uploads a run's results in one commit; returns the repository's address.

    Raises:
        RunError: a file cannot be read, or the Hub refuses or cannot be reached.
    """
    name = args.run.hub_model_id
    assert name is not None
    try:  # from where they lie: all weights of a transformer are tens of gigabytes
        files = [CommitOperationAdd("README.md", card(summary, args).encode())]
        for root, paths in ((folder / "adapter", [folder / "adapter"]), (folder, [folder / part for part in FILES])):
            found = (file for path in paths for file in (path, *sorted(path.rglob("*"))) if file.is_file())
            files += [CommitOperationAdd(file.relative_to(root).as_posix(), file) for file in found]
        api = HfApi()
        address = api.create_repo(name, private=args.run.hub_private, exist_ok=True)
        api.create_commit(name, files, commit_message=f"{summary['recipe']}, {summary['reward']}")
    except Exception as error:  # the client's errors are of many kinds, and each means that it was not uploaded
        reason = " ".join(str(error).split())[:200]
        raise RunError(
            f"{name} could not be uploaded ({type(error).__name__}: {reason}); everything is in {folder}, and "
            "`hf upload` takes it from there."
        ) from error
    return str(address)


def card(summary: dict[str, Any], args: Arguments) -> str:
    """The model card: what was trained how, how to load it, and its figures."""
    base = "" if summary["editor"] == "builtin" or Path(summary["editor"]).exists() else f"base_model: {summary['editor']}\n"
    full = args.editor.train == "full"
    tags = "\n".join(f"- {tag}" for tag in ("image-to-image", "diffusers", "tpips-reward", *(() if full else ("lora",))))
    load = "transformer = <the transformer's class>.from_pretrained(\"%s\", subfolder=\"transformer\")" if full else (
        'pipe.load_lora_weights("%s")'
    )  # fmt: skip
    metric = f" (`{summary['metric']}`)" if summary["metric"] else ""
    rows = [
        f"| {measure} | {before:.4f} | {after:.4f} |"
        for measure, after in summary["after"].items()
        if after is not None and (before := summary["before"].get(measure)) is not None
    ]
    table = "\n".join(["| measure | before | after |", "|---|---|---|", *rows])
    what = "held-out edits" if summary["held_out"] else "edits that it was trained on"
    return (
        f"---\nlibrary_name: diffusers\n{base}tags:\n{tags}\n---\n\n"
        f"# {args.run.hub_model_id}\n\n"
        f"`{summary['editor']}` fine-tuned with `{summary['recipe']}` of tpips-reward, rewarded by `{summary['reward']}`"
        f"{metric}, {summary['iterations']} iterations, seed {summary['seed']}.\n\n"
        f"```python\n{load % args.run.hub_model_id}\n```\n\n"
        f"## {summary['evaluated']} {what}, same noise before and after\n\n{table}\n\n"
        "`report.html` has curves, samples, scores by aspect and all settings.\n"
    )
