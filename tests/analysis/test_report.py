"""The report says what the run folders say, of the runs that it says, and trusts none of their words."""

from __future__ import annotations

import csv
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import time
import urllib.request
from base64 import b64decode, b64encode
from collections.abc import Callable
from email.utils import parsedate_to_datetime
from hashlib import sha256
from html import unescape
from io import BytesIO
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from conftest import ROOT, Started, full_disk, git, until, write_run, write_video
from PIL import Image

from runlab.__main__ import main
from runlab.analysis import aggregate, figures, published, stats
from runlab.analysis.commands import report as report_module
from runlab.analysis.commands.report import ReportPage, make_report, write_curves, write_table
from runlab.analysis.experiments import find_experiments
from runlab.analysis.figures import Panel
from runlab.analysis.page_server import PageServer
from runlab.analysis.runs import load_runs
from runlab.run import paths
from runlab.run.git.snapshot import take_snapshot

EVIL = "<script>document.title = 'owned'</script><img src=x onerror=\"document.title='owned'\">"


def reported(runs_dir: Path) -> ReportPage:
    """The report about all runs in a folder."""
    return make_report(sorted(runs_dir.glob("*/*")), "runs/*/*")


def text_of(html: str) -> str:
    """The text that a reader sees: without styles, scripts and tags, entities resolved."""
    html = re.sub(r"<(style|script).*?</\1>", " ", html, flags=re.DOTALL)
    return re.sub(r"\s+", " ", unescape(re.sub(r"<[^>]*>", " ", html)))


def panels(report: ReportPage, key: str) -> dict[str, Panel]:
    """The panels of the chart of a name, by title."""
    chart = next(chart for chart in report.charts if chart.key == key)
    return {panel.title: panel for panel in chart.panels}


def page_panels(report: ReportPage) -> list[dict[str, Any]]:
    """The panels in the page, read as strictly as a browser does."""
    texts = re.findall(r'<script type="application/json">(.*?)</script>', report.html)
    return [panel for text in texts for panel in json.loads(text, parse_constant=pytest.fail)["panels"]]


def test_curves_are_of_all_runs_and_statistics_of_those_that_count(tmp_path: Path) -> None:
    write_run(tmp_path, 1, [9.0, 9.0], tag="-old", started_at="2025-01-01T00:00:00.000Z")
    for seed in (1, 2, 3):
        write_run(tmp_path, seed, [0.0, 10.0 * seed])
    write_run(tmp_path, 4, [7.0, 7.0], status="failed", error="no luck")
    report = reported(tmp_path)
    drawn = {line.name: line for line in panels(report, "001-ppo-Thing")["eval/return"].lines}
    assert drawn["IQM of 3 seeds"].points == [(100, 0.0), (200, 20.0)]
    assert drawn["seed 2"].points == [(100, 0.0), (200, 20.0)]
    assert {"seed 4, not counted: failed", "seed 1, not counted: finished"} < set(drawn)
    losses = panels(report, "001-ppo-Thing-metrics")["loss/policy"].lines
    assert [line.points[-1][1] for line in losses] == [-9.0, -10.0, -20.0, -30.0, -7.0]
    text = text_of(report.html)
    assert " 10, 20, 30 " in text
    assert "with fewer than 5 seeds" in text
    assert "no luck" in text


def test_returns_of_any_size_leave_a_report_and_are_short(tmp_path: Path) -> None:
    for seed in (1, 2, 3):
        write_run(tmp_path, seed, [1.0, seed * 1e59], env="Large")
        write_run(tmp_path, seed, [1.0, seed * 1e160], env="Larger")
        write_run(tmp_path, seed, [1.0, seed * 1e-90], env="Small")
    report = reported(tmp_path)
    assert page_panels(report)
    text = text_of(report.html)
    assert "1e+59, 2e+59, 3e+59" in text
    assert "no run of it has finished with a return" in text


def test_long_curves_are_thinned_and_more_so_in_small_panels(tmp_path: Path) -> None:
    write_run(tmp_path, 1, [float(i) for i in range(1000)])
    report = reported(tmp_path)
    for key, title, most in (("", "eval/return", 200), ("-metrics", "loss/policy", 100)):
        (line,) = panels(report, f"001-ppo-Thing{key}")[title].lines
        assert most <= len(line.points) <= most + 1
        assert line.points[-1][0] == 100_000


