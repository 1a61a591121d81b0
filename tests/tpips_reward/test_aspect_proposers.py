"""Aspects from models: what an answer must look like, a tiny local model, a local endpoint, and what is kept of it all."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from chat_server import Server, reply, serving
from evaluation_files import read_lines, write_edits, write_lines
from fake_metrics import RegionMetric
from PIL import Image

import tpips_reward.cli
from tpips_reward.aspects import (
    ModelProposer,
    ProposalError,
    Request,
    RuleProposer,
    add_entries,
    parse_proposer,
    propose,
    read_entries,
)
from tpips_reward.aspects.proposers import parse_answer
from tpips_reward.errors import TPIPSError
from tpips_reward.evaluation import Settings, evaluate, read_manifest
from tpips_reward.evaluation.proposals import propose_aspects

GOOD = "CHANGE\n1. car color\nKEEP\n1. sky brightness\n2. road texture\n3. car shape\n4. camera viewpoint\n"
TARGET, PRESERVE = ("car color",), ("sky brightness", "road texture", "car shape", "camera viewpoint")


# --- answers


@pytest.mark.parametrize(
    "answer",
    [
        GOOD,
        (
            "<think>CHANGE\n1. nothing</think>\n**CHANGE:**\n- **car color**\n\n## Keep\n* sky brightness.\n"
            '* "road texture"\n3) car shape\n4. [camera viewpoint]\nThat is all.'
        ),
    ],
)
def test_answers_that_follow_the_rules(answer):
    assert parse_answer(answer) == (TARGET, PRESERVE)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ("", "no list CHANGE"),
        (GOOD.replace("KEEP", "STAY"), "no list KEEP"),
        ("KEEP\n" + GOOD.split("KEEP\n")[1], "no list CHANGE"),
        (GOOD.replace("car color", "car color and shape"), "'and'"),
        (GOOD.replace("car color", "color (car)"), r"holds '\('"),
        (GOOD.replace("car color", "the color of the big car"), None),
        (GOOD.replace("car color", "the color of the big old car"), "too long"),
        (GOOD.replace("car shape", "Car color"), "both"),
        (GOOD.replace("car shape", "Road texture"), "twice"),
        (GOOD.replace("3. car shape\n", ""), "4 aspects, but at least 5"),
        (GOOD + "".join(f"{n}. thing {letter}\n" for n, letter in enumerate("abcdef", 5)), "11 aspects are too many"),
        (GOOD.replace("KEEP", "2. a\n3. b\n4. c\nKEEP"), "CHANGE has 4"),
    ],
)
def test_answers_that_break_the_rules(answer, message):
    if message is None:
        assert parse_answer(answer)[0] == ("the color of the big car",)
    else:
        with pytest.raises(TPIPSError, match=message):
            parse_answer(answer)


def test_a_mistake_is_named_and_asked_for_again():
    asked: list[str] = []

    def ask(question: str, image: Image.Image | None) -> str:
        asked.append(question)
        return GOOD if len(asked) == 3 else GOOD.replace("car shape", "car and road")

    found = ModelProposer("m", ask)(Request("make the {car} red"))
    assert (found.target, found.preserve, found.by, found.kind) == (TARGET, PRESERVE, "m", "color")
    assert "make the {car} red" in asked[0] and "could not be used" not in asked[0] and "'and'" in asked[1]
    with pytest.raises(ProposalError, match="no usable aspects in 2 answers; the last: there is no list"):
        ModelProposer("m", lambda question, image: "no", attempts=2)(Request("x"))
    assert RuleProposer()(Request("make the car red")) == propose("make the car red")


@pytest.mark.parametrize(
    "text", ["", "x", "vlm:", "endpoint:m", "endpoint:m@ftp://x", "endpoint:@http://x", "endpoint:m@http://u:p@x/v1"]
)
def test_names_of_proposers(text):
    with pytest.raises(TPIPSError, match="no proposer|no address|name of a model"):
        parse_proposer(text)
    assert parse_proposer("rules")().name == "rules"
    assert parse_proposer("endpoint:a@b@http://localhost:1/v1")().name == "endpoint:a@b"


# --- a vision-language model of transformers, tiny and random


@pytest.fixture(scope="module")
def tiny_vlm(parity: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import AutoConfig, AutoModelForImageTextToText, AutoProcessor

    folder = tmp_path_factory.mktemp("vlm")
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(parity / "backbone"))
    model.save_pretrained(folder)
    AutoProcessor.from_pretrained(parity / "backbone").save_pretrained(folder)
    return folder


def test_a_local_model_sees_image_and_instruction(tiny_vlm, monkeypatch):
    from tpips_reward.aspects.vlm import VisionLanguageModel

    model = VisionLanguageModel(str(tiny_vlm), device="cpu", max_new_tokens=4)
    image = Image.new("RGB", (64, 48), (200, 30, 30))
    assert isinstance(model.ask("hello", image), str) and model.ask("hello", image) == model.ask("hello", image)
    with pytest.raises(ProposalError, match="no usable aspects"):
        ModelProposer("vlm", model.ask, attempts=1)(Request("make the car red", image=image))

    seen: dict[str, Any] = {}

    def generate(**inputs: Any) -> torch.Tensor:
        seen.update(inputs)
        said = model.processor.tokenizer(GOOD, return_tensors="pt")["input_ids"]
        return torch.cat([inputs["input_ids"], said], dim=1)

    monkeypatch.setattr(model.model, "generate", generate)
    found = ModelProposer("vlm", model.ask)(Request("make the car red", image=image))
    assert (found.target, found.preserve) == (TARGET, PRESERVE)
    assert "make the car red" in model.processor.tokenizer.decode(seen["input_ids"][0])
    assert seen["pixel_values"].abs().sum() > 0 and seen["do_sample"] is False


def test_a_model_that_is_not_there():
    with pytest.raises(TPIPSError, match="cannot be loaded"):
        parse_proposer("vlm:/nothing/here")()


# --- an endpoint


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Server]]:
    for name in ("TPIPS_API_KEY", "OPENAI_API_KEY", "http_proxy", "HTTP_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with serving() as start:
        yield start


def test_an_endpoint_proposes_from_image_and_instruction(serve):
    server = serve(reply(GOOD))
    image = Image.new("RGB", (6, 4), (255, 0, 0))
    found = parse_proposer(f"endpoint:some/model@{server.url}")()(Request("make the car red", image=image))
    assert (found.target, found.by) == (TARGET, "endpoint:some/model")
    ((_, request),) = server.requests
    picture, text = request["messages"][0]["content"]
    assert request["model"] == "some/model" and "make the car red" in text["text"]
    with Image.open(io.BytesIO(base64.b64decode(picture["image_url"]["url"].partition(",")[2]))) as sent:
        assert sent.size == (6, 4)


# --- in an evaluation


class Scripted:
    """A proposer that counts what it is asked, and finds nothing for some instructions."""

    name = "scripted"
    needs_image = True

    def __init__(self, fails: str = "", stops: int = 99) -> None:
        self.requests: list[Request] = []
        self.fails, self.stops = fails, stops

    def __call__(self, request: Request):
        if len(self.requests) == self.stops:
            raise KeyboardInterrupt
        self.requests.append(request)
        if request.instruction == self.fails:
            raise ProposalError("nothing usable")
        return ModelProposer(self.name, lambda question, image: GOOD)(request)


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    """Six edits that name no aspects."""
    manifest = write_edits(tmp_path / "data", 6)
    lines = [{k: v for k, v in line.items() if k not in ("preserve", "target")} for line in read_lines(manifest)]
    for index, line in enumerate(lines):
        line["instruction"] = f"make car {index} red"
    return write_lines(manifest, lines)


def test_proposals_are_kept_edited_and_asked_for_once(bare, tmp_path):
    path = tmp_path / "aspects.jsonl"
    first = Scripted(fails="make car 2 red")
    found = propose_aspects(read_manifest(bare), path, lambda: first)
    assert found.origins == {"scripted": 5, "instruction": 1}
    assert [problem.kind for problem in found.dataset.problems] == ["failed_proposal"]
    assert found.dataset.rows[0].target == TARGET and found.dataset.rows[0].preserve == PRESERVE
    assert all(request.image is not None and request.image.size == (24, 24) for request in first.requests)

    entries = read_lines(path)
    entries[1]["target"] = ["wheel color"]
    entries[3]["instruction"] = "something else"
    write_lines(path, entries)
    second = Scripted()
    found = propose_aspects(read_manifest(bare), path, lambda: second)
    # the one that failed, and the one whose instruction is another
    assert [request.instruction for request in second.requests] == ["make car 2 red", "make car 3 red"]
    assert found.origins == {"scripted": 5, "edited": 1} and found.dataset.rows[1].target == ("wheel color",)

    # another proposer replaces what the first proposed, and never what a person wrote
    found = propose_aspects(read_manifest(bare), path)
    assert found.origins == {"instruction": 5, "edited": 1} and found.dataset.rows[1].target == ("wheel color",)
    assert found.made["000"].proposer == "rules" and read_lines(path)[0]["proposer"] == "scripted", "not written yet"
    add_entries(path, found.made)
    again = propose_aspects(read_manifest(bare), path)
    assert again.dataset.rows == found.dataset.rows and again.origins == found.origins


def test_what_the_rules_did_not_understand_is_a_guess(bare, tmp_path):
    lines = read_lines(bare)
    lines[1]["instruction"], lines[2]["instruction"], lines[3]["instruction"] = "asdf qwerty zxcv", "", "把汽车变成红色"
    for line in lines:
        line["category"] = "paint"
    lines[4] |= {"instruction": "asdf", "category": "color_alter"}
    write_lines(bare, lines)

    def guesses() -> list[str]:
        report = evaluate(read_manifest(bare), RegionMetric(), tmp_path / "r", settings=Settings(resamples=200), overwrite=True)
        problems = report["problems"]["list"]
        assert report["counts"]["rows_scored"] == 6 and {problem["kind"] for problem in problems} <= {"guessed_aspects"}
        assert not any(problem["left_out"] for problem in problems)
        assert all("a guess (to change: main subject appearance; to keep: " in problem["detail"] for problem in problems)
        return [problem["key"] for problem in problems]

    path = tmp_path / "r/aspects.jsonl"
    assert guesses() == ["001", "002", "003"]
    assert "| 3 | a row that the rules did not understand" in (tmp_path / "r/report.md").read_text()
    assert [entry["by"] for entry in read_lines(path)] == ["instruction", *["nothing"] * 3, "category", "instruction"]
    assert guesses() == ["001", "002", "003"], "as long as nobody has edited them"
    entries = read_lines(path)
    entries[1]["target"] = ["car color"]
    del entries[2]["mark"], entries[3]["by"]  # accepted as they are; of an older version
    write_lines(path, entries)
    assert guesses() == ["003"]
    assert [entry.get("by") for entry in read_lines(path)[:4]] == ["instruction", None, None, "nothing"]
    with pytest.raises(TPIPSError, match="did not understand the instruction '把汽车变成红色' of '003'.*correct them in aspects.jsonl"):
        evaluate(read_manifest(bare), RegionMetric(), tmp_path / "strict", settings=Settings(strict=True), aspects_file=path)
    lines[3]["category"] = "color_alter"
    write_lines(bare, lines)
    assert guesses() == [] and read_lines(path)[3]["by"] == "category", "now there is something to go by"


def test_corrections_made_while_the_metric_loads_stay(bare, tmp_path):
    path, seen = tmp_path / "r/aspects.jsonl", []

    def load() -> RegionMetric:
        seen.append(path.exists())
        path.write_text(json.dumps({"key": "elsewhere", "instruction": "of another evaluation", "target": ["sky"]}) + "\n")
        return RegionMetric()

    evaluate(read_manifest(bare), load, tmp_path / "r", settings=Settings(resamples=200))
    assert seen == [False] and [entry["key"] for entry in read_lines(path)][:2] == ["elsewhere", "000"]
    entries = read_lines(path)
    entries[1]["target"] = ["wheel color"]

    def correct() -> RegionMetric:
        write_lines(path, entries)
        return RegionMetric()

    evaluate(read_manifest(bare), correct, tmp_path / "r", settings=Settings(resamples=200), overwrite=True)
    assert read_lines(path) == entries
    # as another evaluation writes what it had read before the correction
    add_entries(path, {"000": replace(read_entries(path)["001"], instruction=entries[1]["instruction"])})
    assert read_lines(path)[1]["target"] == ["wheel color"]


def test_an_interruption_keeps_what_was_proposed(bare, tmp_path):
    path = tmp_path / "aspects.jsonl"
    with pytest.raises(KeyboardInterrupt):
        propose_aspects(read_manifest(bare), path, lambda: Scripted(stops=4))
    rest = Scripted()
    assert propose_aspects(read_manifest(bare), path, lambda: rest).origins == {"scripted": 6}
    assert len(rest.requests) == 2


def test_no_model_is_loaded_where_all_of_its_proposals_are_there(bare, tmp_path):
    path = tmp_path / "aspects.jsonl"
    propose_aspects(read_manifest(bare), path, lambda: Scripted())
    write_lines(path, [{**entry, "proposer": "vlm:/nothing/here"} for entry in read_lines(path)])
    make = parse_proposer("vlm:/nothing/here")
    assert propose_aspects(read_manifest(bare), path, make).origins == {"vlm:/nothing/here": 6}
    write_lines(path, read_lines(path)[1:])
    with pytest.raises(TPIPSError, match="nothing/here"):  # the model is loaded for the row that needs it
        propose_aspects(read_manifest(bare), path, make)


def test_a_proposer_is_made_only_where_aspects_are_missing(tmp_path):
    def make():
        raise AssertionError("no row needs it")

    propose_aspects(read_manifest(write_edits(tmp_path, 2)), None, make)


def test_the_command_with_an_endpoint(serve, bare, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tpips_reward.cli, "_load", lambda options: RegionMetric())
    server = serve(reply(GOOD))
    flags = ["evaluate", str(bare), "--output", str(tmp_path / "r"), "--resamples", "200", "--proposer"]
    assert tpips_reward.cli.main([*flags, f"endpoint:m@{server.url}"]) == 0
    report = json.loads((tmp_path / "r/report.json").read_text())
    assert report["aspect_origins"] == {"endpoint:m": 6} and report["rows"][0]["target"] == list(TARGET)
    server.answers = [(404, b"no such model", {})]
    assert tpips_reward.cli.main([*flags, f"endpoint:n@{server.url}", "--overwrite"]) == 2
    err = capsys.readouterr().err
    assert "refused the request for 'n' (status 404, no such model)" in err and len(err.strip().splitlines()) == 1
    assert tpips_reward.cli.main([*flags, "oracle", "--overwrite"]) == 2 and "no proposer" in capsys.readouterr().err


def test_an_edit_that_a_server_refuses_costs_that_edit_alone(serve, bare):
    server = serve(reply(None), (400, {"error": "filtered"}, {}), reply(""), reply(""), reply(""), reply(GOOD))
    found = propose_aspects(read_manifest(bare), None, parse_proposer(f"endpoint:m@{server.url}"))
    assert found.origins == {"instruction": 3, "endpoint:m": 3}
    assert [(problem.kind, problem.key) for problem in found.dataset.problems] == [
        ("failed_proposal", f"00{n}") for n in range(3)
    ]


def test_evaluate_takes_a_proposer(bare, tmp_path):
    report = evaluate(read_manifest(bare), RegionMetric(), tmp_path / "r", settings=Settings(resamples=200),
                      proposer=Scripted)  # fmt: skip
    assert report["aspect_origins"] == {"scripted": 6}
