"""The report in a real browser: both themes, narrow and wide windows, the mouse, and a page that changes."""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import CHROMIUM, Browser
from conftest import ROOT, Started, write_run

from runlab.analysis import figures
from runlab.analysis.commands.report import make_report
from runlab.run import paths

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium")

LONG = "x" * 90  # a word that no line of a narrow window takes
# Texts whose colour is too near to that of the ground for WCAG 2, level AA (4.5 to 1, large ones 3 to 1), and
# lines in charts (3 to 1).
FAINT = """(() => {
  const parts = (text) => text.match(/[\\d.]+/g).map(Number);
  const light = (rgb) => rgb.slice(0, 3).map((v) => v / 255)
    .map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4))
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const ratio = (a, b) => (Math.max(light(a), light(b)) + 0.05) / (Math.min(light(a), light(b)) + 0.05);
  const ground = (each) => {
    const own = parts(getComputedStyle(each).backgroundColor);
    return own.length === 4 && own[3] === 0 && each.parentElement ? ground(each.parentElement) : own;
  };
  const faint = [];
  for (const each of document.body.querySelectorAll("*")) {
    const own = [...each.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
    if (!own || !each.checkVisibility() || ["SCRIPT", "STYLE"].includes(each.tagName)) continue;
    const style = getComputedStyle(each), large = parseFloat(style.fontSize) >= 24;
    if (ratio(parts(style.color), ground(each)) < (large ? 3 : 4.5)) faint.push(each.textContent);
  }
  const probe = document.body.appendChild(document.createElement("i")), page = ground(document.body);
  for (const color of COLORS) {
    probe.style.color = color;
    if (ratio(parts(getComputedStyle(probe).color), page) < 3) faint.push(color);
  }
  probe.remove();
  return faint;
})()""".replace("COLORS", json.dumps([*figures.COLORS[:-1], figures.GREY]))


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


def write_many(runs_dir: Path, count: int) -> None:
    """Ten seeds of each experiment, with twenty metrics in two hundred rows."""
    for number in range(count):
        experiment, seed = divmod(number, 10)
        returns = [40 * math.sin(i + number) + i * (1 + experiment) for i in range(200)]
        algo = {"gamma": 0.99 - experiment / 100}
        run = write_run(runs_dir, seed, returns, env="CartPole", tag=f"-{experiment}", config={"algo": algo})
        rows = map(json.loads, (run / paths.METRICS).read_text().splitlines())
        more = {f"loss/m{i}": math.cos(number * i) for i in range(17)} | {"": 1.0}
        text = "".join(f"{json.dumps(row | more)}\n" for row in rows)
        (run / paths.METRICS).write_text(text)