def test_experiments_of_one_environment_are_drawn_together(tmp_path: Path) -> None:
    write_run(tmp_path, 1, [1.0, 2.0])
    write_run(tmp_path, 1, [1.0, 8.0], tag="-b", config={"algo": {"gamma": 0.5}})
    report = reported(tmp_path)
    lines = panels(report, "all-Thing-eval-return")["eval/return"].lines
    assert [(line.name, line.points[-1][1]) for line in lines] == [
        ("1. ppo default (n=1)", 2.0),
        ("2. ppo gamma=0.5 (n=1)", 8.0),
    ]
    assert [line["band"] for line in page_panels(report)[0]["lines"]] == [None, None]


def test_a_seed_without_rows_is_named_where_it_costs_the_curve(tmp_path: Path) -> None:
    for seed in (1, 2, 3):
        write_run(tmp_path, seed, [1.0, 2.0])
    text = "no IQM of eval/return is drawn: run-2 has no rows of it"
    assert text not in text_of(reported(tmp_path).html)
    (tmp_path / "ppo-Thing" / "run-2" / paths.METRICS).unlink()
    assert text in text_of(reported(tmp_path).html)
    write_run(tmp_path, 2, [1.0, 2.0], tag="-b")
    row = '{"env_steps": 77, "eval/return": 2.0}\n'
    (tmp_path / "ppo-Thing" / "run-2-b" / paths.METRICS).write_text(row)
    assert "no IQM of eval/return is drawn: its seeds share no step" in text_of(reported(tmp_path).html)


def test_experiments_are_called_by_the_words_of_their_commands(tmp_path: Path) -> None:
    write_run(tmp_path, 1, tag="-a", overrides=["env=Thing", "experiment=fast", "trace=off"])
    for number, tag in enumerate(("-b", "-c")):  # of these two the words say the same
        config = {"algo": {"gamma": 0.9 - number / 10}, "name": "two"}
        write_run(tmp_path, 2, tag=tag, config=config)
    names = [each.by for each in reported(tmp_path).experiments]
    assert names == ["experiment=fast", "name=two", "name=two, gamma=0.8"]


def test_films_of_experiments_are_shown_and_linked_from_where_the_page_lies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = [write_run(tmp_path / "runs", seed, started_at=f"2026-01-0{seed}") for seed in (1, 2)]
    for run, steps in ((runs[0], 300), (runs[1], 100), (runs[1], 200), (runs[1], 400)):
        (run / paths.VIDEOS).mkdir(exist_ok=True)
        write_video(paths.video_path(run, steps), shade=200)
    paths.video_path(runs[1], 400).write_bytes(b"cut off")
    os.mkfifo(paths.video_path(runs[1], 500))  # whose opening would wait for a writer
    # A list of other files, which would be played.
    paths.video_path(runs[1], 600).write_text("ffconcat version 1.0\nfile step_100.mp4\n")
    with av.open(str(paths.video_path(runs[1], 700)), "w", format="mp4") as container:
        sound = container.add_stream("aac", rate=44100)  # and no picture
        silence = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), "fltp", layout="mono")
        silence.rate = 44100
        container.mux(sound.encode(silence))
        container.mux(sound.encode(None))
    write_video(paths.video_path(runs[1], 800), frames=1, size=(4, 1024))  # more than the limit below
    good = paths.video_path(runs[1], 200).read_bytes()
    for steps, old, new in ((900, b"avc1", b"\0\0\0\0"), (1000, b"Lavf", b"\xff" * 4)):  # codec, and title
        assert old in good
        paths.video_path(runs[1], steps).write_bytes(good.replace(old, new))
    monkeypatch.setattr(report_module, "_MOST_PIXELS", 4000)
    (tmp_path / "pages").mkdir()
    html = make_report(runs, "runs/*/*", tmp_path / "pages").html
    gallery = re.findall(r'<a href="([^"]*mp4)"><img [^>]*src="data:image/jpeg;base64,([^"]*)"', html)
    newest = ["../runs/ppo-Thing/run-2/videos/step_200.mp4", "../runs/ppo-Thing/run-1/videos/step_300.mp4"]
    assert [link for link, _ in gallery] == newest
    with Image.open(BytesIO(b64decode(gallery[0][1]))) as picture:
        assert (picture.format, picture.size) == ("JPEG", (48, 32))
    assert "seed 2, after 200 steps" in text_of(html)
    write_run(tmp_path / "bare", 1)
    assert '<div class="films">' not in reported(tmp_path / "bare").html


