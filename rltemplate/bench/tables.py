"""What was measured, as Markdown: a section for each part."""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from rltemplate.bench.contenders import OTHERWISE
from rltemplate.bench.plan import COMPILED, FULL_BUFFER, SB3, SBX
from rltemplate.bench.timeline import SHARES
from rltemplate.bench.works import WORKS

PartRecord = Mapping[str, Any]
# Cores whose data takes so many times the least share no cache, or had to wait for others.
_FAR = 3
# Kinds of measurements in which iterations of training are counted, as many as fit into the seconds.
_TRAIN = ("rate", "shares", "together")


class Cell(NamedTuple):
    """The measurements of one contender in one work on so many cores, by repetition."""

    work: str
    contender: str
    cores: int
    threads: int
    results: dict[int, Mapping[str, Any]]

    def rates(self, clock: str = "wall_s") -> dict[int, float]:
        """Environment steps per second, by repetition."""
        return {number: result["env_steps"] / result[clock] for number, result in self.results.items()}

    def middle(self, value: Callable[[Mapping[str, Any]], float]) -> float:
        """The median of something over repetitions."""
        return statistics.median(value(result) for result in self.results.values())


def cells(part: PartRecord) -> list[Cell]:
    """All that was measured in a part, in the order in which it was begun."""
    found: dict[tuple[str, str, int], Cell] = {}
    for each in part["measurements"]:
        job = each["job"]
        key = (job["work"], job["contender"], job["cores"])
        cell = found.setdefault(key, Cell(*key, job["threads"], {}))
        cell.results[each["repetition"]] = each["result"]
    return list(found.values())


def ratios(cell: Cell, against: Cell | None, clock: str = "wall_s") -> list[float]:
    """How often as fast, in each repetition that both have.

    What was measured soon after one another met much the same load: each repetition is compared in itself.
    """
    if against is None:
        return []
    mine, theirs = cell.rates(clock), against.rates(clock)
    return [mine[number] / theirs[number] for number in mine if number in theirs]


def ratio(cell: Cell, against: Cell | None) -> float | None:
    """The median of `ratios`; None where there are none."""
    every = ratios(cell, against)
    return statistics.median(every) if every else None


def find(all_cells: Iterable[Cell], work: str, contender: str, cores: int) -> Cell | None:
    """The one of these names."""
    wanted = (work, contender, cores)
    return next((cell for cell in all_cells if (cell.work, cell.contender, cell.cores) == wanted), None)


def document(measured: Mapping[str, Any], ahead: Sequence[str] = ()) -> str:
    """The whole file, with some lines `ahead` of all parts."""
    lines = ["# Speed", "", *ahead]
    for name, table in TABLES.items():
        part = measured["parts"].get(name)
        if part is not None:
            lines += section(name, part, table)
    return "\n".join(lines)


def _distances(measurements: Sequence[Mapping[str, Any]]) -> list[str]:
    """How far apart the cores were while two of them were used, where that is known."""
    around = [
        (each["job"], each["repetition"], [ns for ns in each.get("core_to_core_ns", ()) if ns is not None])
        for each in measurements
        if each["job"]["cores"] > 1
    ]
    every = [ns for _, _, both in around for ns in both]
    if not every:
        return []
    said = f"Data took {min(every):,.0f} to {max(every):,.0f} ns from one core to the other and back"
    far = [
        f"{WORKS[job['work']].title}, {job['contender']} ({repetition})"
        for job, repetition, both in around
        if both and max(both) > _FAR * min(every)
    ]
    if far:
        said += f"; {_FAR} times the least and more beside {len(far)} of {len(around)} measurements"
        said += f", here with their repetition: {'; '.join(far)}"
    return [*textwrap.wrap(f"{said}.", 110), ""]


