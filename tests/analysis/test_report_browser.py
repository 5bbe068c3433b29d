"""The page in a real browser: it draws, sorts, changes its colours, prints, and asks nobody for anything."""

from __future__ import annotations

import itertools
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from chromium import PROGRAM, Page, chromium
from conftest import run_train
from test_report import EVIL, reported, write_run

from rltemplate.run import paths

pytestmark = pytest.mark.skipif(PROGRAM is None, reason="needs Chromium: apt install chromium")

DRAWN = "document.querySelectorAll('.chart .main-svg').length"
# Lines that are drawn: paths of some length in the places of charts.
LINES = (
    "[...document.querySelectorAll('.chart .scatterlayer path.js-line')].filter(p => p.getTotalLength() > 20)"
)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    """A browser for all tests of this file."""
    with chromium(tmp_path_factory.mktemp("browser")) as page:
        yield page


@pytest.fixture(scope="module")
def report(fork: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report of a real run with a film, a few made up, and one whose every word is an attack."""
    folder = tmp_path_factory.mktemp("page")
    words = ("env=CartPole", "total_env_steps=2048", "log_every=256", "eval_every=512", "eval_episodes=2")
    done = run_train(fork, folder, *words, "video_every=2048")
    assert done.returncode == 0, done.stderr
    runs_dir = folder / "runs"
    for seed in range(1, 6):
        write_run(runs_dir, seed, [0.0, 5.0 * seed, 3.0 * seed])
        write_run(runs_dir, seed, [1.0, 8.0 * seed, 6.0 * seed], tag="-b", gamma=0.5)
    evil = write_run(runs_dir, 7, id=EVIL, error=EVIL, config={"note": EVIL, "algo": {"name": EVIL}})
    (evil / paths.METRICS).write_text(
        f'{{"env_steps": 1, "eval/return": 1, "{EVIL.replace(chr(34), "")}": 1}}\n'
    )
    (runs_dir / paths.JOURNAL).write_text(f"{EVIL}\n\n![x](https://example.org/x.png)\n")
    shutil.rmtree(runs_dir / "sweeps", ignore_errors=True)
    page = folder / "report.html"
    page.write_text(reported(runs_dir).html)
    return page


@pytest.fixture
def page(browser: Page, report: Path) -> Page:
    """The report, freshly opened on a screen of a desk."""
    browser.size(1280, 1000)
    browser.system_colors("light")
    browser.errors.clear()
    browser.requests.clear()
    browser.open(report)
    return browser


def through(page: Page) -> None:
    """Scroll from top to bottom until everything that comes near the screen is drawn."""
    height = page.value("document.documentElement.scrollHeight")
    for y in range(0, height, 700):
        page.value(f"scrollTo(0, {y})")
        time.sleep(0.1)
        page.until(
            "[...document.querySelectorAll('.chart')].every(c => { const b = c.getBoundingClientRect();"
            "return c.closest('details:not([open])') || b.bottom < 0 || b.top > innerHeight"
            "|| c.querySelector('.main-svg'); })"
        )


def test_every_chart_is_drawn_when_it_comes_near_and_not_before(page: Page) -> None:
    page.until(f"{DRAWN} > 0")
    charts = page.value("document.querySelectorAll('.chart').length")
    assert charts > 12
    assert page.value("document.querySelectorAll('.chart:has(.main-svg)').length") < charts
    through(page)
    assert page.value("document.querySelectorAll('.chart:has(.main-svg)').length") == charts
    assert page.value(f"{LINES}.length") > 20
    assert page.value("document.querySelectorAll('.chart .scatterlayer .point').length") > 10
    assert page.errors == []


def test_the_page_asks_nobody_for_anything(page: Page, report: Path) -> None:
    through(page)
    page.value("document.querySelector('[data-save=svg]').click()")
    page.value("document.querySelector('[data-save=png]').click()")
    time.sleep(0.5)
    asked = [url for url in page.requests if not url.startswith(("data:", "blob:"))]
    assert asked == [report.as_uri()]


def test_a_page_that_asks_for_something_is_noticed(browser: Page, tmp_path: Path) -> None:
    other = tmp_path / "other.html"
    other.write_text("<img src='http://127.0.0.1:9/x.png'><script>nothing()</script>")
    browser.requests.clear()
    browser.errors.clear()
    browser.open(other)
    browser.until("document.readyState === 'complete'")
    assert "http://127.0.0.1:9/x.png" in browser.requests
    assert any("nothing is not defined" in error for error in browser.errors)


def test_no_word_of_a_run_folder_is_run(page: Page, report: Path, tmp_path: Path) -> None:
    through(page)
    assert page.value("document.title") == "Report of runs"
    assert page.value("document.querySelectorAll('img').length") == 0
    assert "owned" in page.value("document.body.textContent")
    # The second wall: were one of them not escaped, the policy of the page would not let it run ...
    html = report.read_text().replace("<main", f"{EVIL}<main", 1)
    hurt = tmp_path / "hurt.html"
    hurt.write_text(html)
    page.open(hurt)
    time.sleep(0.3)
    assert page.value("document.title") == "Report of runs"
    # ... and without the policy it would.
    hurt.write_text(html.replace("Content-Security-Policy", "x-nothing", 1))
    page.open(hurt)
    time.sleep(0.3)
    assert page.value("document.title") == "owned"


def test_of_many_charts_only_those_near_the_screen_are_kept(page: Page, tmp_path: Path) -> None:
    for nr in range(40):
        write_run(tmp_path, nr, gamma=0.5 + nr / 100)
    many = tmp_path / "many.html"
    many.write_text(reported(tmp_path).html)
    page.open(many)
    through(page)
    assert page.value("document.querySelectorAll('.chart').length") > 80
    # All were drawn once, and only so many are still there.
    assert page.value("document.querySelectorAll('.large .waiting, .side .waiting').length") == 0
    assert 5 < page.value("document.querySelectorAll('.chart:has(.main-svg)').length") < 60
    assert page.errors == []


def test_light_and_dark_follow_the_system_and_the_button(page: Page) -> None:
    def ground() -> int:
        found = page.value("getComputedStyle(document.body).backgroundColor.match(/[0-9]+/g).map(Number)")
        return int(sum(found))

    def color() -> str:
        return str(page.value(f"{LINES}[0].style.stroke"))

    page.until(f"{LINES}.length > 0")
    assert ground() > 700
    light = color()
    page.system_colors("dark")
    page.until("document.documentElement.dataset.theme === 'dark'")
    assert ground() < 150
    assert color() != light
    page.value("document.getElementById('theme').click()")  # from the system's to light
    assert ground() > 700
    assert color() == light
    page.value("document.getElementById('theme').click()")
    assert ground() < 150
    page.value("document.getElementById('theme').click()")


def test_a_table_is_sorted_by_numbers_and_back_and_found_in(page: Page) -> None:
    def column(nr: int) -> list[str]:
        rows = "[...document.getElementById('table-runs').tBodies[0].rows].filter(r => !r.hidden)"
        return list(page.value(f"{rows}.map(r => r.cells[{nr}].dataset.v ?? r.cells[{nr}].textContent)"))

    head = "document.getElementById('table-runs').tHead.rows[0].cells[8]"
    assert page.value(f"{head}.textContent.trim()") == "return"
    before = [float(value) for value in column(8)]
    page.value(f"{head}.querySelector('button').click()")
    assert [float(value) for value in column(8)] == sorted(before) != before
    assert page.value(f"{head}.getAttribute('aria-sort')") == "ascending"
    page.value(f"{head}.querySelector('button').click()")
    assert [float(value) for value in column(8)] == sorted(before, reverse=True)
    page.value(
        "{const f = document.getElementById('filter'); f.value = 'run-2-b';"
        "f.dispatchEvent(new Event('input'))}"
    )
    assert column(0) == ["run-2-b"]
    assert page.value("document.getElementById('found').textContent") == "1 of 12"


def test_a_phone_shows_all_of_it_without_scrolling_sideways(page: Page, report: Path) -> None:
    page.size(390, 844, phone=True)
    page.open(report)
    through(page)
    assert page.value("document.documentElement.scrollWidth") == 390
    widths = page.value(
        "[...document.querySelectorAll('.chart .main-svg')].map(s => s.getBoundingClientRect().right)"
    )
    assert len(widths) > 12
    assert max(widths) <= 390
    # One finger moves the page, not the lines.
    assert page.value("document.querySelector('.js-plotly-plot')._fullLayout.dragmode") is False


def test_a_film_plays(page: Page) -> None:
    page.value("document.querySelector('video').scrollIntoView()")
    page.until("document.querySelector('video').readyState >= 1")
    assert page.value("document.querySelector('video').duration") > 0.1
    assert page.value("document.querySelector('video').videoWidth") > 100
    assert page.value("document.querySelector('video').error") is None


def test_print_has_every_chart_on_white(page: Page) -> None:
    page.system_colors("dark")
    page.until("document.documentElement.dataset.prepared === 'true'")
    shown = page.value(
        "[...document.querySelectorAll('.chart')].filter(c => !c.closest('details:not([open])')).length"
    )
    page.value(
        "addEventListener('beforeprint', () => { window.inPrint = ["
        "document.querySelectorAll('.chart:has(.main-svg)').length,"
        "document.querySelector('.chart .main-svg text').style.fill] })"
    )
    printed = page.pdf()
    assert printed.startswith(b"%PDF")
    assert len(printed) > 50_000
    count, ink = page.value("window.inPrint")
    assert count == shown
    assert ink == "rgb(28, 32, 36)"
    page.system_colors("light")


def test_a_chart_is_saved_as_png_and_svg_on_white(page: Page) -> None:
    page.until(f"{DRAWN} > 0")
    page.value(
        "{window.saved = [];"
        "HTMLAnchorElement.prototype.click = function() { saved.push([this.download, this.href]) }}"
    )
    page.value("document.querySelector('[data-save=svg]').click()")
    page.value("document.querySelector('[data-save=png]').click()")
    page.until("saved.length === 2")
    found = dict(page.value("saved"))
    assert set(found) == {"all-Thing-v0-eval-return.svg", "all-Thing-v0-eval-return.png"}
    assert found["all-Thing-v0-eval-return.svg"].startswith("data:image/svg+xml")
    assert found["all-Thing-v0-eval-return.png"].startswith("data:image/png;base64,iVBOR")


def test_all_can_be_reached_and_is_named(page: Page) -> None:
    through(page)
    unnamed = page.value(
        "[...document.querySelectorAll('button, a, input, .chart, video, table, [role=region]')].filter(e =>"
        "!(e.ariaLabel || e.textContent.trim() || e.caption || e.labels?.length)).map(e => e.outerHTML)"
    )
    assert unnamed == []
    levels = page.value(
        "[...document.querySelectorAll('h1, h2, h3, h4, h5, h6')].map(h => Number(h.tagName[1]))"
    )
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in itertools.pairwise(levels))
    assert page.value("[...document.querySelectorAll('.chart')].every(c => c.ariaLabel.length > 20)")