def test_debugging_and_trials_of_searches_are_folded_away(tmp_path: Path) -> None:
    def write(tag: str, gamma: float, **record: Any) -> None:
        write_run(tmp_path, 1, tag=tag, config={"algo": {"gamma": gamma}}, **record)

    search = ["python", "-m", "former_name", "search", "sweep=rates"]
    write("-trial", 0.1, command_line=search, overrides=["algo.gamma=0.1"])
    write("-debug", 0.2, overrides=["debug=fast"])
    report = reported(tmp_path)
    assert {each.by for each in report.experiments} == {"gamma=0.1", "debug=fast"}
    assert "<summary>2 experiments of" not in report.html
    write("-own", 0.3, command_line=["python", "-m", "runlab", "train", "search"])
    report = reported(tmp_path)
    shown, _, folded = report.html.partition("<details><summary>2 experiments of")
    assert ("run-1-own" in shown, "run-1-own" in folded) == (True, False)
    assert all(name in folded and name not in shown for name in ("run-1-trial", "run-1-debug"))
    assert [chart.key for chart in report.charts] == ["001-ppo-Thing", "001-ppo-Thing-metrics"]
    write("-seed", 0.1, overrides=["algo.gamma=0.1"])  # a run of a trial's configuration, and no trial
    assert len(reported(tmp_path).experiments) == 2


def write_both(runs_dir: Path, returns: dict[str, list[float]], tag: str, gamma: float) -> None:
    """Five seeds of an experiment in two environments of the table of references."""
    for env, last in returns.items():
        for seed, value in enumerate(last):
            config = {"env": {"id": f"{env}-v1"}, "algo": {"gamma": gamma}}
            write_run(runs_dir, seed, [0.0] * 999 + [value], env=env, tag=tag, config=config)


def test_scores_over_environments_are_normalised_and_compared(tmp_path: Path) -> None:
    write_both(tmp_path, {"CartPole": [100.0] * 5, "Pendulum": [-1000.0] * 5}, "-a", 0.99)
    assert "Across environments" in reported(tmp_path).html
    write_both(tmp_path, {"CartPole": [400.0] * 5, "Pendulum": [-1000.0, *[-500.0] * 4]}, "-b", 0.5)
    experiments = reported(tmp_path).experiments
    a, b = aggregate.scores(experiments)
    assert (a.name, b.name, a.envs) == ("ppo default", "ppo gamma=0.5", ["CartPole", "Pendulum"])
    parts = []
    for each in experiments[::2]:
        assert each.standing is not None
        assert each.standing.random is not None
        low, par = each.standing.random, float(np.median(each.standing.published))
        parts += [(value - low) / (par - low) for value in each.returns]
    assert a.value.value == pytest.approx(stats.interval(parts).value)
    assert a.value.low == a.value.high == a.value.value
    assert b.value.low < b.value.value
    (better,) = aggregate.improvements(experiments)
    assert better.name == "ppo gamma=0.5 better than ppo default"
    # Certain in CartPole; in Pendulum one run of five is equal.
    assert better.value.value == pytest.approx((1.0 + 0.9) / 2)
    assert 0.8 < better.value.low < 0.95 < better.value.high == 1.0


@pytest.mark.parametrize("par", [-200.0, -201.0])
def test_published_returns_no_better_than_random_normalise_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, par: float
) -> None:
    """A fork's table may have MountainCar, where PPO gets the return of the random policy."""
    rows = list(published.references())
    rows += [rows[0]._replace(env="MountainCar", env_version="v1", algo="random", return_mean=-200.0)]
    rows += [rows[-1]._replace(algo="ppo", steps=100_000, return_mean=par)]
    monkeypatch.setattr(published, "references", lambda: tuple(rows))
    write_both(tmp_path, dict.fromkeys(("CartPole", "MountainCar", "Pendulum"), [-150.0] * 5), "-a", 0.99)
    runs, _ = load_runs(sorted(tmp_path.glob("*/*")))
    (score,) = aggregate.scores(find_experiments(runs))
    assert score.envs == ["CartPole", "Pendulum"]