def section(name: str, part: PartRecord, table: Callable[[list[Cell]], list[str]]) -> list[str]:
    """One part: how it was made, its tables, and what is missing."""
    settings, machine, versions = part["settings"], part["machine"], part["versions"]
    words = [f"make bench only={name}"]
    words += ["quick=true"] if settings["quick"] else []
    words += [f"seconds={settings['seconds']:g}", f"repetitions={settings['repetitions']}"]
    words += [f"cores={','.join(map(str, settings['cores']))}"]
    words += [f"device={settings['device']}"] if settings["device"] != "cpu" else []
    named = ", ".join(f"{package} {version}" for package, version in versions.items())
    cores = f"{machine['usable_cores']} usable cores"
    if machine["physical_cores"] != machine["usable_cores"]:
        cores += f" ({machine['physical_cores']} physical)"
    pinned = "each process pinned to its cores" if machine["pinned"] else "processes could not be pinned"
    load = f"load average {machine['load'][0]:.1f} when it began"
    trained = [
        job["seconds"] for job in (each["job"] for each in part["measurements"]) if job["kind"] in _TRAIN
    ]
    # How long it takes until something was learned is no matter of how long it goes on then.
    whole = trained and name != "startup"
    lasted = f"; each measured for {min(trained):g} s and more, in whole iterations" if whole else ""
    lines = [
        f"## {name}",
        "",
        f"`{' '.join(words)}` on {machine['cpu']}, {cores}, {pinned}, {load}{lasted}; {named}.",
    ]
    lines.append("")
    if part["measurements"]:
        lines += [*table(cells(part)), "", *_distances(part["measurements"])]
    for line in part["left_out"]:
        lines += [f"Left out: {line}.", ""]
    for line in part["failures"]:
        lines += [f"**Failed:** {line}", ""]
    return lines


def rows(head: Sequence[str], body: Iterable[Sequence[str]]) -> list[str]:
    """A table."""
    shown = [head, ["---"] * len(head), *body]
    return [f"| {' | '.join(row)} |" for row in shown]


def paragraph(text: str) -> list[str]:
    """Lines of a readable length."""
    return textwrap.wrap(text, 110)


def times(value: float | None) -> str:
    """A ratio."""
    return "" if value is None else f"{value:.2f}"


def spread(values: Iterable[float]) -> str:
    """Median (lowest to highest)."""
    every = list(values)
    return f"{statistics.median(every):,.0f} ({min(every):,.0f} to {max(every):,.0f})"


def megabytes(count: float) -> str:
    """As MB."""
    return f"{count / 1e6:,.0f}"


# --- Parts -----------------------------------------------------------------------------------------------


def peers(every: list[Cell]) -> list[str]:
    """A table for each number of cores."""
    lines = []
    for cores in sorted({cell.cores for cell in every}):
        here = [cell for cell in every if cell.cores == cores]
        body = []
        for cell in sorted(here, key=lambda cell: list(WORKS).index(cell.work)):
            against = [find(here, cell.work, name, cores) for name in (SB3, SBX)]
            body.append(
                [
                    WORKS[cell.work].title,
                    cell.contender,
                    str(cell.threads),
                    spread(cell.rates().values()),
                    *(times(ratio(cell, other)) for other in against),
                    f"{cell.middle(lambda result: result['first_s']):.1f}",
                    megabytes(cell.middle(lambda result: result["peak_bytes"])),
                ]
            )
        head = [
            *("work", "contender", "threads", "steps/s", "times Stable-Baselines3", "times SBX"),
            *("seconds until something was learned", "peak MB"),
        ]
        lines += [f"On {cores} core{'s' if cores > 1 else ''}:", "", *rows(head, body), ""]
    return [
        *lines,
        *paragraph(
            "Environment steps per second, median (lowest to highest) of repetitions in which the "
            "contenders took turns; ratios are medians of those within a repetition. PPO: 8 environments x "
            "256 steps, 10 epochs, minibatches of 64, networks of 64-64 tanh, observations and rewards "
            "scaled on MuJoCo. SAC: one update of everything per environment step, batches of 256, networks "
            "of 256-256 relu. Networks in float32. Each contender was asked what it had built, and its "
            "optimisers how often they stepped, and none differs. Warm-up and compilation are not counted; "
            "how long it takes until a first rollout, or 250 steps of SAC, was learned from is in the last "
            "column but one, from the start of the process. Threads are those of a process; with "
            "`env.num_workers=1` two processes share the cores."
        ),
        "",
        *paragraph(OTHERWISE),
    ]


