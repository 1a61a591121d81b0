"""A whole evaluation: good and bad editors ranked right, the report's files, its folder, and the command."""

from __future__ import annotations

import csv
import json
import os
import re
import shutil
import subprocess
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path

import pytest
from evaluation_files import read_lines, save, write_edits, write_lines
from fake_metrics import RegionMetric

import tpips_reward.cli
from tpips_reward.calibration import Calibration, MonotoneMap, probe_answers
from tpips_reward.errors import TPIPSError
from tpips_reward.evaluation import Settings, evaluate, read_manifest, read_votes
from tpips_reward.evaluation.controls import COPY, NOISE, OTHER
from tpips_reward.evaluation.folder import REPORT_NAMES
from tpips_reward.evaluation.html import esc, fill, p_value
from tpips_reward.evaluation.report import write_report
from tpips_reward.scenes import Scene

FAST = Settings(resamples=300, examples=2)
VOID = {"meta", "input", "img", "br", "line", "rect", "link", "hr"}


class Page(HTMLParser):
    """The page as a browser takes it apart; elements must close in the order in which they opened."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: Counter[str] = Counter()
        self.ids: list[str] = []
        self.texts: list[str] = []
        self.addresses: list[str] = []
        self.handlers: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        if tag not in VOID:
            self.open.append(tag)
        for name, value in attrs:
            self.ids += [value or ""] if name == "id" else []
            self.addresses += [value or ""] if name in ("src", "href", "action", "data") else []
            self.handlers += [name] if name.startswith("on") else []

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("script", "style"):
            self.texts.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.texts).split())


@pytest.fixture
def manifest(tmp_path: Path) -> Path:
    return write_edits(tmp_path / "data")


def run(manifest: Path, output: Path, **options):
    options.setdefault("settings", FAST)
    return evaluate(read_manifest(manifest), RegionMetric(), output, metric_name="region", **options)


def test_good_and_bad_editors_are_ranked_right(manifest, tmp_path):
    report = run(manifest, tmp_path / "report", settings=Settings(resamples=1000))
    entries = {entry["model"]: entry for entry in report["models"]}
    assert [entry["model"] for entry in report["models"]] == ["good", "drifting", "destroying", COPY, OTHER, NOISE]
    kept = [entries[model]["preservation"]["mean"] for model in ("good", "drifting", "destroying")]
    assert kept[0] > 0.95 and 0.5 < kept[1] < 0.8 and kept[2] < 0.5
    assert entries["good"]["change"]["mean"] > 0.9 and entries[NOISE]["change"]["mean"] == 1.0
    # a copy keeps everything and changes nothing
    assert (entries[COPY]["preservation"]["mean"], entries[COPY]["overall"]["mean"]) == (1.0, 0.0)
    pair = next(entry for entry in report["comparisons"] if entry["measure"] == "overall" and
                {entry["first"], entry["second"]} == {"good", "drifting"})  # fmt: skip
    assert pair["difference"]["high"] < 0 and pair["p_holm"] < 0.05  # drifting - good
    assert pair["losses"] == 1.0 and pair["rows_needed"] <= 12 == pair["difference"]["count"]
    assert {entry["category"]: entry["rows"] for entry in report["categories"]} == {"color": 6, "paint": 6}
    roles = {(entry["role"], entry["aspect"]): entry["cells"]["good"] for entry in report["aspects"]}
    assert set(roles) == {("preserve", "background"), ("target", "object color")}
    assert roles["target", "object color"]["count"] == 12
    assert report["counts"]["outputs_scored"] == report["counts"]["outputs_expected"] == 36


def test_half_a_model_is_compared_on_the_rows_that_it_has(manifest, tmp_path):
    for index in range(0, 12, 2):
        (manifest.parent / f"drifting/{index:03d}.png").unlink()
    report = run(manifest, tmp_path / "report")
    entry = next(entry for entry in report["models"] if entry["model"] == "drifting")
    assert (entry["expected"], entry["scored"], entry["missing"]) == (12, 6, 6)
    assert report["counts"]["rows_all_models_have"] == 6 and report["problems"]["counts"] == {"missing_output": 6}
    for other in report["models"]:
        assert other["overall_common"]["count"] == 6
    assert {entry["difference"]["count"] for entry in report["comparisons"] if "drifting" in entry.values()} == {6}
    assert "6 of 12" in Page((tmp_path / "report/report.html").read_text()).text


def test_the_same_input_gives_the_same_report(manifest, tmp_path):
    first, second = (run(manifest, tmp_path / name) for name in ("a", "b"))
    for report in (first, second):
        del report["work"]
    assert first == second
    for name in set(REPORT_NAMES) - {"report.html", "report.json"}:
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_every_file_tells_the_same(manifest, tmp_path):
    report = run(manifest, tmp_path / "report")
    folder = tmp_path / "report"
    assert json.loads((folder / "report.json").read_text()) == json.loads(json.dumps(report))
    tables = {name: list(csv.DictReader((folder / name).open())) for name in REPORT_NAMES if name.endswith(".csv")}
    good = next(entry for entry in report["models"] if entry["model"] == "good")
    line = next(row for row in tables["summary.csv"] if row["model"] == "good")
    assert float(line["overall_mean"]) == good["overall"]["mean"] and line["scored"] == "12"
    assert len(tables["rows.csv"]) == 12 * 6 and len(tables["aspects.csv"]) == 12 * 6 * 2
    mean = sum(float(row["overall"]) for row in tables["rows.csv"] if row["model"] == "good") / 12
    assert mean == pytest.approx(good["overall"]["mean"])
    shown = f"{good['overall']['mean']:.3f} ({good['overall']['low']:.3f} to {good['overall']['high']:.3f})"
    assert "| good | 12 of 12 |" in (folder / "report.md").read_text() and shown in (folder / "report.md").read_text()
    page = Page((folder / "report.html").read_text()).text
    assert f"{good['overall']['mean']:.3f} [" in page
    gaps = tables["differences.csv"]
    assert len(gaps) == 9 + 3 * (2 * 3 + 2) and Counter(row["by"] for row in gaps) == {
        "all": 9, "category": 18, "preserve": 3, "target": 3}  # fmt: skip
    entry = next(e for e in report["differences"] if (e["by"], e["first"], e["second"]) == ("preserve", "drifting", "good"))
    row = next(r for r in gaps if (r["by"], r["first"], r["second"]) == ("preserve", "drifting", "good"))
    kept = {m: [r["outputs"][m]["preserve"]["background"] for r in report["rows"]] for m in ("drifting", "good")}
    mean = sum(a - b for a, b in zip(kept["drifting"], kept["good"], strict=True)) / 12
    assert float(row["difference_mean"]) == entry["difference"]["mean"] == pytest.approx(mean)
    assert (row["name"], row["p_holm"], row["difference_count"]) == ("background", str(entry["p_holm"]), "12")
    shown = f"{mean:.3f} ({entry['difference']['low']:.3f} to {entry['difference']['high']:.3f})"
    assert f"| aspect to keep: similarity | background | drifting − good | {shown} |" in (folder / "report.md").read_text()
    assert f"background drifting − good {mean:.3f} [" in page


def test_the_markdown_has_aspects_and_examples(manifest, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    report = run(Path("data/edits.jsonl"), Path("out/report"))
    text = Path("out/report/report.md").read_text()
    for role, aspect, title in (("preserve", "background", "## Aspects to keep"), ("target", "object color", "## Aspects to change")):
        entry = next(e for e in report["aspects"] if e["role"] == role)
        line = next(line for line in text.partition(title)[2].splitlines() if line.startswith(f"| {aspect} | 12 |"))
        means = [f"{entry['cells'][model['model']]['mean']:.3f}" for model in report["models"]]
        assert [cell.split(" ")[1] for cell in line.split("|")[3:-1]] == means
    examples = text.partition("## Best and worst")[2]
    for model in ("good", "drifting", "destroying"):
        ranked = sorted(report["rows"], key=lambda row: row["outputs"][model]["overall"])
        for reason, row in (("worst", ranked[0]), ("best", ranked[-1])):
            head, _, rest = examples.partition(f"\n### {row['key']}: ")[2].partition("\n\n")
            assert f"{reason} of {model}" in head and rest.startswith(row["instruction"] + "\n")
            output = row["outputs"][model]
            scores = [output[name] for name in ("overall", "change", "preservation")]
            scores += [output["preserve"]["background"], output["target"]["object color"]]
            cells = " | ".join(f"{score:.3f}" for score in scores)
            assert f"| {model} | {cells} | ../../data/{model}/{row['key']}.png |" in rest.partition("\n### ")[0]
            assert (tmp_path / f"out/report/../../data/{model}/{row['key']}.png").is_file()
            assert f"Category {row['category']}, source ../../data/in/{row['key']}.png" in rest
    assert "data:image" not in text
    run(Path("data/edits.jsonl"), Path("none"), settings=Settings(resamples=300, examples=0))
    assert "## Best and worst" not in Path("none/report.md").read_text()


def test_names_that_utf8_cannot_hold_reach_every_file(manifest, tmp_path):
    lines = read_lines(manifest)
    odd = manifest.parent / os.fsdecode(b"good/odd\xff.png")
    try:
        shutil.copy(manifest.parent / "good/000.png", odd)
    except OSError:
        pytest.skip("this file system takes names in UTF-8 alone")
    lines[0]["outputs"]["good"] = os.fsdecode(b"good/odd\xff.png")
    run(write_lines(manifest, lines), tmp_path / "report", settings=Settings(resamples=300, examples=12))
    assert "data/good/odd?.png |" in (tmp_path / "report/report.md").read_text()


# --- the page


def test_the_page_is_whole_and_needs_nothing_else(manifest, tmp_path):
    run(manifest, tmp_path / "report")
    text = (tmp_path / "report/report.html").read_text()
    page = Page(text)
    assert len(page.ids) == len(set(page.ids))
    targets = {address[1:] for address in page.addresses if address.startswith("#")}
    assert targets <= set(page.ids)
    assert all(address.startswith(("#", "data:image/jpeg;base64,")) for address in page.addresses)
    assert "http://" not in text and "https://" not in text and "url(" not in text and "@import" not in text
    assert page.tags["details"] >= 4 and page.tags["img"] == page.tags["details"] * 4
    assert page.tags["svg"] == 6 * 3 and "prefers-color-scheme: dark" in text and 'data-theme="dark"' in text


HOSTILE = '<script>alert("x")</script><img src=x onerror=alert(1)> \'"& {{summary}} | `*_'


def test_hostile_text_stays_text(tmp_path):
    save(Scene(), tmp_path / "in.png")
    save(Scene(shape="star"), tmp_path / "out<b>.png")
    row = {"key": HOSTILE.replace("/", "|").replace("\\", ""), "source": "in.png", "instruction": HOSTILE + "\x00\x1b",
           "category": HOSTILE, "preserve": ["background <i>"], "target": ["shape"],
           "outputs": {f"model {HOSTILE}": "out<b>.png", "none": None}}  # fmt: skip
    manifest = write_lines(tmp_path / "edits.jsonl", [row])
    run(manifest, tmp_path / "report")
    text = (tmp_path / "report/report.html").read_text()
    page = Page(text)
    assert page.tags["script"] == 1 and page.handlers == [] and page.tags["b"] > 0 == page.tags["i"]
    assert HOSTILE in " ".join(page.texts) and "{{" in page.text and "\x00" not in text and "\x1b" not in text
    markdown = (tmp_path / "report/report.md").read_text()
    assert "<script" not in markdown.replace("\\<script", "")
    heads = [line.count(" | ") for line in markdown.splitlines() if line.startswith("| ")]
    assert all(count > 0 for count in heads)


def test_filling_in_happens_once():
    assert fill("{{a}} {{b}}", {"a": "{{b}}", "b": "x"}) == "{{b}} x"
    assert esc("<\"'&\ud800\x00>") == "&lt;&quot;&#x27;&amp;\ufffd\ufffd&gt;"


def test_the_pages_script_sorts_and_filters(manifest, tmp_path):
    node = shutil.which("node")
    if node is None:
        pytest.skip("no node on this machine; the page's script is run by it")
    run(manifest, tmp_path / "report")
    script = re.search(r"<script>(.*)</script>", (tmp_path / "report/report.html").read_text(), re.DOTALL)
    assert script is not None
    (tmp_path / "page.cjs").write_text(script[1])
    (tmp_path / "check.cjs").write_text("""
      const page = require("./page.cjs");
      const head = () => ({ state: "none", getAttribute() { return this.state; },
        setAttribute(_, s) { this.state = s; } });
      const row = (name, value) => ({ cells: [{ dataset: {}, textContent: name }, { dataset: { number: value } }] });
      const body = { rows: [row("b10", "0.5"), row("b9", ""), row("a", "-1e-05"), row("c", "2")] };
      body.append = (...rows) => { body.rows = rows; };
      const table = { tHead: { rows: [{ cells: [head(), head()] }] }, tBodies: [body] };
      const names = () => body.rows.map((r) => r.cells[0].textContent).join(" ");
      const seen = [];
      for (const column of [1, 1, 0, 0]) { page.sortTable(table, column); seen.push(names()); }
      seen.push(page.matches("Make the CAR red", "red make"), page.matches("car", "bus"));
      console.log(JSON.stringify(seen));
    """)
    out = subprocess.run([node, str(tmp_path / "check.cjs")], capture_output=True, text=True, check=True).stdout
    assert json.loads(out) == ["c b10 a b9", "a b10 c b9", "a b9 b10 c", "c b10 b9 a", True, False]


# --- aspects, votes


def test_rows_without_aspects_get_proposed_ones_that_can_be_corrected(manifest, tmp_path):
    lines = read_lines(manifest)
    for line in lines[:4]:
        del line["preserve"], line["target"]
    del lines[4]["target"]
    write_lines(manifest, lines)
    report = run(manifest, tmp_path / "report")
    assert report["aspect_origins"] == {"instruction": 5, "named": 7}
    assert [row["proposed"] for row in report["rows"]][:6] == [["preserve", "target"]] * 4 + [["target"], []]
    assert report["rows"][0]["target"][0].endswith(" color")
    assert "were proposed" in (tmp_path / "report/report.html").read_text()
    path = tmp_path / "report/aspects.jsonl"
    entries = read_lines(path)
    assert [entry["key"] for entry in entries] == ["000", "001", "002", "003", "004"]
    entries[0]["target"], entries[1]["instruction"] = ["object paint"], "something else"
    write_lines(path, [*entries, {**entries[0], "key": "gone"}])
    report = run(manifest, tmp_path / "report", overwrite=True)
    assert report["rows"][0]["target"] == ["object paint"] and report["aspect_origins"]["edited"] == 1
    assert report["problems"]["counts"] == {"stale_aspects": 2}
    assert [entry["key"] for entry in read_lines(path)][-1] == "gone"


def test_votes_are_counted(manifest, tmp_path):
    pair = {"first": "good", "second": "drifting"}
    votes = [{"key": f"{n:03d}", **pair, "vote": "second" if n == 0 else "first"} for n in range(12)]
    dataset = read_votes(write_lines(tmp_path / "votes.jsonl", votes), read_manifest(manifest))
    report = evaluate(dataset, RegionMetric(), tmp_path / "report", settings=FAST)
    assert report["votes"]["agreement"][0]["accuracy"] == pytest.approx(11 / 12)
    assert "Agreement with people" in (tmp_path / "report/report.html").read_text()


# --- the folder, and what stops an evaluation


def test_a_folder_that_exists_is_refused(manifest, tmp_path):
    folder = tmp_path / "report"
    run(manifest, folder)
    with pytest.raises(TPIPSError, match="holds a report; give --overwrite"):
        run(manifest, folder)
    (folder / "notes.txt").write_text("mine")
    again = run(manifest, folder, resume=True)
    assert again["work"]["pairs_measured"] == 0 and again["work"]["pairs_cached"] == 12 * 6 * 2
    assert run(manifest, folder, overwrite=True)["work"]["pairs_cached"] == 0
    assert (folder / "notes.txt").read_text() == "mine"
    scored = next((folder / "cache").glob("*/*.json"))
    mine = [folder / "cache/model.bin", scored.parent / "notes.json", folder / f"cache/mine/{scored.name}"]
    for path in mine:
        path.parent.mkdir(exist_ok=True)
        path.write_text("mine")
    stale = scored.with_name("0" * 32 + ".json")
    stale.write_text("{}")
    assert run(manifest, folder, overwrite=True)["work"]["pairs_cached"] == 0, "the cache is cleared"
    assert not stale.exists() and [path.read_text() for path in mine] == ["mine"] * 3, "and what is not ours stays"
    foreign = tmp_path / "foreign"
    (foreign / "cache").mkdir(parents=True)
    (foreign / "cache/model.bin").write_text("mine")
    with pytest.raises(TPIPSError, match=r"not empty \(cache\)"):
        run(manifest, foreign)
    with pytest.raises(TPIPSError, match="give one of the two"):
        run(manifest, folder, overwrite=True, resume=True)
    other = tmp_path / "other"
    other.mkdir()
    (other / "photo.png").write_text("mine")
    with pytest.raises(TPIPSError, match=r"not empty \(photo.png\)"):
        run(manifest, other)
    with pytest.raises(TPIPSError, match="is a file"):
        run(manifest, manifest)
    with pytest.raises(TPIPSError, match="cannot be used"):
        run(manifest, manifest / "report")


@pytest.mark.parametrize("how", ["overwrite", "resume"])
def test_files_that_no_evaluation_has_written_are_not_replaced(manifest, tmp_path, how):
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "rows.csv").write_text("mine")
    (folder / "report.json").write_text("[]")
    with pytest.raises(TPIPSError, match=r"report.json would be replaced, and no evaluation has written it"):
        run(manifest, folder, **{how: True})
    assert (folder / "rows.csv").read_text() == "mine"


def test_a_metric_that_does_not_load_costs_no_report(manifest, tmp_path):
    def load():
        raise TPIPSError("no such metric")

    folder = tmp_path / "report"
    run(manifest, folder)
    before = sorted(path.relative_to(folder) for path in folder.rglob("*"))
    with pytest.raises(TPIPSError, match="no such metric"):
        evaluate(read_manifest(manifest), load, folder, overwrite=True)
    assert sorted(path.relative_to(folder) for path in folder.rglob("*")) == before


def test_a_report_never_replaces_its_manifest(tmp_path, capsys):
    write_edits(tmp_path, 1)
    run(tmp_path / "edits.jsonl", tmp_path / "out")
    manifest = tmp_path / "out/rows.csv"
    manifest.write_text("key,source,instruction,output:good\n0,../in/000.png,paint it red,../good/000.png\n")
    before = manifest.read_bytes()
    assert tpips_reward.cli.main(["evaluate", str(manifest), "--output", str(manifest.parent), "--overwrite"]) == 2
    assert "which it is made from" in capsys.readouterr().err and manifest.read_bytes() == before


def test_an_evaluation_that_did_not_finish_says_so(manifest, tmp_path):
    class Stops(RegionMetric):
        def similarity_pairs(self, images, references, pairs, *, value_range=(0.0, 1.0)):
            if len(self.calls) == 3:
                raise TPIPSError("stopped")
            return super().similarity_pairs(images, references, pairs, value_range=value_range)

    options = Settings(batch_images=7, resamples=300)
    with pytest.raises(TPIPSError, match="stopped"):
        evaluate(read_manifest(manifest), Stops(), tmp_path / "report", metric_name="region", settings=options)
    assert not (tmp_path / "report/report.json").exists()
    with pytest.raises(TPIPSError, match="did not finish; give --resume"):
        run(manifest, tmp_path / "report")
    report = evaluate(read_manifest(manifest), RegionMetric(), tmp_path / "report", metric_name="region", resume=True)
    assert report["counts"]["rows_scored"] == 12


def test_a_p_value_is_never_shown_as_zero(manifest, tmp_path):
    assert [p_value(value) for value in (None, 1e-5, 0.0001, 0.25)] == ["–", "< 0.0001", "0.0001", "0.2500"]
    ends = {"mean": 0.1, "low": 0.1, "high": 0.1, "count": 9}
    entry = {"first": "a", "second": "b", "measure": "overall", "difference": ends, "sources": 9, "p": 1e-5, "p_holm": 2e-5,
             "wins": 1.0, "ties": 0.0, "losses": 0.0, "rows_needed": 2, "by": "category", "name": "c"}  # fmt: skip
    report = run(manifest, tmp_path / "report") | {"comparisons": [entry], "differences": [entry]}
    write_report(tmp_path / "report", report, [], 0)
    shown = [(tmp_path / "report" / name).read_text() for name in ("report.html", "report.md")]
    assert shown[0].count("&lt; 0.0001") == 4 == shown[1].count("< 0.0001") + shown[1].count("&lt; 0.0001")


def test_a_row_without_any_output_is_not_scored(manifest, tmp_path):
    for name in ("good", "drifting", "destroying"):
        (manifest.parent / name / "000.png").unlink()
    counts = run(manifest, tmp_path / "report")["counts"]
    assert (counts["rows"], counts["rows_scored"], counts["rows_left_out"]) == (12, 11, 1)


def test_nothing_to_score(manifest, tmp_path):
    loaded = []
    for name in ("good", "drifting", "destroying"):
        shutil.rmtree(manifest.parent / name)
    with pytest.raises(TPIPSError, match="no output that can be scored. The first of 36 problems: .*does not exist"):
        evaluate(read_manifest(manifest), lambda: loaded.append(1) or RegionMetric(), tmp_path / "report")
    assert not loaded  # the metric is loaded when the input is known to be good


def test_strict_stops_at_any_problem(manifest, tmp_path):
    (manifest.parent / "good/000.png").unlink()
    with pytest.raises(TPIPSError, match="1 problems with the input"):
        run(manifest, tmp_path / "report", settings=Settings(strict=True))


@pytest.mark.parametrize(
    ("field", "value"),
    [("sizes", "x"), ("batch_images", 1), ("resamples", 5), ("examples", -1), ("level", 1.0), ("tie_margin", 2.0)],
)
def test_bad_settings(field, value):
    with pytest.raises(TPIPSError, match=field):
        Settings(**{field: value})


# --- the command


@pytest.fixture
def command(monkeypatch, capsys):
    monkeypatch.setattr(tpips_reward.cli, "_load", lambda options: RegionMetric())

    def call(*arguments: object) -> tuple[int, str, str]:
        status = tpips_reward.cli.main(["evaluate", *map(str, arguments)])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return call


def test_the_command(command, manifest, tmp_path):
    status, out, err = command(manifest, "--output", tmp_path / "r", "--resamples", 300, "--model",
                               f"more={manifest.parent / 'good'}")  # fmt: skip
    assert status == 0 and err == "" and "| more | 12 of 12 |" in out and str(tmp_path / "r/report.html") in out
    assert "24" not in out.split("Report:")[0].splitlines()[-1]
    report = json.loads((tmp_path / "r/report.json").read_text())
    values = {entry["model"]: entry["overall"] for entry in report["models"]}
    assert values["more"] == values["good"] and report["problems"]["counts"] == {"shared_file": 12}


def test_the_command_with_a_calibration(command, manifest, tmp_path, monkeypatch):
    status, _, err = command(manifest, "--output", tmp_path / "r", "--resamples", 300, "--calibrated")
    assert status == 2 and "has no calibration" in err and not (tmp_path / "r/report.json").exists()
    metric = RegionMetric()
    metric.calibration = Calibration(MonotoneMap((0.0, 1.0), (0.5, 1.0)), probe=tuple(probe_answers(metric)))
    monkeypatch.setattr(tpips_reward.cli, "_load", lambda options: metric)
    reports = {}
    for name, flags in (("raw", ()), ("calibrated", ("--calibrated",))):
        assert command(manifest, "--output", tmp_path / name, "--resamples", 300, *flags)[0] == 0
        reports[name] = json.loads((tmp_path / name / "report.json").read_text())
    raw, calibrated = (reports[name]["rows"][0]["outputs"]["good"]["preserve"]["background"] for name in reports)
    assert calibrated == pytest.approx(0.5 + raw / 2, abs=1e-6) and reports["calibrated"]["metric"]["range"] == [0, 1]
    assert reports["calibrated"]["metric"]["name"] == "builtin:late, calibrated"


def test_the_command_on_a_voted_benchmark(command, manifest, tmp_path):
    rows = [
        {"key": line["key"], "instruction": line["instruction"], "source_image": line["source"], "task": "color_alter",
         "edited_images": [line["outputs"]["good"], line["outputs"]["drifting"]], "winner": "Image A"}
        for line in read_lines(manifest)
    ]  # fmt: skip
    write_lines(manifest.parent / "metadata.jsonl", rows)
    status, _, err = command(manifest.parent, "--layout", "vcreward", "--output", tmp_path / "r", "--resamples", 300)
    report = json.loads((tmp_path / "r/report.json").read_text())
    assert status == 0 and err == "" and report["votes"]["agreement"][0]["accuracy"] == 1.0
    assert report["votes"]["rule"] == "vcreward" and report["comparisons"] == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--model", "x"), "write NAME=FOLDER"),
        (("--model", "good=."), "has a folder; name one of them otherwise"),
        (("--layout", "gedit"), "needs --benchmark"),
        (("--sources", "."), "--sources means nothing"),
        (("--layout", "editreward-tiger", "--votes", "v"), "of its own"),
        (("--resamples", "1"), "resamples is 1"),
        (("--votes", "nothing.jsonl"), "nothing.jsonl does not exist"),
    ],
)
def test_bad_options_are_one_line(command, manifest, tmp_path, arguments, message):
    status, out, err = command(manifest, "--output", tmp_path / "r", *arguments)
    assert status == 2 and out == "" and message in err and len(err.strip().splitlines()) == 1


# --- in a browser


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    """Chromium without a display, dark, by Selenium. Another place than the usual ones: CHROMIUM and CHROMEDRIVER."""
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed: no browser sees the page")
    program = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, ("chromium", "google-chrome"))), None)
    driver = os.environ.get("CHROMEDRIVER") or shutil.which("chromedriver")
    if program is None or driver is None:
        pytest.skip("no Chromium with its chromedriver here (Debian: apt install chromium chromium-driver)")
    options = webdriver.ChromeOptions()
    options.binary_location = program
    profile = tmp_path_factory.mktemp("profile")
    for argument in ("headless=new", "no-sandbox", "disable-gpu", "disable-dev-shm-usage", "force-dark-mode",
                     "blink-settings=preferredColorScheme=0", f"user-data-dir={profile}", "window-size=1400,1000"):  # fmt: skip
        options.add_argument(f"--{argument}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    found = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    yield found
    found.quit()


def test_the_page_in_a_browser(browser, manifest, tmp_path):
    report = run(manifest, tmp_path / "report")
    browser.get((tmp_path / "report/report.html").as_uri())

    def paper() -> str:
        return browser.execute_script("return getComputedStyle(document.body).backgroundColor")

    def find(selector: str):
        return browser.find_elements("css selector", selector)

    assert "20, 24, 31" in paper()
    find('#theme option[value="light"]')[0].click()
    assert "255, 255, 255" in paper()

    heading = find("#row-table th:nth-child(4) button")[0]
    for direction, reverse in (("descending", True), ("ascending", False)):
        browser.execute_script("arguments[0].scrollIntoView()", heading)
        heading.click()
        values = [float(cell.text) for cell in find("#row-table tbody td:nth-child(4)")]
        assert values == sorted(values, reverse=reverse) and len(values) == 36 and len(set(values)) > 10
        assert find("#row-table th:nth-child(4)")[0].get_attribute("aria-sort") == direction

    find('input[data-filter="row-table"]')[0].send_keys("good paint")
    expected = sum("paint" in f"{line['category']} {line['instruction']}" for line in read_lines(manifest))
    assert sum(row.is_displayed() for row in find("#row-table tbody tr")) == expected < 12
    assert find('[data-shown="row-table"]')[0].text == f"{expected} of 36"

    def choose(column: int, value: str) -> list[list[str]]:
        find(f'select[data-choice="difference-table"][data-column="{column}"] option[value="{value}"]')[0].click()
        rows = [row for row in find("#difference-table tbody tr") if row.is_displayed()]
        return [[cell.text for cell in row.find_elements("css selector", "td")] for row in rows]

    first = [row for row in find("#difference-table tbody tr") if row.is_displayed()]
    assert len(first) == 2, "to begin with one measure in two categories, of one pair of models"
    shown = choose(0, "aspect to keep: similarity")
    assert [row[:3] for row in shown] == [["aspect to keep: similarity", "background", "drifting − good"]]
    assert [row[2] for row in choose(2, "")] == ["drifting − good", "drifting − destroying", "good − destroying"]
    assert len(choose(0, "")) == 24 and find('[data-shown="difference-table"]')[0].text == "24 of 24"

    scores = {row["key"]: row["outputs"]["drifting"]["overall"] for row in report["rows"]}
    keys = {"example-" + key.encode().hex(): key for key in scores}
    orders = {}
    for value in ("1 -1", "1 1", ""):  # the second best model is "drifting"
        find(f'select[data-order="example-list"] option[value="{value}"]')[0].click()
        orders[value] = [keys[item.get_attribute("id")] for item in find("details.example")]
    assert orders["1 1"] == orders["1 -1"][::-1] == sorted(orders[""], key=lambda key: scores[key])
    assert orders[""] == sorted(orders[""]) != orders["1 1"]

    example = find("details.example")[0]
    picture = example.find_element("css selector", "img")
    assert not picture.is_displayed()
    browser.execute_script("arguments[0].scrollIntoView()", example)
    example.find_element("css selector", "summary").click()
    assert picture.is_displayed()
    wait = pytest.importorskip("selenium.webdriver.support.wait").WebDriverWait(browser, 30)
    wait.until(lambda _: picture.get_property("naturalWidth") > 0, "the picture does not load")
    assert any(score.is_displayed() and score.text for score in example.find_elements("css selector", "dd"))

    link = next(link for link in find("#row-table a") if link.is_displayed())
    target = link.get_attribute("href").partition("#")[2]
    browser.execute_script("arguments[0].scrollIntoView()", link)
    link.click()
    assert find(f"#{target}")[0].get_attribute("open")

    assert browser.get_log("browser") == []
    sent = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    asked = [item["params"] for item in sent if item["method"] == "Network.requestWillBeSent"]
    addresses = [item["request"]["url"] for item in asked if item["documentURL"].startswith("file:")]
    assert addresses and all(address.startswith(("file:", "data:")) for address in addresses)