def test_only_what_is_alike_is_put_together_over_environments(tmp_path: Path) -> None:
    """Labels say what differs; returns after other numbers of steps are no comparison."""
    for env, zeta in (("CartPole", 1), ("Pendulum", 2)):
        keys = {"clip": 1, "gamma": 0.8, "lambda": 2, "tau": 3, "zeta": zeta}
        for tag, algo in (("-a", {}), ("-b", keys), ("-c", {"gamma": 0.5})):
            for seed in range(1 + (env == "Pendulum"), 4):
                returns = [0.0] * (99 if tag == "-c" else 999) + [9.0]
                config = {"env": {"id": f"{env}-v1"}, "algo": algo}
                write_run(tmp_path, seed, returns, env=env, tag=tag, config=config)
    experiments = reported(tmp_path).experiments
    changed = [
        [None, f"clip=1, gamma=0.8, lambda=2, tau=3, zeta={zeta}", "gamma=0.5, total_env_steps=10000"]
        for zeta in (1, 2)
    ]
    assert [each.by for each in experiments] == [*changed[0], *changed[1]]
    (score,) = aggregate.scores(experiments)
    assert (score.name, score.envs) == ("ppo default", ["CartPole (3 seeds)", "Pendulum (2 seeds)"])
    assert list(aggregate.improvements(experiments)) == []


def test_searches_are_drawn_with_the_best_so_far_and_importances(tmp_path: Path) -> None:
    write_run(tmp_path, 1)
    outcomes = [(0, "COMPLETE", 5.0), (2, "COMPLETE", 9.0), (1, "PRUNED", 7.0), (3, "COMPLETE", 6.0)]
    outcomes += [(4, "COMPLETE", -1.7e308), (5, "COMPLETE", 1.7e308)]  # whose distance is no number
    trials = [{"number": n, "state": state, "value": value, "params": {}} for n, state, value in outcomes]
    content = {"words": ["algo=ppo"], "sweep": "rates", "trials": trials, "importances": {"algo.gamma": 0.75}}
    for name, text in (("search-a", json.dumps(content)), ("search-b", "[]")):
        folder = tmp_path / paths.SWEEPS / name
        folder.mkdir(parents=True)
        (folder / paths.SEARCH).write_text(text)
    report = reported(tmp_path)
    history, importance = panels(report, "search-a").values()
    assert {line.name: line.points for line in history.lines} == {
        "return of a trial": [(0, 5.0), (2, 9.0), (3, 6.0)],
        "pruned": [(1, 7.0)],
        "best so far": [(0, 5.0), (2, 9.0), (3, 9.0)],
    }
    assert importance.bars == {"algo.gamma": 0.75}
    assert "Search sweep=rates algo=ppo: 6 trials" in text_of(report.html)
    assert history.title in {panel["title"] for panel in page_panels(report)}
    assert "algo.gamma" in drawn(report.charts[-1], tmp_path)
    assert any("search-b" in problem for problem in report.problems)


def drawn(chart: figures.Chart, folder: Path) -> str:
    """The SVG of a chart."""
    (file,) = figures.write([chart], folder, ["svg"])
    return file.read_text()


def request(server: PageServer, path: str, *lines: str, method: str = "GET") -> tuple[int, bytes]:
    """Status and content of the answer to a request with these header lines, over a socket."""
    with socket.create_connection(("127.0.0.1", server.server_port), timeout=10) as connection:
        connection.sendall("\r\n".join([f"{method} {path} HTTP/1.0", *lines, "", ""]).encode())
        with connection.makefile("rb") as answer:
            head, _, content = answer.read().partition(b"\r\n\r\n")
    return int(head.split()[1]), content


def test_a_page_is_served_at_its_address_and_nothing_else_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "report.html").write_text("a file")
    (tmp_path / ".secret").write_text("a file")
    with PageServer() as server, PageServer() as other:
        server.show("first")
        at = f"127.0.0.1:{server.server_port}"
        host, path = f"Host: {at}", f"/{server.token}"
        assert (server.url, len(server.token)) == (f"http://{at}{path}", 32)
        assert server.token != other.token
        status, page = request(server, path, host)
        assert (status, page) == (200, b"first")
        assert request(server, path, f"Host: localhost:{server.server_port}") == (200, page)
        assert request(server, path, host, f"Origin: http://{at}") == (200, page)
        assert request(server, path, host, method="HEAD") == (200, b"")
        with urllib.request.urlopen(server.url) as answer:
            assert abs(parsedate_to_datetime(answer.headers["Last-Modified"]).timestamp() - time.time()) < 60
        wrong = ("/", f"{path}/", path[:-1], f"{path}/../report.html", "/report.html", "/.secret", "/a")
        for other_path in wrong:
            status, content = request(server, other_path, host)
            assert (status, b"a file" in content, b"first" in content) == (404, False, False)
        foreign = [
            *((), ("Host: evil.example",), (f"Host: evil.example:{server.server_port}",), (host, host)),
            *((host, "Origin: http://evil.example"), (host, "Origin: null"), ("Host: 127.0.0.1",)),
        ]
        for lines in foreign:
            status, content = request(server, path, *lines)
            assert (status, b"first" in content) == (403, False)
        assert request(server, path, host, method="POST")[0] == 501
        assert server.server_address[0] == "127.0.0.1"


