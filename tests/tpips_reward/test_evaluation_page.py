"""The page of a report: whole, safe against hostile text, and alive in a browser."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess

import pytest
from evaluation_files import read_lines, save, write_lines
from evaluation_runs import run
from page_parser import Page

from tpips_reward.evaluation.html import esc, fill
from tpips_reward.scenes import Scene


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
