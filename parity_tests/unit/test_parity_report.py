"""The report, opened in a browser and clicked through."""

import dataclasses
import json
import os
import shutil
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from flax_transformer import parity
from flax_transformer.parity.layouts import from_kernel
from parity_tests.unit.small_recordings import Split, record

if TYPE_CHECKING:
    from selenium.webdriver.chrome.webdriver import WebDriver

pytestmark = pytest.mark.xdist_group("report")  # one worker makes the recordings and starts the browser

NOTHING = "\u2013"
HOSTILE = "<script>document.title = 'stolen'</script><img src=x onerror=\"document.title = 'stolen'\">"


@pytest.fixture(scope="module")
def reference() -> parity.Recording:
    return record(Split())


@pytest.fixture(scope="module")
def passed(reference) -> parity.Verdict:
    return parity.compare(reference, record(Split(), execution="jit"))


@pytest.fixture(scope="module")
def diverged(reference) -> parity.Verdict:
    return parity.compare(reference, record(Split(epsilon=1e-3)))


def many(count: int) -> parity.Verdict:
    """A verdict of many rows, with hostile names, and every section that a verdict can have."""
    rng = np.random.default_rng(0)

    def row(number: int) -> parity.Row:
        path = f"layers.{number // 50}.part{number % 50}"
        x = rng.standard_normal((3, 5))
        measures = parity.measure(x, x + rng.standard_normal((3, 5)) * 10.0 ** rng.uniform(-17, -11))
        allowed = 1e-12 * measures.largest
        return parity.Row(
            name=f"{path}#0",
            path=path,
            passed=measures.max_abs <= allowed,
            detail=f"differs by {measures.max_abs:.2g}",
            measures=measures,
            allowed=allowed,
            judged=measures.max_abs,
        )

    missing = parity.Row(name=f"{HOSTILE}.w", path=HOSTILE, passed=False, detail=f"is missing {HOSTILE}")
    infinite = parity.Row(name="nan#0", path="nan", passed=False, detail="3 elements are NaN on one side only")
    return parity.Verdict(
        rule="float64",
        rungs=(
            parity.Rung("keys", (missing,)),
            parity.Rung("modules", (*(row(number) for number in range(count)), infinite)),
        ),
        matches=(parity.Match(HOSTILE, ((HOSTILE, "b"),), "rule"), parity.Match("", (("",),), "name", from_kernel)),
        unmatched=(f"module {HOSTILE}",),
        structural_zeros=(HOSTILE,),
        curves={"reference": np.array([3.0, 2.0, 1.0]), HOSTILE: np.array([3.0, np.nan, np.inf])},
        conditioning={HOSTILE: 700.0, "layers.0": 3.0, "layers.1": np.inf},
        provenance={
            "reference": {"framework": HOSTILE, "threads": "2"},
            "candidate": {"framework": "flax", HOSTILE: "x"},
        },
    )