@pytest.mark.long
def test_a_watched_report_is_written_again_when_a_run_has_changed(tmp_path: Path) -> None:
    """Also after a moment without a run."""
    run = write_run(tmp_path / "runs", 1, [1.0, 2.0])
    watching = Started(ROOT, tmp_path, tmp_path / "log", "report", "watch=true")
    watching.until(lambda: "until Ctrl-C" in watching.said)
    (address,) = re.findall(r"http://127\.0\.0\.1:\d+/[\w-]{32}(?= )", watching.said)
    assert "777333111" not in text_of(urllib.request.urlopen(address).read().decode())
    (tmp_path / "runs").rename(tmp_path / "away")
    watching.until(lambda: "no run folders there" in watching.said)
    assert "run-1" in urllib.request.urlopen(address).read().decode()
    with (tmp_path / "away" / run.relative_to(tmp_path / "runs") / paths.METRICS).open("a") as file:
        file.write('{"env_steps": 777333111, "wall_time_s": 3, "eval/return": 3.0}\n')
    (tmp_path / "away").rename(tmp_path / "runs")
    watching.until(lambda: watching.said.count("written") == 2)
    until(lambda: "777333111" in text_of(urllib.request.urlopen(address).read().decode()), 10)
    watching.process.send_signal(signal.SIGINT)
    watching.end(0)


def test_an_experiment_without_a_row_has_no_empty_axes(tmp_path: Path) -> None:
    write_run(tmp_path, 1, [], status="failed")
    report = reported(tmp_path)
    assert (report.charts, "No run has logged anything." in report.html) == ([], True)


def test_published_returns_are_drawn_and_named(tmp_path: Path) -> None:
    write_run(tmp_path, 1, [0.0] * 999 + [400.0], env="CartPole", config={"env": {"id": "CartPole-v1"}})
    report = reported(tmp_path)
    assert [*panels(report, "001-ppo-CartPole")["eval/return"].levels] == ["published, PPO", "random policy"]
    assert "published for PPO" in text_of(report.html)
    assert "Across environments" not in report.html
    (curve,) = panels(report, "001-ppo-CartPole")["eval/return"].lines
    assert (len(curve.points), curve.points[-1]) == (201, (100_000, 400.0))  # thinned, with its end
    assert "published, PPO" in drawn(report.charts[0], tmp_path)


def test_figures_are_sharp_vector_too_and_the_same_each_time(tmp_path: Path) -> None:
    for seed in (1, 2):
        write_run(tmp_path / "runs", seed, [1.0, 2.0 * seed], config={"algo": {"name": "$x"}})
    report = reported(tmp_path / "runs")
    folders = [tmp_path / "one", tmp_path / "two"]
    for folder in folders:
        folder.mkdir()
        figures.write(report.charts, folder)
        write_curves(report.experiments, folder / "curves.csv")
    files = sorted(path.name for path in folders[0].iterdir())
    name = "001--x-Thing"
    assert {f"{name}.{kind}" for kind in ("png", "svg", "pdf")} | {f"{name}-metrics.svg"} <= set(files)
    assert (folders[0] / f"{name}.pdf").read_bytes().startswith(b"%PDF-")
    assert all((folders[0] / file).read_bytes() == (folders[1] / file).read_bytes() for file in files)
    with (folders[0] / "curves.csv").open(newline="") as file:
        names = ("seed", "metric", "env_steps", "return")
        points = [tuple(map(row.get, names)) for row in csv.DictReader(file)]
    expected = [("1", "100", "1.0"), ("1", "200", "2.0"), ("2", "100", "1.0"), ("2", "200", "4.0")]
    assert points == [(seed, "eval/return", steps, value) for seed, steps, value in expected]


