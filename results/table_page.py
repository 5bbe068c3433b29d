"""The page of results and its figures, from runs.csv and evaluations.csv: `python results/table_page.py`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from statistics import median

import numpy as np
from table import FOLDER, POLICIES, ROOT, Evaluation, Trained, cells, exported_seed, read, row_label

from runlab.analysis import stats
from runlab.analysis.aggregate import resampled
from runlab.analysis.figures import COLORS, Chart, Line, Panel, write
from runlab.analysis.published import RANDOM, published_near, references, show

PAGE = ROOT / "docs" / "results.md"
IMAGES = ROOT / "docs" / "images"
FEWEST_ENVIRONMENTS = 5  # for scores over all environments
Table = Mapping[tuple[str, str, int], list[Trained]]


def page() -> None:
    """Write the page and its figures."""
    PAGE.write_text(page_text(), encoding="utf-8")
    write(figures(cells(read(Trained))), IMAGES, kinds=("png", "svg"))


def page_text() -> str:
    """The page, from `page.md` and the two files."""
    table = cells(read(Trained))
    text = (FOLDER / "page.md").read_text(encoding="utf-8")
    parts = {
        "ROWS": "\n\n".join(
            f"## {algo.upper()}\n\n{rows(table, algo)}"
            for algo in dict.fromkeys(name for name, _, _ in table)
        ),
        "TOGETHER": together(table),
        "RUNS": "\n".join(f"* {line}" for line in run_lines(table)),
        "POLICIES": "\n".join(policy_lines(table)),
        "PUBLISHED": "\n".join(published_lines(table)),
    }
    for name, part in parts.items():
        text = text.replace(f"<!-- {name} -->", part)
    return text


def rows(table: Table, algo: str) -> str:
    """A Markdown table of an algorithm's rows."""
    head = ["environment", "steps", "seeds", "IQM (95 %), or each return", "mean (95 %)"]
    head += ["floor", "par", "top", "stands", "steps/s", "minutes"]
    lines = [head, ["---"] * len(head)]
    for (name, env, steps), runs in table.items():
        if name == algo:
            lines.append([env, *row(algo, env, steps, runs)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def row(algo: str, env: str, steps: int, runs: Sequence[Trained]) -> Iterator[str]:
    """The cells of a row after the environment."""
    returns = [run.eval_return for run in runs]
    iqm, mean = (stats.interval(returns, name) for name in ("iqm", "mean"))
    few = len(returns) < stats.FEW
    others = [each.return_mean for each in published_near(algo, env, steps)]
    ends = [min(others), median(others), max(others)] if others else []
    yield from (f"{steps:,}", str(len(runs)))
    yield from ("; ".join(map(show, returns)) if few else str(iqm), str(mean))
    yield from ([show(end) for end in ends] or ["-"] * 3)
    yield standing(mean, ends) if ends else "none published"
    yield f"{median(run.steps_per_second for run in runs):,.0f}"
    yield f"{median(run.minutes for run in runs):.1f}"


def standing(mean: stats.Interval, ends: Sequence[float]) -> str:
    """The place of a mean beside the lowest, the median and the highest published return.

    In bold if its whole interval has that place.
    """

    def place(value: float) -> str:
        floor, par, top = ends
        if value >= top:
            return "above the top" if value > top else "at the top"
        return "above par" if value >= par else "below par" if value >= floor else "below the floor"

    whole = place(mean.low) == place(mean.high) and not math.isnan(mean.low)
    return f"**{place(mean.value)}**" if whole else place(mean.value)


def normalized(table: Table, algo: str) -> dict[str, list[float]]:
    """Returns by environment, 0 for the random policy and 1 for the median of published ones.

    Of an environment with several rows, the one with the fewest steps counts.
    """
    found: dict[str, list[float]] = {}
    random = {row.env: row.return_mean for row in references() if row.algo == RANDOM}
    for (name, env, steps), runs in table.items():
        others = published_near(algo, env, steps)
        if name == algo and env not in found and others and env in random:
            par, low = median(each.return_mean for each in others), random[env]
            found[env] = [(run.eval_return - low) / (par - low) for run in runs]
    return found


def together(table: Table) -> str:
    """Sentences about each algorithm over all environments."""
    lines, iqm = [], stats.STATISTICS["iqm"]
    for algo in ("ppo", "sac"):
        scores = normalized(table, algo)
        if len(scores) >= FEWEST_ENVIRONMENTS:
            value, low, high = resampled(lambda parts: iqm(np.concatenate(parts)), [*scores.values()])
            lines.append(
                f"* {algo.upper()}: IQM {value:.2f} ({low:.2f} to {high:.2f}) over {len(scores)} "
                f"environments and {sum(map(len, scores.values()))} runs."
            )
    return "\n".join(lines)


def run_lines(table: Table) -> Iterator[str]:
    """Commits and runs of each row."""
    for row, runs in table.items():
        by_commit: dict[str, list[Trained]] = {}
        for run in runs:
            by_commit.setdefault(run.commit, []).append(run)
        for commit, here in by_commit.items():
            ids = ", ".join(f"`{run.run}`" for run in here)
            yield f"{row[0].upper()} {row_label(table, row)}, commit `{commit}`: {ids}"


def policy_lines(table: Table) -> Iterator[str]:
    """The seed and the return of the run that each policy file comes from."""
    for algo in dict.fromkeys(name for name, _, _ in table):
        made = []
        for row in (row for row in table if row[0] == algo):
            label = row_label(table, row)
            seed = exported_seed(POLICIES / f"{algo}-{label}.zip")
            made += [f"{label} {seed} ({show(run.eval_return)})" for run in table[row] if run.seed == seed]
        yield f"* {algo.upper()}, seed and return: {', '.join(made)}"


def published_lines(table: Table) -> Iterator[str]:
    """The published results that each row is compared with, and their sources."""
    sources: dict[tuple[str, str], str] = {}
    for algo, env, steps in table:
        found = []
        for each in published_near(algo, env, steps):
            name = sources.setdefault((each.source, each.note), f"s{len(sources) + 1}")
            value, method = show(each.return_mean), each.method.removeprefix(algo.upper()).strip(" ()")
            seeds = f"{each.n_seeds or '?'} seed{'s' * (each.n_seeds != '1')}"
            made = [method, each.env_version, f"{each.steps:,} steps", seeds, name]
            found.append(f"{value} ({', '.join(filter(None, made))})")
        yield f"* {algo.upper()} {row_label(table, (algo, env, steps))}: {'; '.join(found) or 'none'}"
    yield "\nSources:\n"
    for (source, note), name in sources.items():
        place, _, path = source.partition(" ")
        repository, _, commit = place.partition("@")
        kind, folder = ("tree", path.rpartition("/")[0]) if "*" in path else ("blob", path)
        yield f"* {name}: [{source}](https://github.com/{repository}/{kind}/{commit}/{folder}): {note}"


def figures(table: Table) -> Iterator[Chart]:
    """Learning curves of each algorithm, those of rows with few seeds, and the performance profile of all."""
    curves: dict[str, dict[int, float]] = {}
    for each in read(Evaluation):
        curves.setdefault(each.run, {})[each.env_steps] = each.eval_return
    panels: dict[str, list[Panel]] = {"ppo": [], "sac": [], "few": []}
    for row, runs in table.items():
        few, name = len(runs) < stats.FEW, row_label(table, row)
        title = f"{row[0].upper()} {name}" if few else name
        panels["few" if few else row[0]].append(panel(row, title, [curves[run.run] for run in runs]))
    for name, drawn in panels.items():
        whose = "rows with fewer than five seeds" if name == "few" else name.upper()
        caption = f"{whose}: returns of evaluations, IQM over seeds with its 95 % interval"
        if drawn:
            yield Chart(f"results-{name}", caption, drawn)
    taus = np.linspace(0.0, 2.0, 101)
    lines = []
    for algo, color in zip(("ppo", "sac"), COLORS, strict=False):
        scores = [*normalized(table, algo).values()]
        if len(scores) >= FEWEST_ENVIRONMENTS:
            share = resampled(lambda parts: (np.concatenate(parts) > taus[:, None]).mean(1), scores)
            value, low, high = (np.round(each, 4).tolist() for each in share)
            band = list(zip(low, high, strict=True))
            lines.append(Line(algo.upper(), list(zip(taus.tolist(), value, strict=True)), color, band))
    score = "normalised score (0: random policy, 1: median of published returns)"
    if lines:
        panel_of_all = Panel("share of runs above a normalised score", lines, across=score)
        yield Chart("results-profile", "Performance profile", [panel_of_all])


def panel(row: tuple[str, str, int], name: str, seeds: Sequence[Mapping[int, float]]) -> Panel:
    """All seeds, thin, and their IQM with its interval, thick, over published returns."""
    shared = sorted(set.intersection(*map(set, seeds)))
    middle = [stats.interval([curve[step] for curve in seeds]) for step in shared]
    # Of equal lines matplotlib's legend names the first one only.
    lines = [Line("_" * bool(i) + "a seed", sorted(c.items()), "#9aa4ae") for i, c in enumerate(seeds)]
    band = [(each.low, each.high) for each in middle] if len(seeds) > 1 else None
    points = list(zip(shared, (each.value for each in middle), strict=True))
    lines.append(Line(f"IQM of {len(seeds)} seeds", points, COLORS[0], band))
    others = [each.return_mean for each in published_near(*row)]
    levels = {"published": (min(others), max(others))} if others else {}
    return Panel(f"{name} (n={len(seeds)})", lines, levels)


if __name__ == "__main__":
    page()
