"""Films: clips of episodes, one after the other or in a grid, with captions; and films as animations."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction
from functools import cache
from itertools import chain, islice, pairwise, repeat, zip_longest
from pathlib import Path
from typing import Any, NamedTuple

import av
import numpy as np
from PIL import Image, ImageDraw, ImageFont

from runlab.run.video.episode import open_mp4

ANIMATION_FPS = 15  # GIFs count in 1/100 s, and browsers slow down frames of less than two
_HOLD_S = 1.0  # the last picture of a page


class Clip(NamedTuple):
    """The video of an episode, and the text that its pictures get."""

    path: Path
    caption: str


def join(clips: Sequence[Clip], grid: tuple[int, int], path: Path) -> None:
    """Write one film of clips with pictures of equal size: pages of rows x columns clips, side by side.

    A clip that ends before others of its page keeps showing its last picture.
    """
    rows, columns = grid
    fps, width, height = _format(clips[0].path)
    size = columns * width, rows * height
    container, stream = open_mp4(path, fps, np.asarray(Image.new("RGB", size)))
    for start in range(0, len(clips), rows * columns):
        page, picture = clips[start : start + rows * columns], Image.new("RGB", size, "white")
        together = zip_longest(*(_images(clip.path) for clip in page))
        for images in chain(together, repeat((), round(fps * _HOLD_S))):
            for number, image in enumerate(images):
                if image is not None:
                    corner = number % columns * width, number // columns * height
                    picture.paste(_captioned(image, page[number].caption), corner)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(np.asarray(picture), format="rgb24")))
    container.mux(stream.encode(None))
    container.close()


def _images(path: Path, every: int = 1) -> Iterator[Image.Image]:
    with av.open(str(path)) as container:
        for frame in islice(container.decode(video=0), 0, None, every):
            yield Image.fromarray(frame.to_ndarray(format="rgb24"))


def _captioned(image: Image.Image, text: str) -> Image.Image:
    """The image with a thin frame, and white text on a dark bar along its lower edge."""
    draw, size = ImageDraw.Draw(image, "RGBA"), _text_size(image.width, text)
    pad = size // 3
    draw.rectangle((0, image.height - size - 2 * pad, image.width, image.height), fill=(0, 0, 0, 150))
    draw.rectangle((0, 0, image.width - 1, image.height - 1), outline="#808080")
    font = ImageFont.load_default(size)
    draw.text((pad, image.height - pad), text, font=font, fill="white", anchor="ld")
    return image


@cache
def _text_size(width: int, text: str) -> int:
    """The size of letters at which the text is no wider than an image, but no smaller than can be read."""
    size = max(11, width // 28)
    while size > 7 and ImageFont.load_default(size).getlength(text) + 2 * (size // 3) > width:
        size -= 1
    return size


def _format(path: Path) -> tuple[Fraction, int, int]:
    """Frames per second, width and height of a video."""
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        return Fraction(stream.average_rate or 30), stream.width, stream.height


def animate(film: Path, path: Path, width: int, seconds: float = 3600.0) -> None:
    """Write an MP4 as an animation that repeats, a GIF or a WebP, at most `width` pixels wide."""
    fps, _, _ = _format(film)
    every = max(1, round(fps / ANIMATION_FPS))
    frames = int(seconds * fps / every)
    images = []
    for image in islice(_images(film, every), frames):
        image.thumbnail((width, image.height))
        if path.suffix == ".gif":  # Pillow's default method takes eight times as long
            image = image.quantize(128, Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE)
        images.append(image)
    options: dict[str, Any] = {"save_all": True, "append_images": images[1:], "loop": 0, "quality": 60}
    # Whole hundredths of a second, of which a GIF takes no part; their errors do not add up.
    shown = [10 * round(100 * every * number / fps) for number in range(len(images) + 1)]
    images[0].save(path, duration=[end - start for start, end in pairwise(shown)], **options)