@pytest.mark.parametrize("sign", ["=", "+", "-", "@"])
def test_no_name_in_the_curves_is_a_formula(tmp_path: Path, sign: str) -> None:
    evil = f'{sign}HYPERLINK("x")'
    git = {"ref": "x", "tree": None, "base_commit": evil, "dirty": False}
    write_run(tmp_path, 1, [-5.0], env=evil, config={"algo": {"name": evil}}, git=git)
    write_run(tmp_path, 2, [-5.0], git={})
    with write_curves(reported(tmp_path).experiments, tmp_path / "curves.csv").open(newline="") as file:
        plain, row = sorted(csv.DictReader(file), key=lambda row: row["algo"] != "ppo")
    assert (row["algo"], row["env"], row["return"]) == (f"'{evil}", f"'{evil}", "-5.0")
    assert not [value for value in row.values() if value.startswith(sign) and value != "-5.0"]
    assert plain["commit"] == "-"


def test_the_command_puts_the_page_beside_the_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_run(Path("runs"), 1)
    (write_run(Path("runs"), 3) / paths.RECORD).write_text("{")
    assert main(["report", "figures=papers"]) == 0
    output = capsys.readouterr()
    assert output.out.startswith("written: runs/report.html (")
    assert "2 figures as PNG, SVG and PDF, table.tex and curves.csv, in papers" in output.out
    assert "run-3" in output.err
    assert Path("runs/report.html").read_text().startswith("<!doctype html>")


def test_a_table_for_latex_has_the_results(tmp_path: Path) -> None:
    for seed in range(5):
        write_run(tmp_path / "runs", seed, [0.0, -1500.0])
    by = "50%_of $x^2 \\\\#1 {~&}"
    write_run(tmp_path / "runs", 1, [2.0], tag="-b", config={"name": by})
    write_run(tmp_path / "runs", 1, tag="-c", status="failed", config={"algo": {"gamma": 0.5}})
    episodes = {"episode/return": 3.0}
    other = {"algo": {"gamma": 0.9}}
    write_run(tmp_path / "runs", 1, [0.0, 3.0], tag="-d", config=other, final_metrics=episodes)
    report = reported(tmp_path / "runs")
    assert text_of(report.html).count("3 (training episodes)") == 1
    file = write_table(report.experiments, tmp_path / "table.tex")
    rows = [line for line in file.read_text().splitlines() if line.startswith("Thing")]
    escaped = (
        r"name=50\%\_of \$x\textasciicircum{}2 \textbackslash{}\textbackslash{}\#1 \{\textasciitilde{}\&\}"
    )
    assert rows == [
        r"Thing & ppo & default & 5 & 200 & $-$1,500 ($-$1,500 to $-$1,500) \\",
        rf"Thing & ppo & {escaped} & 1 & 100 & 2 \\",
        r"Thing & ppo & gamma=0.9 & 1 & 200 & 3 (training episodes) \\",
    ]


def test_a_full_disk_leaves_the_former_figures_and_tables(tmp_path: Path) -> None:
    write_run(tmp_path / "runs", 1)
    report, folder = reported(tmp_path / "runs"), tmp_path / "papers"
    folder.mkdir()
    writers: list[Callable[[], object]] = [
        lambda: figures.write(report.charts, folder, ["png"]),
        lambda: write_curves(report.experiments, folder / "curves.csv"),
        lambda: write_table(report.experiments, folder / "table.tex"),
    ]
    for write in writers:
        write()
    former = {path: path.read_bytes() for path in folder.iterdir()}
    for write in writers:
        with full_disk(10), pytest.raises(OSError, match="File too large"):
            write()
    assert {path: path.read_bytes() for path in folder.iterdir()} == former