def page_of(folder: Path) -> Path:
    """The report about all runs of a folder, beside them."""
    page = folder / "report.html"
    page.write_text(make_report(sorted(folder.glob("runs/*/*")), "runs/*/*", folder).html)
    return page


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report about fifty runs, and one that is folded away, with long names."""
    folder = tmp_path_factory.mktemp("page")
    write_many(folder / "runs", 50)
    write_run(folder / "runs", 1, env=LONG, tag="-long", error=LONG, status="failed")
    write_run(folder / "runs", 1, tag="-debug", overrides=["env=Thing", "debug=fast"])
    return page_of(folder)


def middle(browser: Browser, selector: str) -> tuple[float, float]:
    """The middle of an element in the window, once it is drawn and in view."""
    browser.until(f"document.querySelector({selector!r}) !== null")
    box, before = [0.0], None
    while box != before:  # charts that are drawn elsewhere move it
        browser.ask(f"document.querySelector({selector!r}).scrollIntoView({{block: 'center'}})")
        time.sleep(0.2)
        before, box = (
            box,
            browser.ask(
                f"(({{x, y, width, height}}) => [x, y, width, height])"
                f"(document.querySelector({selector!r}).getBoundingClientRect())"
            ),
        )
    return box[0] + box[2] / 2, box[1] + box[3] / 2


def open_page(browser: Browser, page: Path, width: int = 1440, theme: str = "light") -> None:
    browser.problems.clear()
    browser.show(page.as_uri(), width, theme)


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 768, 1440])
def test_the_page_fits_and_can_be_read(width: int, theme: str, page: Path, browser: Browser) -> None:
    assert page.stat().st_size < 3_000_000
    open_page(browser, page, width, theme)
    ground = browser.ask("getComputedStyle(document.body).backgroundColor")
    assert (ground == "rgb(255, 255, 255)") == (theme == "light")
    # The returns are in view, in the table of experiments and in one of runs.
    for column in ("#e1 .scroll th:nth-child(2)", ".scroll th:nth-child(2)"):
        middle(browser, column)
        right = browser.ask(f"document.querySelector({column!r}).getBoundingClientRect().right")
        assert "return" in browser.ask(f"document.querySelector({column!r}).textContent")
        assert 0 < right <= width
    browser.ask("document.querySelectorAll('details').forEach((each) => (each.open = true))")
    for part in ("#e1 .small", "#e1 .small .uplot", "#e1 figure"):
        middle(browser, part)
    x, y = middle(browser, "#e1 .u-over")
    browser.move(x, y)
    title = "document.querySelector('#e1 .u-title').textContent"
    browser.until(f"{title} !== 'eval/return'")
    named = r"(seed \d|IQM of 10 seeds|.*PPO|random policy): [\d.,]+ at [\d,]+"
    assert re.fullmatch(named, browser.ask(title))
    browser.move(0, 0)
    browser.until(f"{title} === 'eval/return'")
    assert browser.ask("document.documentElement.scrollWidth - document.documentElement.clientWidth") <= 0
    assert browser.ask(FAINT) == []
    assert browser.problems == []


def test_the_checks_of_contrast_and_of_the_console_find_mistakes(page: Path, browser: Browser) -> None:
    open_page(browser, page)
    browser.ask("document.documentElement.style.setProperty('--faint', '#aaa')")
    assert browser.ask(FAINT)
    browser.ask("void setTimeout(() => { throw new Error('planted') })")
    browser.ask("new Promise((resume) => setTimeout(resume, 100))")
    assert "planted" in "".join(browser.problems)
    # The policy of the page lets no script but its own run.
    browser.ask("document.body.appendChild(document.createElement('script')).textContent = 'window.evil = 1'")
    assert browser.ask("window.evil === undefined")
    assert "Content Security Policy" in "".join(browser.problems)
    browser.problems.clear()


def test_a_name_in_the_legend_hides_its_line_with_its_band(page: Path, browser: Browser) -> None:
    open_page(browser, page)
    hidden = "document.querySelectorAll('#e1 .u-legend .u-off').length"
    name = "#e1 .u-legend .u-series:nth-child(11) th"
    # Of a band, which are paler than lines.
    pixels = """((canvas) => canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data
      .filter((value, i) => i % 4 === 3 && value === 40).length)(document.querySelector("#e1 canvas"))"""
    middle(browser, "#e1 figure")
    x, y = middle(browser, name)
    assert browser.ask(f"document.querySelector({name!r}).textContent") == "IQM of 10 seeds"
    assert browser.ask(hidden) == 0
    before = browser.ask(pixels)
    for kind in ("mousePressed", "mouseReleased"):
        browser.move(x, y, kind, button="left", clickCount=1)
    assert browser.ask(hidden) == 1
    browser.until(f"{pixels} < {before} / 2")


def test_the_table_is_sorted_and_filtered(page: Path, browser: Browser) -> None:
    open_page(browser, page)
    names = "[...document.querySelectorAll('.scroll')[0].querySelectorAll('td a')].filter((each) => "
    names += "each.checkVisibility()).map((each) => each.textContent.split('.')[0])"
    assert browser.ask(names) == ["1", "2", "3", "4", "5", "6"]
    returns = "document.querySelectorAll('.scroll')[0].querySelectorAll('th button')[1]"
    browser.ask(f"{returns}.click()")
    best = browser.ask(names)
    assert best[-1] == "6"  # has no return
    browser.ask(f"{returns}.click()")
    assert browser.ask(names) == [*best[:-1][::-1], "6"]
    assert browser.ask("document.querySelectorAll('th[aria-sort=ascending]').length") == 1
    typed = "(text) => { const box = document.querySelector('input'); box.value = text; box.oninput(); }"
    browser.ask(f"({typed})('{LONG}')")
    assert browser.ask(names) == ["6"]
    browser.ask(f"({typed})('')")
    assert len(browser.ask(names)) == 6


def test_numbers_that_are_very_small_or_large_are_drawn_and_told_whole(
    tmp_path: Path, browser: Browser
) -> None:
    run = write_run(tmp_path / "runs", 1, [1e17, 1e17 + 32, 1e17])
    rows = [*map(json.loads, (run / paths.METRICS).read_text().splitlines())]
    for i, row in enumerate(rows):
        row |= {
            "env_steps": 2**62 + 1024 * i,
            "constant": 1e30,
            "ratio": 1e-7 * i,
            "loss": -1234.5,
            "kl": 0.1,
        }
    (run / paths.METRICS).write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    written = (
        "window.written = []; CanvasRenderingContext2D.prototype.fillText = (text) => written.push(text)"
    )
    source = browser.call("Page.addScriptToEvaluateOnNewDocument", source=written)
    try:
        open_page(browser, page_of(tmp_path))
        browser.ask("document.querySelectorAll('details').forEach((each) => (each.open = true))")
        middle(browser, "#e1 .small > :last-child .uplot")
        marks = browser.ask("written")
    finally:
        browser.call("Page.removeScriptToEvaluateOnNewDocument", identifier=source["identifier"])
    assert browser.problems == []
    assert {"1E-7", "1E17", "1E30"} <= {*marks}
    assert max(map(len, marks)) <= len("environment steps")
    browser.move(*middle(browser, "#e1 .u-over"))
    browser.until("/: 1E17 at 4.6117E18$/.test(document.querySelector('#e1 .u-title').textContent)")


def test_a_changed_theme_is_followed_at_once(page: Path, browser: Browser) -> None:
    open_page(browser, page)
    middle(browser, ".uplot")
    pixel = "document.querySelector('canvas')?.toDataURL()"
    light = browser.ask(pixel)
    browser.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark"}])
    browser.until(f"{pixel} !== {json.dumps(light)}")
    assert browser.problems == []


@pytest.mark.long
def test_two_hundred_runs_are_painted_within_two_seconds(tmp_path: Path, browser: Browser) -> None:
    write_many(tmp_path / "runs", 200)
    open_page(browser, page_of(tmp_path))
    paint = "(performance.getEntriesByName('first-contentful-paint')[0] ?? {}).startTime"
    browser.until(f"{paint} > 0")
    assert browser.ask(paint) < 2000
    assert browser.problems == []


@pytest.mark.long
def test_a_browser_shows_a_run_that_has_changed_and_keeps_its_place(tmp_path: Path, browser: Browser) -> None:
    run = write_run(tmp_path / "runs", 1, [1.0, 2.0])
    watching = Started(ROOT, tmp_path, tmp_path / "log", "report", "watch=true")
    watching.until(lambda: "until Ctrl-C" in watching.said)
    (address,) = re.findall(r"http://127\.0\.0\.1:\d+/[\w-]{32}(?= )", watching.said)
    browser.problems.clear()
    browser.show(address)
    browser.ask("document.querySelector('details').open = true")
    assert not browser.ask("document.body.textContent.includes('777333')")
    record: dict[str, Any] = json.loads((run / paths.RECORD).read_text())
    (run / paths.RECORD).write_text(json.dumps(record | {"env_steps": 777333}))
    browser.until("document.body?.textContent.includes('777333')")
    browser.until("document.readyState === 'complete'")
    assert browser.ask("document.querySelector('details').open")
    middle(browser, ".uplot")
    assert browser.problems == []
    watching.kill()
