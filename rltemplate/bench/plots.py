"""What was measured, as a picture: how often as fast as the peers, and where the time goes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rltemplate.bench.plan import COMPILED, EAGER, SB3, SBX, WORKER
from rltemplate.bench.tables import Cell, cells, find, ratio
from rltemplate.bench.timeline import ACTING, ENVIRONMENT, OBSERVERS, REST, SHARES, UPDATE
from rltemplate.bench.works import WORKS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Of Okabe and Ito (2008); the peers in grey, so that this project's forms stand out.
COLORS = {SB3: "#bbbbbb", SBX: "#777777", EAGER: "#56b4e9", COMPILED: "#0072b2", WORKER: "#009e73"}
SHARE_COLORS = {ENVIRONMENT: "#009e73", ACTING: "#56b4e9", UPDATE: "#0072b2", REST: "#e69f00"} | {
    OBSERVERS: "#d55e00"
}
_MM = 1 / 25.4


def draw(measured: Mapping[str, Any], stem: Path) -> list[Path]:
    """Write the picture as PNG and SVG, with a panel for all that was measured; the files, if any."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    parts = measured["parts"]
    racing = cells(parts["peers"]) if "peers" in parts else []
    timed = cells(parts["time"]) if "time" in parts else []
    cores = sorted({cell.cores for cell in racing})
    heights = [70.0] * len(cores) + ([14.0 + 6.0 * len(timed)] if timed else [])
    if not heights:
        return []
    figure = Figure(figsize=(200 * _MM, (sum(heights) + 8) * _MM), layout="constrained")
    FigureCanvasAgg(figure)
    # Each with a layout of its own, as long names beside one would make the others narrow.
    panels = figure.subfigures(len(heights), 1, squeeze=False, height_ratios=heights)[:, 0]
    grid = [panel.subplots() for panel in panels]
    for axes, number in zip(grid, cores, strict=False):
        _race(axes, [cell for cell in racing if cell.cores == number], number)
    if timed:
        _stack(grid[-1], timed)
    paths = [stem.with_suffix(suffix) for suffix in (".png", ".svg")]
    figure.savefig(paths[0], dpi=160)
    with matplotlib.rc_context({"svg.hashsalt": "rltemplate", "svg.fonttype": "none"}):  # the same file again
        figure.savefig(paths[1], metadata={"Date": None})
    return paths


def _race(axes: Axes, here: list[Cell], cores: int) -> None:
    """Bars of ratios, side by side in each work."""
    works = [name for name in WORKS if any(cell.work == name for cell in here)]
    contenders = [name for name in COLORS if any(cell.contender == name for cell in here)]
    base = SB3 if SB3 in contenders else contenders[0]
    # Not everybody does every work: whoever does takes the next place.
    ratios = {
        (work, contender): value
        for work in works
        for contender in contenders
        if (cell := find(here, work, contender, cores)) is not None
        and (value := ratio(cell, find(here, work, base, cores))) is not None
    }
    taking_part = {work: [name for name in contenders if (work, name) in ratios] for work in works}
    width = 0.84 / max(map(len, taking_part.values()))
    highest = 1.0
    for contender in contenders:
        at, values = [], []
        for number, (work, names) in enumerate(taking_part.items()):
            if contender in names:
                at.append(number + (names.index(contender) - (len(names) - 1) / 2) * width)
                values.append(ratios[work, contender])
        bars = axes.bar(at, values, width * 0.94, color=COLORS[contender], label=contender)
        if contender != base:
            axes.bar_label(bars, [f"{value:.1f}" for value in values], fontsize=6, padding=1)
        highest = max([highest, *values])
    axes.axhline(1.0, color="#333333", linewidth=0.6)
    axes.set_ylim(0, highest * 1.12)
    axes.set_xticks(
        range(len(works)),
        [WORKS[work].title.replace(", ", " ").replace(" ", "\n", 2) for work in works],
        fontsize=7,
    )
    axes.set_ylabel(f"times {base}", fontsize=8)
    axes.set_title(f"Training speed on {cores} core{'s' if cores > 1 else ''}", fontsize=9, loc="left")
    axes.tick_params(axis="y", labelsize=7)
    axes.legend(
        fontsize=6.5,
        ncols=min(3, -(-len(contenders) // 2)),
        loc="upper center",
        bbox_to_anchor=(0.5, -0.26),
        frameon=False,
    )
    axes.spines[["top", "right"]].set_visible(False)


def _stack(axes: Axes, timed: list[Cell]) -> None:
    """Shares of the time, one bar for each work and form."""
    names = [f"{WORKS[cell.work].title}, {cell.contender.removeprefix('rltemplate, ')}" for cell in timed]
    left = [0.0] * len(timed)
    for share in SHARES:
        values = [cell.middle(lambda result, share=share: result["shares"][share]) for cell in timed]  # type: ignore[misc]
        bars = axes.barh(range(len(timed)), values, 0.7, left, color=SHARE_COLORS[share], label=share)
        labels = [f"{value:.0%}" if value >= 0.04 else "" for value in values]
        axes.bar_label(bars, labels, label_type="center", fontsize=6, color="white")
        left = [before + value for before, value in zip(left, values, strict=True)]
    axes.set_yticks(range(len(timed)), names, fontsize=7)
    axes.invert_yaxis()
    axes.set_xlim(0, 1)
    axes.set_xticks([])
    axes.set_title("Where the time of training goes, on one core", fontsize=9, loc="left")
    axes.legend(
        fontsize=6.5, ncols=len(SHARES), loc="upper center", bbox_to_anchor=(0.4, -0.01), frameon=False
    )
    axes.spines[["top", "right", "bottom"]].set_visible(False)
