"""The speed chart of the README: `python results/speed_chart.py` draws results/peers.json."""

from __future__ import annotations

import json
import statistics
from io import BytesIO
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure

FOLDER = Path(__file__).parent
CONTENDERS = {
    "Stable-Baselines3": ("Stable-Baselines3", "#9aa5b1"),
    "SBX": ("SBX (JAX)", "#e69f00"),
    "rltemplate": ("rltemplate", "#0072b2"),
}
# What `make train` chooses with two cores.
DEFAULTS = {
    "ppo-CartPole": "rltemplate, compile=true",
    "ppo-Hopper": "rltemplate, compile=true env.num_workers=1",
    "sac-Hopper": "rltemplate, compile=true",
}
WORKS = {"ppo-CartPole": "PPO CartPole", "ppo-Hopper": "PPO Hopper", "sac-Hopper": "SAC Hopper"}


def medians() -> dict[tuple[str, str], float]:
    """Environment steps per second by work and contender."""
    found: dict[tuple[str, str], list[float]] = {}
    for each in json.loads((FOLDER / "peers.json").read_text())["measurements"]:
        if "result" in each:
            work, contender = each["job"]["work"], each["job"]["contender"]
            name = "rltemplate" if contender == DEFAULTS[work] else contender
            found.setdefault((work, name), []).append(each["result"]["steps_per_s"])
    return {key: statistics.median(values) for key, values in found.items()}


def chart() -> Figure:
    """Bars for each work."""
    speed = medians()
    figure = Figure(figsize=(8, 1.9))
    for number, (work, title) in enumerate(WORKS.items(), start=1):
        axes = figure.add_subplot(1, 3, number)
        for place, (contender, (name, color)) in enumerate(CONTENDERS.items()):
            value = speed[work, contender]
            axes.barh(-place, value, color=color)
            axes.text(value, -place, f" {value:,.0f}", va="center", fontsize=8, color="#24292f")
            if number == 1:
                axes.text(0, -place, f"{name}  ", va="center", ha="right", fontsize=9)
        axes.set_title(title, fontsize=10)
        axes.set_xlim(0, 1.75 * max(speed[work, contender] for contender in CONTENDERS))
        axes.axis("off")
    return figure


def svg() -> bytes:
    """The chart as SVG; equal numbers give equal bytes."""
    file = BytesIO()
    with mpl.rc_context({"svg.hashsalt": "speed", "savefig.bbox": "tight"}):
        chart().savefig(file, format="svg", metadata={"Date": None, "Creator": None})
    return file.getvalue()


if __name__ == "__main__":
    (FOLDER / "speed.svg").write_bytes(svg())
    with mpl.rc_context({"savefig.bbox": "tight"}):
        chart().savefig(FOLDER / "speed.png", dpi=200, metadata={"Software": None})
