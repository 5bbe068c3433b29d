"""The measurements as Markdown: medians over repetitions in which the contenders took turns."""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from bench.works import WORKS

Measurement = Mapping[str, Any]  # {"job": ..., "repetition": ..., "result": ...}
Cell = dict[int, dict[str, Any]]  # results of one contender in one work, by repetition
Cells = dict[tuple[str, str], Cell]  # by work and contender

NOTES = {
    "peers": """Environment steps per second, median (lowest to highest); ratios are medians of those within a
        repetition. Contenders of a work agree in environments, batch size, updates per step, parameters and
        number type, and their optimisers counted the updates they announced. PPO: 8 environments x 256 steps,
        10 epochs, minibatches of 64, networks of 64-64 tanh, scaled observations and rewards on MuJoCo. Pong:
        128 steps, 4 epochs, minibatches of 256, the convolutions of Mnih et al. 2015, the frames of
        conf/env/_atari.yaml. SAC: an update for each environment step, batches of 256, networks of 256-256
        relu. Warm-up and compilation are in the seconds until something was learned alone. The peers use
        `make_vec_env` and `VecNormalize`, and log nothing.""",
    "time": """Shares of the time of training without observers, on one core: steps of the environments,
        updates, and the rest (acting, targets, drawing batches, statistics).""",
    "levels": """CPU time per environment step against `fast` in the same form: median of the ratios within a
        repetition, on one core.""",
    "observers": """Time that observers add to an iteration, compiled, on one core: medians of iterations that
        took turns. `log` writes a row after every iteration, which is more often than by default; `nothing`
        compares iterations that are alike, and says how exact the others are.""",
    "startup": "Seconds from the command to the first environment step, with checks, git snapshot, record.",
    "gpu": """Environment steps per second as in the first table, with the networks on the CPU and on the GPU.
        Environments are stepped on the CPU.""",
}
HEADS = {
    "peers": ["contender", "steps/s", "times Stable-Baselines3", "times SBX", "seconds to learn", "peak MB"],
    "time": ["form", "steps/s", "environments", "updates", "rest"],
    "levels": ["level", "steps per CPU second", "cost"],
    "observers": ["observer", "time added", "CPU time added"],
    "startup": ["command", "seconds", "CPU seconds"],
    "gpu": ["form", "steps/s", "times the CPU", "seconds to learn"],
}


def document(measurements: Sequence[Measurement], facts: Mapping[str, str]) -> str:
    """The whole file; `facts` are lines about command, machine and versions by part."""
    lines = ["# Speed", ""]
    for part, head in HEADS.items():
        cells: Cells = {}
        for each in measurements:
            job = each["job"]
            if job["part"] == part:
                cell = cells.setdefault((job["work"], job["contender"]), {})
                cell[each["repetition"]] = each["result"]
        if cells:
            body = [[WORKS[work].title, *row] for work, row in ROWS[part](cells)]
            table = [f"| {' | '.join(row)} |" for row in (["work", *head], ["---"] * (len(head) + 1), *body)]
            note = textwrap.wrap(" ".join(NOTES[part].split()), 110)
            lines += [f"## {part}", "", facts[part], "", *table, "", *note, ""]
    return "\n".join(lines)


def median(cell: Cell, key: str) -> float:
    """Median over repetitions."""
    return float(statistics.median(result[key] for result in cell.values()))


def _ratio(mine: Cell, theirs: Cell | None, key: str) -> str:
    """Median over repetitions of `mine` / `theirs`; empty where they share none."""
    both = [mine[number][key] / theirs[number][key] for number in mine if theirs and number in theirs]
    return f"{statistics.median(both):.2f}" if both else ""


def _speed(cell: Cell) -> str:
    """Median (lowest to highest)."""
    values = [result["steps_per_s"] for result in cell.values()]
    return f"{statistics.median(values):,.0f} ({min(values):,.0f} to {max(values):,.0f})"


Rows = Iterable[tuple[str, list[str]]]  # a work, and the cells after its name


def _peers(cells: Cells) -> Iterator[tuple[str, list[str]]]:
    for (work, contender), cell in cells.items():
        peers = (cells.get((work, peer)) for peer in ("Stable-Baselines3", "SBX"))
        ratios = [_ratio(cell, peer, "steps_per_s") for peer in peers]
        first, peak = median(cell, "first_s"), median(cell, "peak_bytes") / 1e6
        yield work, [contender, _speed(cell), *ratios, f"{first:.1f}", f"{peak:,.0f}"]


def _time(cells: Cells) -> Iterator[tuple[str, list[str]]]:
    for (work, form), cell in cells.items():
        shares = (f"{median(cell, share):.1%}" for share in HEADS["time"][2:])
        yield work, [form, _speed(cell), *shares]


def _levels(cells: Cells) -> Iterator[tuple[str, list[str]]]:
    for (work, level), cell in cells.items():
        base = cells.get((work, "fast, compile=true" if "compile" in level else "fast"))
        speed = f"{1 / median(cell, 'cpu_s_per_step'):,.0f}"
        yield work, [level, speed, _ratio(cell, base, "cpu_s_per_step")]


def _observers(cells: Cells) -> Iterator[tuple[str, list[str]]]:
    for (work, _), cell in cells.items():
        for name in dict.fromkeys(key.rpartition(" ")[0] for key in next(iter(cell.values()))):
            yield work, [name, *(f"{median(cell, f'{name} {clock}'):.2%}" for clock in ("wall", "cpu"))]


def _startup(cells: Cells) -> Iterator[tuple[str, list[str]]]:
    for (work, command), cell in cells.items():
        yield work, [command, *(f"{median(cell, clock):.1f}" for clock in ("wall_s", "cpu_s"))]


def _gpu(cells: Cells) -> Iterator[tuple[str, list[str]]]:
    for (work, form), cell in cells.items():
        ratio = _ratio(cell, cells.get((work, "CPU, compile=true")), "steps_per_s")
        yield work, [form, _speed(cell), ratio, f"{median(cell, 'first_s'):.1f}"]


ROWS: dict[str, Callable[[Cells], Rows]] = {
    "peers": _peers,
    "time": _time,
    "levels": _levels,
    "observers": _observers,
    "startup": _startup,
    "gpu": _gpu,
}