@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="no pdflatex")
def test_latex_sets_the_table(tmp_path: Path) -> None:
    write_run(tmp_path / "runs", 1, config={"name": "".join(map(chr, range(33, 127)))})
    for sign in "[*":  # after \midrule and \\, which take them as arguments
        write_run(tmp_path / "runs", 1, tag=f"-{ord(sign)}", env=f"{sign}a]")
    write_table(reported(tmp_path / "runs").experiments, tmp_path / "table.tex")
    page = r"\documentclass{article}\usepackage{booktabs}\begin{document}\input{table}\end{document}"
    (tmp_path / "page.tex").write_text(page)
    command = ["pdflatex", "-halt-on-error", "page.tex"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stdout
    assert (tmp_path / "page.pdf").exists()


def test_what_a_report_writes_is_no_change_of_the_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where it is committed and written again. A file that somebody has edited since is a change."""
    repo = tmp_path / "project"
    for seed in (1, 2):
        write_run(repo / "runs", seed)
    (repo / ".gitignore").write_text("/runs/\n")
    git(repo, "init", "-q")
    git(repo, "add", "-A")
    git(repo, "commit", "-qm", "first")
    monkeypatch.chdir(repo)
    monkeypatch.setattr(paths, "PROJECT", repo)

    def write() -> None:
        assert main(["report", "out=page.html", "figures=papers/figures"]) == 0

    def snapshot() -> tuple[bool | None, bool]:
        taken = take_snapshot(repo)
        return taken.dirty, taken.tree == git(repo, "rev-parse", "HEAD^{tree}").strip()

    write()
    assert len(git(repo, "status", "--porcelain", "-uall").splitlines()) == 1 + 2 * 3 + 2
    assert snapshot() == (False, True)
    git(repo, "add", "-A")
    git(repo, "commit", "-qm", "figures")
    (repo / "page.html").write_text("of an earlier version")
    assert snapshot() == (True, False)
    with (repo / "runs" / "ppo-Thing" / "run-1" / paths.METRICS).open("a") as file:
        file.write('{"env_steps": 300, "eval/return": 9.0}\n')
    write()
    assert " M papers/figures/curves.csv" in git(repo, "status", "--porcelain")
    assert snapshot() == (False, True)
    (repo / "papers" / "figures" / "table.tex").write_text("my own")
    (repo / "papers" / "figures" / "plot.py").write_text("print()")
    assert snapshot() == (True, False)


def test_text_of_run_folders_is_text_and_the_page_asks_no_server(tmp_path: Path) -> None:
    run = write_run(tmp_path, 1, status=EVIL, error=EVIL, config={"note": EVIL, "algo": {"name": EVIL}})
    row = {"env_steps": 1, "eval/return": 1.0, f"</script><!--{EVIL}": 2.0}
    (run / paths.METRICS).write_text(f"{json.dumps(row)}\n")
    write_run(tmp_path, 2, error="\ud800 \x00 \u202e")
    html = reported(tmp_path).html
    assert html.encode("utf-8")
    assert "owned" in html
    *data, script = re.findall(r"<script[^>]*>(.*?)</script>", html, flags=re.DOTALL)
    assert html.count("<script") == len(data) + 1 == html.count('<script type="application/json">') + 1
    panels = [panel for each in data for panel in json.loads(each)["panels"]]
    assert len(panels) > 2
    assert f"</script><!--{EVIL}" in {panel["title"] for panel in panels}
    digest = b64encode(sha256(script.encode()).digest()).decode()
    assert f"default-src 'none'; connect-src 'self'; script-src 'sha256-{digest}'; style-src" in html
    assert not re.search(r"<img (?!loading)|https?:", html.replace(script, ""))
    assert set(re.findall(r"https?://[^ )]+", script)) == {"https://github.com/leeoniya/uPlot"}


def test_the_library_in_the_page_has_its_version_and_licence(tmp_path: Path) -> None:
    """The file is that of the package uplot of npm, byte for byte."""
    folder = Path(report_module.__file__).parents[1] / "uplot"
    library = (folder / "uPlot.iife.min.js").read_text()
    assert (
        sha256(library.encode()).hexdigest()
        == "19c8d4c6ad88929a79f4ae49d6f7161566dfd0ba3d15cc495e974f787eb78f1f"
    )
    write_run(tmp_path, 1)
    html = reported(tmp_path).html
    for text in ("(v1.6.32)", "The MIT License (MIT)", "Copyright (c) 2022 Leon Sorokin", library):
        assert text in html


def test_a_wide_interval_of_few_seeds_does_not_hide_the_curves(tmp_path: Path) -> None:
    curve = figures.Line("PPO", [(0, 1.0), (5, 9.0), (10, 9.0)], "#000000", [(-900.0, 900.0)] * 3)
    svg = drawn(figures.Chart("key", "caption", [figures.Panel("Ant", [curve])]), tmp_path)
    ticks = [float(tick) for tick in re.findall(r"<!-- ([\d.]+) -->", svg)]
    assert 9 < max(ticks) < 20
