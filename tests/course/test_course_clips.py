"""Clips in notebooks: one HTML output that plays, tells what it shows, and leaves its first frame for paper."""

import base64
import io
import re

import numpy as np
import pytest
import torch
from PIL import Image

from course import clips


@pytest.fixture
def shown(monkeypatch):
    displayed = []
    monkeypatch.setattr(clips, "display", lambda output: displayed.append(output._repr_html_()))
    return displayed


def moving(frames: int = 5) -> torch.Tensor:
    """A white dot on its way right: (3, T, 8, 8)."""
    clip = torch.zeros(3, frames, 8, 8)
    for t in range(frames):
        clip[:, t, 3, t] = 1
    return clip


def pictures(html: str) -> dict[str, Image.Image]:
    found = re.findall(r'class="(clip-\w+)"[^>]*?src="data:image/webp;base64,([^"]+)"', html)
    return {name: Image.open(io.BytesIO(base64.b64decode(data))) for name, data in found}


def test_it_plays_for_ever_and_the_first_frame_stands_alone(shown):
    clips.play([moving(), moving().flip(1)], ["there", "back"], alt="Two dots", size=16)
    (html,) = shown
    found = pictures(html)
    assert found["clip-moving"].n_frames == 5 and found["clip-moving"].info["loop"] == 0
    assert getattr(found["clip-still"], "n_frames", 1) == 1
    assert found["clip-still"].size == found["clip-moving"].size == (2 * 16 + clips.GAP, 16 + clips.LINE)
    found["clip-moving"].seek(0)
    first, still = (np.asarray(found[f"clip-{name}"].convert("RGB"), float) for name in ("moving", "still"))
    assert np.abs(first - still).mean() < 6  # the moving one is compressed
    assert html.count('alt="Two dots"') == 2 and html.count("hidden") == 1
    assert "<script" not in html and "http" not in html


def test_every_frame_is_there_in_its_order(shown):
    clips.play([moving()], alt="A dot", size=32)
    image = pictures(shown[0])["clip-moving"]
    for t in range(5):
        image.seek(t)
        assert np.asarray(image.convert("L"), float)[12:16].sum(axis=0).reshape(8, 4).sum(axis=1).argmax() == t


def test_lists_of_pictures_and_a_quoted_alt(shown):
    frames = [Image.new("RGB", (4, 6), colour) for colour in ("red", "blue")]
    clips.play([frames], alt='A "square" & more', size=4)
    assert "A &quot;square&quot; &amp; more" in shown[0]
    assert pictures(shown[0])["clip-still"].size == (4, 6)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (([],), r"clips have \[\] frames"),
        (([moving(4), moving(5)],), r"clips have \[4, 5\] frames"),
        (([moving()], ["a", "b"]), "2 captions for 1 clips"),
        (([torch.zeros(3, 8, 8)],), r"expected \(3, T, H, W\)"),
    ],
)
def test_what_cannot_be_shown(given, message):
    with pytest.raises(ValueError, match=message):
        clips.play(*given, alt="x")
    with pytest.raises(ValueError, match="alt is empty"):
        clips.play([moving()], alt=" ")