def time(every: list[Cell]) -> list[str]:
    """Shares."""
    body = [
        [
            WORKS[cell.work].title,
            cell.contender,
            spread(cell.rates().values()),
            *(f"{cell.middle(lambda result, name=name: result['shares'][name]):.1%}" for name in SHARES),  # type: ignore[misc]
        ]
        for cell in every
    ]
    return [
        *rows(["work", "form", "steps/s", *SHARES], body),
        "",
        *paragraph(
            "Shares of the time in the real training loop, with log and trace at their defaults, on one "
            "core. *Choosing actions* is all between what came before and the step of the environments, the "
            "policy above all; *around updates* are targets, drawing and shuffling, statistics and what is "
            "reported. Checkpoints, evaluations and videos are not in it."
        ),
    ]


def floor(every: list[Cell]) -> list[str]:
    """By work, and what follows from it."""
    body, cores = [], 0
    for cell in every:
        flops, rate, simulation = (
            cell.middle(lambda result, name=name: result[name])  # type: ignore[misc]
            for name in ("flops", "flop_rate", "simulation_s")
        )
        cores = round(cell.middle(lambda result: result["cores"]))
        products = flops / rate
        body.append(
            [
                WORKS[cell.work].title,
                f"{flops / 1e6:,.1f}",
                f"{rate / 1e9:,.0f}",
                f"{products * 1e6:,.0f}",
                f"{simulation * 1e6:,.0f}",
                f"{cores / (products + simulation):,.0f}",
            ]
        )
    head = [
        *("work", "MFLOP of products", "GFLOP/s of a core", "us of products", "us of simulation"),
        f"steps/s of {cores} cores at most",
    ]
    return [
        *rows(head, body),
        "",
        *paragraph(
            "By environment step: products of matrices in the updates (of the program that is compiled), and "
            "what they would take on one core if all were as fast as the fastest of 256 x 256 matrices; the "
            "time of MuJoCo's own `mj_step`. If cores did nothing else, shared it evenly and never waited, "
            "so many steps a second would be the limit."
        ),
    ]


def level_costs(every: Sequence[Cell], cell: Cell) -> list[float]:
    """CPU time per environment step against that of `fast` in the same form, by repetition."""
    base = "fast, compile=true" if "compile" in cell.contender else "fast"
    return [1.0 / speed for speed in ratios(cell, find(every, cell.work, base, cell.cores), "cpu_s")]


def levels(every: list[Cell]) -> list[str]:
    """Against `fast`, in CPU time."""
    body = []
    for cell in every:
        mine = list(cell.rates("cpu_s").values())
        listed = ", ".join(f"{rate:,.0f}" for rate in mine)
        costs = level_costs(every, cell)
        shown = f"{statistics.median(costs):.3f}" if costs else ""
        title = WORKS[cell.work].title
        body.append([title, cell.contender, f"{statistics.median(mine):,.0f} ({listed})", shown])
    return [
        *rows(["work", "level", "steps per CPU second, median (all)", "cost"], body),
        "",
        *paragraph(
            "CPU time per environment step against `fast`: the median of the ratios within a repetition, in "
            "which levels took turns."
        ),
    ]


def observer_costs(result: Mapping[str, Any], clock: str) -> dict[str, float]:
    """Seconds that each observer adds to a second of training, at default intervals."""
    base = result["iteration"][clock]
    per_log = max(1.0, result["log_every"] / result["steps_per_iteration"])
    after = {name: seconds[clock] for name, seconds in result["after"].items()}
    quiet = after["quiet"]
    iterations = {
        name: result[every] / result["steps_per_iteration"]
        for name, every in (("checkpoint", "checkpoint_every"), ("record", "total_env_steps"))
    }
    costs = {"log": quiet + (after["log"] - quiet) / per_log}
    for name in ("trace=iteration", "trace=step"):
        costs[name] = after[name] - quiet + result["inside"][name][clock]
    for name, between in iterations.items():
        costs[name] = result[name][clock] / between
    together = sum(seconds for name, seconds in costs.items() if name != "trace=step")
    costs["all, with trace=iteration"] = together
    costs["nothing (how exact this is)"] = result["inside"]["quiet"][clock]
    return {name: seconds / base for name, seconds in costs.items()}


