"""The terminal recording of the README: `python results/recording.py` runs its commands, draws the terminal.

A run is killed, resumed and compared with a run that nobody disturbed, in a clone of the present commit that
is removed. Waiting is shown in fast motion.
"""

from __future__ import annotations

import os
import pty
import select
import struct
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Iterator
from fcntl import ioctl
from pathlib import Path

import matplotlib as mpl
import pyte
from PIL import Image, ImageDraw, ImageFont

PROJECT = Path(__file__).resolve().parents[1]
WORDS = "total_env_steps=60000 checkpoint_every=10000"
COMMANDS = (
    f"timeout -s KILL 12 make train {WORDS} run_dir=runs/a",
    "make resume run=runs/a",
    f"make train {WORDS} run_dir=runs/b",
    "make compare a=runs/a b=runs/b",
)
COLUMNS, ROWS = 100, 26
SIZE = 13  # of the font
EVERY_S = 0.25  # between two looks at the terminal
SPEED = 2.5  # of what is waited for
COLORS = {
    "default": "#d8dee9",
    "red": "#ff8080",
    "green": "#98d982",
    "brown": "#ffd479",
    "blue": "#82aaff",
    "cyan": "#80cbc4",
}
BACKGROUND = "#1e222a"


class Recorder:
    """A terminal, and the pictures that it showed with their durations in milliseconds."""

    def __init__(self) -> None:
        self.screen = pyte.Screen(COLUMNS, ROWS)
        self.stream = pyte.ByteStream(self.screen)
        font = Path(mpl.get_data_path()) / "fonts/ttf/DejaVuSansMono.ttf"
        self.font = ImageFont.truetype(str(font), SIZE)
        self.images: list[Image.Image] = []
        self.durations: list[int] = []

    def show(self, seconds: float) -> None:
        """Add a picture of the terminal as it is, or show the last one for longer."""
        image = self._draw()
        if self.images and image.tobytes() == self.images[-1].tobytes():
            self.durations[-1] += round(1000 * seconds)
        else:
            self.images.append(image)
            self.durations.append(round(1000 * seconds))

    def _draw(self) -> Image.Image:
        width, height = round(self.font.getlength("m")), round(SIZE * 1.35)
        image = Image.new("RGB", (COLUMNS * width + 20, ROWS * height + 20), BACKGROUND)
        draw = ImageDraw.Draw(image)
        for row in range(ROWS):
            for column, cell in self.screen.buffer[row].items():
                color = COLORS.get(cell.fg, COLORS["default"])
                draw.text((10 + column * width, 10 + row * height), cell.data, font=self.font, fill=color)
        return image

    def type(self, command: str) -> None:
        """Show a command being typed."""
        self.stream.feed(b"\x1b[32m$\x1b[0m ")
        for start in range(0, len(command), 3):
            self.stream.feed(command[start : start + 3].encode())
            self.show(0.06)
        self.stream.feed(b"\r\n")
        self.show(0.3)

    def run(self, command: str, folder: Path) -> None:
        """Run a command in a terminal of this size, and show what it writes."""
        waited = time.monotonic()
        for output in _output(["bash", "-c", f"{command}; true"], folder):
            self.stream.feed(output)
            if time.monotonic() - waited > EVERY_S:
                self.show((time.monotonic() - waited) / SPEED)
                waited = time.monotonic()
        self.show(1.2)


def _output(command: list[str], folder: Path) -> Iterator[bytes]:
    """What a command writes to its terminal; an empty string where it writes nothing for a while."""
    mine, its = pty.openpty()
    ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    process = subprocess.Popen(command, cwd=folder, stdin=its, stdout=its, stderr=its, start_new_session=True)
    os.close(its)
    while True:
        ready, _, _ = select.select([mine], [], [], EVERY_S / 2)
        try:
            output = os.read(mine, 65536) if ready else b""
        except OSError:  # the other end is closed
            break
        if ready and not output:
            break
        yield output
    process.wait()
    os.close(mine)


def main() -> None:
    """Record, and write `recording.webp` and its last screen as text."""
    recorder, folder = Recorder(), Path(__file__).parent / "films"
    with tempfile.TemporaryDirectory() as scratch:
        clone = Path(scratch) / "rltemplate"
        subprocess.run(["git", "clone", "--quiet", str(PROJECT), str(clone)], check=True)
        # The clone's own .venv without an installation: the files of this one.
        subprocess.run(["cp", "-al", str(PROJECT / ".venv"), str(clone / ".venv")], check=True)
        (path,) = clone.glob(".venv/lib/python*/site-packages/repository.pth")
        path.unlink()  # it is a link to the file of this checkout
        path.write_text(f"{clone}\n")
        for command in COMMANDS:
            recorder.type(command)
            recorder.run(command, clone)
    recorder.show(4.0)
    text = "\n".join(line.rstrip() for line in recorder.screen.display).strip()
    if "identical" not in text:
        sys.exit(f"the runs are not identical:\n{text}")
    folder.mkdir(exist_ok=True)
    (folder / "recording.txt").write_text(text + "\n")
    recorder.images[0].save(
        folder / "recording.webp",
        save_all=True,
        append_images=recorder.images[1:],
        duration=recorder.durations,
        loop=0,
        quality=75,
    )


if __name__ == "__main__":
    main()