@pytest.fixture(scope="module")
def driver() -> "Iterator[WebDriver]":
    webdriver = pytest.importorskip("selenium.webdriver")
    browser, server = shutil.which("chromium"), shutil.which("chromedriver")
    if browser is None or server is None:
        reason = "needs Chromium: apt-get install chromium chromium-driver"
        if os.environ.get("CI"):
            pytest.fail(reason)
        pytest.skip(reason)
    options = webdriver.ChromeOptions()
    options.binary_location = browser
    # Chromium refuses its sandbox to root, and /dev/shm is small in containers.
    for argument in ("headless=new", "no-sandbox", "disable-dev-shm-usage", "disable-gpu", "window-size=1280,900"):
        options.add_argument(f"--{argument}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    found = webdriver.Chrome(options=options, service=webdriver.ChromeService(executable_path=server))
    yield found
    found.quit()


class Page:
    """A report in the browser."""

    def __init__(self, driver: "WebDriver", verdict: parity.Verdict, file: Path) -> None:
        self.driver = driver
        verdict.report(file)
        driver.get(file.as_uri())

    def ask(self, expression: str) -> Any:
        return self.driver.execute_script(f"return {expression}")

    def texts(self, selector: str) -> list[str]:
        """What is visible of the elements."""
        return self.ask(
            f"[...document.querySelectorAll({json.dumps(selector)})].filter(e => e.checkVisibility()).map(e => e.innerText)"
        )

    def click(self, selector: str) -> None:
        element = self.driver.find_element("css selector", selector)
        self.driver.execute_script("arguments[0].scrollIntoView({block: 'center'})", element)
        element.click()

    def wait_for(self, selector: str) -> None:
        from selenium.webdriver.support.ui import WebDriverWait

        WebDriverWait(self.driver, 20).until(lambda driver: driver.find_elements("css selector", selector))

    def type(self, selector: str, text: str) -> None:
        element = self.driver.find_element("css selector", selector)
        element.clear()
        element.send_keys(text)

    def choose(self, selector: str, text: str) -> None:
        options = self.driver.find_elements("css selector", f"{selector} option")
        next(option for option in options if option.text == text).click()

    def column(self, place: int) -> list[str]:
        return self.texts(f"#rows td:nth-child({place})")


@pytest.fixture
def show(driver, tmp_path) -> Iterator[Any]:
    """Opens reports; afterwards the console must be empty, and nothing else may have been asked for."""
    driver.get_log("browser")
    driver.get_log("performance")
    opened = []

    def open_(verdict: parity.Verdict) -> Page:
        opened.append((tmp_path / "report.html").as_uri())
        return Page(driver, verdict, tmp_path / "report.html")

    yield open_
    assert driver.get_log("browser") == []
    messages = [json.loads(entry["message"])["message"] for entry in driver.get_log("performance")]
    assert [m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"] == opened


SECTIONS = [
    "The ladder",
    "Modules",
    "Errors along the model",
    "Training run",
    "All checks",
    "Zero by structure",
    "Matches",
]


def test_a_right_port_shows_as_passed_with_every_section(show, passed):
    page = show(passed)
    assert page.ask("document.title") == "Parity: passed"
    assert page.texts("h1") == ["PASSED"]
    assert page.texts("h2") == [*SECTIONS, "Provenance", "How it was judged"]
    count = sum(len(rung.rows) for rung in passed.rungs)
    assert page.texts("#banner p")[0] == f"All {count} checks on 9 rungs hold."
    assert page.texts("#ladder .glyph") == ["✓"] * 9
    assert page.texts("#count") == [f"{count} of {count} checks"]
    assert page.texts("#zeros li") == ["blocks.0.key.bias", "blocks.1.key.bias"]
    assert page.texts("#tree .bad") == []


def test_a_wrong_port_shows_where_to_look_first(show, diverged):
    page = show(diverged)
    assert page.texts("h1") == ["DIVERGED"]
    assert page.texts("h2")[0] == "Where to look first"
    found = diverged.first_divergence
    assert page.texts("#first dd") == ["modules", "blocks.1.norm", "blocks.1.norm#0", found.row.detail]
    assert page.texts("#tree .tag") == ["look here first"]
    assert page.texts("#tree [data-path='blocks.1.norm'] .bad")[0] == "norm"
    page.click("#show-first")
    assert page.texts("#rows .chosen .name") == ["blocks.1.norm#0"]
    assert page.ask("scrollY") > 500


def test_columns_sort_by_click_and_by_keyboard(show, diverged):
    page = show(diverged)
    names = [
        row.name if not row.name.startswith("#") else f"(model){row.name}" for r in diverged.rungs for row in r.rows
    ]
    assert page.column(4) == names
    page.click("[data-key=relative]")
    assert page.ask("document.querySelector('[data-key=relative]').closest('th').ariaSort") == "descending"
    measured = [row.measures.relative for rung in diverged.rungs for row in rung.rows if row.measures]
    shown = page.column(5)
    assert shown[len(measured) :] == [NOTHING] * (len(names) - len(measured)), "what has no number comes last"
    largest, smallest = max(measured), min(measured)
    assert float(shown[0]) == pytest.approx(largest, rel=0.05)
    page.driver.switch_to.active_element.send_keys("\ue007")  # Enter, on the header that has the focus
    assert page.ask("document.querySelector('[data-key=relative]').closest('th').ariaSort") == "ascending"
    assert float(page.column(5)[0]) == pytest.approx(smallest, rel=0.05)
    assert page.column(5)[-1] == NOTHING, "what has no number comes last this way too"
    page.click("[data-key=name]")
    assert page.column(4)[0] == "(model)#0"
    assert [name for name in page.column(4) if name.islower()][-1] == "output"
    page.click("[data-key=index]")
    assert page.column(4) == names
    assert page.column(1) == [str(number) for number in range(1, len(names) + 1)]


def test_filters_by_words_rung_failure_and_module_add_up(show, diverged):
    page = show(diverged)
    rows = [(rung.name, row) for rung in diverged.rungs for row in rung.rows]
    page.click("#failed")
    assert page.column(2) == ["✗"] * sum(not row.passed for _, row in rows)
    page.choose("#rung", "gradients")
    expected = [row.name for rung, row in rows if rung == "gradients" and not row.passed]
    assert page.column(4) == expected
    page.type("#filter", "KERNEL blocks.0")
    expected = [name for name in expected if "kernel" in name and "blocks.0" in name]
    assert page.column(4) == expected
    assert page.texts("#count") == [f"{len(expected)} of {len(rows)} checks"]
    page.type("#filter", "nowhere")
    assert page.texts("#count") == [f"0 of {len(rows)} checks"]
    page.click("#tree [data-path='blocks.1'] > summary button")
    inside = [row.name for rung, row in rows if rung == "modules" and f"{row.path}.".startswith("blocks.1.")]
    assert page.column(4) == inside, (
        "a module's link shows its own checks and those within it, and nothing else filters"
    )
    assert page.texts("#module") == ["module blocks.1 ✕"]
    page.click("#module")
    assert page.column(3) == ["modules"] * 10
    page.click("#ladder .link")
    assert set(page.column(3)) == {"keys"}


def test_the_tree_collapses_and_shows_the_errors_of_the_rung_that_is_chosen(show, diverged):
    page = show(diverged)
    names = ["(the model itself)", "blocks", "0", "query", "key", "norm", "1", "query", "key", "norm", "head"]
    assert [name for name in page.texts("#tree .name")] == names
    page.click("#tree [data-path='blocks.0'] > summary .name")
    assert page.texts("#tree .name") == [*names[:3], *names[6:]]
    page.click("#collapse")
    assert page.texts("#tree .name") == names[:1]
    page.click("#expand")
    assert page.texts("#tree .name") == names
    failed = [f"{row.path.rpartition('.')[2] or names[0]}" for row in diverged.rungs[2].rows if not row.passed]
    assert sorted(page.texts("#tree .name.bad")) == sorted(failed)
    first = diverged.first_divergence.row
    assert float(page.texts("#tree [data-path='blocks.1.norm'] .error")[0]) == pytest.approx(
        first.measures.relative, rel=0.05
    )
    assert page.texts("#tree [data-path='blocks'] > summary .error")[0] == NOTHING, "a list of modules is never called"
    page.choose("#tree-rung", "keys")
    assert page.texts("#tree .name.bad") == []
    assert set(page.texts("#tree .error")) == {NOTHING}


def test_plots_have_a_mark_for_every_error_that_leads_to_its_check(show, diverged):
    page = show(diverged)
    plots = [
        rung for rung in diverged.rungs if rung.name in ("modules", "backward", "gradients", "updates", "training")
    ]
    assert page.texts("#errors h3")[0] == "modules, in order of execution"
    for number, rung in enumerate(plots, start=1):
        figure = f"#errors figure:nth-of-type({number})"
        drawn = [row for row in rung.rows if row.name not in diverged.structural_zeros]
        assert page.ask(f"document.querySelectorAll('{figure} .cross').length") == sum(not row.passed for row in drawn)
        assert page.ask(f"document.querySelectorAll('{figure} .point').length") == sum(row.passed for row in drawn)
        heights = page.ask(f"document.querySelector('{figure} path.limit').getAttribute('d')")
        assert heights.count("M") == 1, "the allowed line is drawn from end to end"
    page.driver.find_elements("css selector", "#errors .cross")[1].click()
    assert page.texts("#rows .chosen .name") == ["blocks.1.norm#0"]


def test_the_training_run_is_drawn_over_the_reference_with_its_difference(show, diverged):
    page = show(diverged)
    assert page.texts("#training h3") == ["loss", "difference from the reference"]
    assert page.texts("#training .legend")[0].split() == ["reference", "candidate"]
    paths = page.ask("[...document.querySelectorAll('#training figure path')].map(path => path.getAttribute('d'))")
    assert [path.count("L") for path in paths] == [4, 4, 4], "five steps, by reference, candidate and difference"
    assert "NaN" not in "".join(paths)


def test_hostile_names_are_text_and_every_section_shows(show):
    page = show(many(60))
    assert page.texts("h2") == [
        "Where to look first", *SECTIONS[:-1], "Conditioning", "Matches", "Not compared", "Provenance", "How it was judged",
    ]  # fmt: skip
    assert page.ask("document.title") == "Parity: diverged"
    assert page.ask("document.querySelectorAll('img').length") == 0
    assert page.ask("document.scripts.length") == 2
    assert page.texts("#zeros li") == [HOSTILE]
    assert page.texts("#unmatched li") == [f"module {HOSTILE}"]
    assert page.texts("#conditioning tbody td:nth-child(-n+2)") == ["layers.1", "∞", HOSTILE, "700", "layers.0", "3"]
    assert page.texts("#provenance tr.differs th") == ["framework ≠"]
    assert page.texts("#provenance tbody tr:last-child td") == [NOTHING, "x"]
    page.click("#matches-list summary")
    page.wait_for("#matches-list tbody td")  # filled when the browser says that it is open, a little after the click
    assert page.texts("#matches-list tbody td") == [
        HOSTILE, f"{HOSTILE} + b", "same", "rule", "(the model itself)", "(the model itself)", "kernel", "name",
    ]  # fmt: skip


def test_the_report_stays_usable_with_5000_rows(show):
    verdict = many(5000)
    page = show(verdict)
    assert page.texts("#count") == ["5,002 of 5,002 checks"]
    assert len(page.ask("[...document.querySelectorAll('#rows tr')]")) == 1000
    page.click("#more")
    assert page.ask("document.querySelectorAll('#rows tr').length") == 5002
    seconds = page.ask(
        "(() => { const start = performance.now(); document.querySelector('[data-key=used]').click(); "
        "document.body.offsetHeight; return (performance.now() - start) / 1000 })()"
    )
    assert seconds < 5, "sorting 5,000 rows"
    assert page.ask("document.querySelectorAll('#rows tr').length") == 1000, "a sorted table begins at its top again"
    ratios = sorted(
        (r.judged / r.allowed for rung in verdict.rungs for r in rung.rows if r.judged and r.allowed), reverse=True
    )
    assert float(page.column(11)[0]) == pytest.approx(ratios[0], rel=0.05)
    page.driver.find_elements("css selector", "#errors .cross")[-1].click()
    assert page.texts("#rows .chosen .name") == ["nan#0"], "a row far down is brought in"


def test_a_narrow_window_scrolls_inside_its_tables_only(show, diverged, driver):
    driver.set_window_size(500, 900)
    try:
        page = show(diverged)
        assert page.ask("document.documentElement.scrollWidth <= innerWidth")
        assert page.ask("document.querySelector('#errors svg[role=img]').viewBox.baseVal.width") < 500, (
            "drawn for the width"
        )
    finally:
        driver.set_window_size(1280, 900)


def test_the_page_is_dark_where_the_reader_wants_it_dark(show, passed, driver):
    grounds = []
    for scheme in ("light", "dark"):
        driver.execute_cdp_cmd(
            "Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
        )
        page = show(passed)
        grounds.append(page.ask("getComputedStyle(document.body).backgroundColor"))
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
    assert grounds == ["rgb(247, 247, 245)", "rgb(19, 22, 25)"]


def test_the_page_is_one_file_that_names_no_other(passed, tmp_path):
    passed.report(tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert "http" not in page.replace("http-equiv", "").replace("http://www.w3.org/2000/svg", "")
    for word in ("src=", "@import", "url(", "<link", "{{"):
        assert word not in page, word


def test_a_name_cannot_end_the_script_that_holds_it(tmp_path):
    verdict = dataclasses.replace(many(1), unmatched=("</script><!-- {{script}}", "\ud800"))
    verdict.report(tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert page.count("</script>") == 2
    inside = page.split('type="application/json">')[1].split("</script>")[0]
    assert json.loads(inside) == json.loads(json.dumps(verdict.to_dict()))


def test_an_installed_package_has_the_page():
    root = Path(__file__).parents[2]
    data = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    files = {path.name for path in (root / "flax_transformer" / "parity").iterdir() if path.is_file()}
    assert set(data["flax_transformer.parity"]) == {name for name in files if not name.endswith(".py")}