def observers(every: list[Cell]) -> list[str]:
    """What they add, on the clock and in CPU time."""
    body = []
    for cell in every:
        wall, cpu = (
            [observer_costs(result, clock) for result in cell.results.values()]
            for clock in ("wall_s", "cpu_s")
        )
        for name in wall[0]:
            shown = [f"{statistics.median(costs[name] for costs in each):.2%}" for each in (wall, cpu)]
            body.append([WORKS[cell.work].title, name, *shown])
    return [
        *rows(["work", "observer", "time added", "CPU time added"], body),
        "",
        *paragraph(
            "What each adds to the time of training without any, compiled, at the default intervals of the "
            "recipe; medians over processes. Iterations took turns in one process, and whatever looks at "
            "them was timed by itself; a log row, a checkpoint and the record of a run are counted as often "
            "as they come. Only of `trace=step`, with which the algorithm works otherwise, it is by how much "
            "iterations took longer; the last row is such a difference of iterations that are alike. `log` "
            "is all that a run does with an iteration beside tracing it: metrics, rows, console, "
            "TensorBoard, and the look for NaN. Evaluations and videos are work of their own and not in it."
        ),
    ]


def scaling(every: list[Cell]) -> list[str]:
    """Against the first of each kind."""
    lines: list[str] = []
    kinds = {
        "env.num_envs": "Environments stepped together, one core (rollouts of PPO have 2,048 samples)",
        "num_threads": "Threads, on as many cores as the most of them",
    }
    for key, title in kinds.items():
        here = [cell for cell in every if cell.contender.partition("=")[0] == key]
        body = []
        for cell in here:
            first = next(other for other in here if other.work == cell.work)
            speed = spread(cell.rates().values())
            body.append([WORKS[cell.work].title, cell.contender, speed, times(ratio(cell, first))])
        if body:
            lines += [f"{title}:", "", *rows(["work", "", "steps/s", "times the first"], body), ""]
    return [*lines, f"All with {COMPILED.partition(', ')[2]}."]


def memory(every: list[Cell]) -> list[str]:
    """What a transition takes, and a million of them."""
    peer = next((cell for cell in every if cell.contender == SB3), None)
    body = []
    for cell in every:
        per = cell.middle(lambda result: result["buffer_bytes"] / result["transitions"])
        resident = cell.middle(lambda result: result["resident_bytes"] / result["transitions"])
        theirs = None if peer is None else peer.middle(lambda r: r["buffer_bytes"] / r["transitions"])
        share = "" if theirs is None else f"{per / theirs:.0%}"
        body.append(
            [
                cell.contender,
                f"{per:,.0f}",
                f"{resident:,.0f}",
                megabytes(per * FULL_BUFFER),
                share,
                megabytes(cell.middle(lambda result: result["peak_bytes"])),
            ]
        )
    count = f"{next(iter(every[0].results.values()))['transitions']:,}" if every else "no"
    head = [
        *("SAC Humanoid", "bytes per transition", "resident", "MB for 1M", "of Stable-Baselines3's"),
        f"peak MB of the process with {count}",
    ]
    return [
        *rows(head, body),
        "",
        *paragraph(
            f"A buffer of {count} transitions filled by stepping 8 environments with random actions: the "
            "bytes of its arrays, and by how much the resident memory of the process grew meanwhile. "
            "Gymnasium's observations of Humanoid are float64, as which Stable-Baselines3 keeps them; here "
            "they are float32, as the networks take them, and each is stored once. A "
            "million takes as many per transition. What a process takes that trains is in the tables of "
            "`peers`."
        ),
    ]


def startup(every: list[Cell]) -> list[str]:
    """Seconds."""
    body = []
    for cell in every:
        key = "wall_s" if cell.contender == "first environment step" else "first_s"
        values = [result[key] for result in cell.results.values()]
        span = f"{statistics.median(values):.1f} ({min(values):.1f} to {max(values):.1f})"
        body.append([WORKS[cell.work].title, cell.contender, span])
    return [
        *rows(["work", "until", "seconds"], body),
        "",
        *paragraph(
            "From `scripts/train.py` to the first environment step, and from the start of a process that "
            "only trains until it has learned from its first rollout (PPO) or from 250 steps (SAC), with "
            "nothing compiled before and with the compiler's cache as the run before left it."
        ),
    ]


TABLES: dict[str, Callable[[list[Cell]], list[str]]] = {
    "peers": peers,
    "time": time,
    "floor": floor,
    "levels": levels,
    "observers": observers,
    "scaling": scaling,
    "memory": memory,
    "startup": startup,
}
