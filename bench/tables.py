"""The measurements as Markdown: medians over repetitions in which the contenders took turns."""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from bench.works import WORKS

Measurement = Mapping[str, Any]  # {"job": ..., "repetition": ..., "result": ...}
Cell = dict[int, dict[str, Any]]  # results of one contender in one work, by repetition
Cells = dict[tuple[str, str], Cell]  # by work and contender

NOTES = {
    "peers": """Environment steps per second, median (lowest to highest); ratios are medians of those within a
        repetition. Contenders of a work agree in environments, batch size, updates per step, parameters and
        number type, and their optimisers counted the updates they announced. PPO: 8 environments x 256 steps,
        10 epochs, minibatches of 64, networks of 64-64 tanh, scaled observations and rewards on MuJoCo. SAC:
        an update for each environment step, batches of 256, networks of 256-256 relu. Warm-up and compilation
        are in the seconds until something was learned alone. The peers use `make_vec_env` and
        `VecNormalize`, and log nothing.""",
    "time": """Shares of the time of training without observers, on one core: steps of the environments,
        updates, and the rest (acting, targets, drawing batches, statistics).""",
    "levels": """CPU time per environment step against `fast` in the same form: median of the ratios within a
        repetition, on one core.""",
    "observers": """Time that observers add to an iteration, compiled, on one core: medians of iterations that
        took turns. `log` writes a row after every iteration, which is more often than by default; `nothing`
        compares iterations that are alike, and says how exact the others are.""",
    "startup": "Seconds from the command to the first environment step, with checks, git snapshot, record.",
}


def document(measurements: Sequence[Measurement], facts: Mapping[str, str]) -> str:
    """The whole file; `facts` are lines about command, machine and versions by part."""
    lines = ["# Speed", ""]
    for part, table in TABLES.items():
        found = cells(measurements, part)
        if found:
            note = textwrap.wrap(" ".join(NOTES[part].split()), 110)
            lines += [f"## {part}", "", facts[part], "", *table(found), "", *note, ""]
    return "\n".join(lines)


def cells(measurements: Iterable[Measurement], part: str) -> Cells:
    """The results of a part, in the order in which they were first made."""
    found: Cells = {}
    for each in measurements:
        job = each["job"]
        if job["part"] == part:
            found.setdefault((job["work"], job["contender"]), {})[each["repetition"]] = each["result"]
    return found


def ratio(mine: Cell, theirs: Cell | None, key: str) -> str:
    """Median over repetitions of `mine` / `theirs`; empty where they share none."""
    both = [mine[number][key] / theirs[number][key] for number in mine if theirs and number in theirs]
    return f"{statistics.median(both):.2f}" if both else ""


def spread(cell: Cell, key: str) -> str:
    """Median (lowest to highest)."""
    values = [result[key] for result in cell.values()]
    return f"{statistics.median(values):,.0f} ({min(values):,.0f} to {max(values):,.0f})"


def median(cell: Cell, key: str) -> float:
    """Median over repetitions."""
    return float(statistics.median(result[key] for result in cell.values()))


def rows(head: Sequence[str], body: Iterable[Sequence[str]]) -> list[str]:
    """A table."""
    return [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *body)]


def peers(found: Cells) -> list[str]:
    """Speed beside Stable-Baselines3 and SBX."""
    body = []
    for (work, contender), cell in found.items():
        against = (found.get((work, peer)) for peer in ("Stable-Baselines3", "SBX"))
        ratios = [ratio(cell, other, "steps_per_s") for other in against]
        first, peak = median(cell, "first_s"), median(cell, "peak_bytes") / 1e6
        body.append(
            [
                WORKS[work].title,
                contender,
                spread(cell, "steps_per_s"),
                *ratios,
                f"{first:.1f}",
                f"{peak:,.0f}",
            ]
        )
    head = ["work", "contender", "steps/s", "times Stable-Baselines3", "times SBX"]
    return rows([*head, "seconds until something was learned", "peak MB"], body)


def time(found: Cells) -> list[str]:
    """Shares of environments, updates and the rest."""
    shares = ("environments", "updates", "rest")
    body = [
        [
            WORKS[work].title,
            form,
            spread(cell, "steps_per_s"),
            *(f"{median(cell, share):.1%}" for share in shares),
        ]
        for (work, form), cell in found.items()
    ]
    return rows(["work", "form", "steps/s", *shares], body)


def levels(found: Cells) -> list[str]:
    """Cost of each level against `fast`."""
    body = []
    for (work, level), cell in found.items():
        base = "fast, compile=true" if "compile" in level else "fast"
        cost = ratio(cell, found.get((work, base)), "cpu_s_per_step")
        body.append([WORKS[work].title, level, f"{1 / median(cell, 'cpu_s_per_step'):,.0f}", cost])
    return rows(["work", "level", "steps per CPU second", "cost"], body)


def observers(found: Cells) -> list[str]:
    """Time that each observer adds."""
    body = [
        [WORKS[work].title, name, *(f"{median(cell, f'{name} {clock}'):.2%}" for clock in ("wall", "cpu"))]
        for (work, _), cell in found.items()
        for name in dict.fromkeys(key.rpartition(" ")[0] for key in next(iter(cell.values())))
    ]
    return rows(["work", "observer", "time added", "CPU time added"], body)


def startup(found: Cells) -> list[str]:
    """Seconds to the first step."""
    body = [
        [WORKS[work].title, command, f"{median(cell, 'wall_s'):.1f}", f"{median(cell, 'cpu_s'):.1f}"]
        for (work, command), cell in found.items()
    ]
    return rows(["work", "command", "seconds", "CPU seconds"], body)


TABLES: dict[str, Callable[[Cells], list[str]]] = {
    "peers": peers,
    "time": time,
    "levels": levels,
    "observers": observers,
    "startup": startup,
}
