"""Figures: opaque, small, with alt text."""

import base64
import io

import matplotlib

matplotlib.use("agg")

import matplotlib.pyplot as plt  # noqa: E402
import numpy as np  # noqa: E402
import pytest  # noqa: E402
from PIL import Image  # noqa: E402

from course import figures  # noqa: E402


@pytest.fixture
def shown(monkeypatch):
    """What was displayed, as (data, metadata) by mime type."""
    displayed = []
    monkeypatch.setattr(figures, "display", lambda image: displayed.append(image._repr_mimebundle_()))
    return displayed


def plot():
    fig, ax = plt.subplots()
    ax.plot([0, 1], [1, 0])
    return fig


def test_a_figure_is_shown_once_as_png_with_alt_text_and_closed(shown):
    figures.show(plot(), alt=" A line that falls ")
    (data, metadata), *rest = shown
    assert not rest and not plt.get_fignums()
    assert metadata["image/png"]["alt"] == "A line that falls"
    raw = data["image/png"]
    picture = Image.open(io.BytesIO(base64.b64decode(raw) if isinstance(raw, str) else raw))
    corner = picture.convert("RGBA").getpixel((0, 0))
    assert corner == (255, 255, 255, 255)


def test_the_same_figure_is_the_same_bytes_and_small():
    one, two = figures.png(plot()), figures.png(plot())
    plt.close("all")
    assert one == two and len(one) < 20_000


def test_a_figure_without_alt_text_is_refused():
    with pytest.raises(ValueError, match="alt is empty"):
        figures.show(plot(), alt=" ")
    plt.close("all")


@pytest.mark.parametrize(
    ("shape", "expected"),
    [((3, 8, 6), (8, 6, 3)), ((1, 8, 6), (8, 6)), ((8, 6, 3), (8, 6, 3)), ((8, 6, 1), (8, 6)), ((8, 6), (8, 6))],
)
def test_pictures_are_read_in_every_plain_layout(shape, expected):
    picture = figures.as_picture(np.full(shape, 1.5))
    assert picture.shape == expected and picture.max() == 1.0


def test_other_shapes_are_refused_with_the_shapes_that_work():
    with pytest.raises(ValueError, match=r"\(2, 8, 6, 3\); expected"):
        figures.as_picture(np.zeros((2, 8, 6, 3)))


def test_a_grid_shows_every_picture_with_its_caption(shown):
    figures.image_grid([np.zeros((4, 4))] * 3, ["a", "b", "c"], alt="Three dark squares", columns=2, title="Dark")
    assert shown[0][1]["image/png"]["alt"] == "Three dark squares"
    with pytest.raises(ValueError, match="2 captions for 1 pictures"):
        figures.image_grid([np.zeros((4, 4))], ["a", "b"], alt="x")
    with pytest.raises(ValueError, match="images is empty"):
        figures.image_grid([], alt="x")


def test_a_title_that_is_cut_off_is_named():
    fig, ax = plt.subplots(figsize=(2, 2))
    ax.set_title("much too long for a figure of two inches")
    with pytest.raises(ValueError, match="cuts off 'much too long"):
        figures.show(fig, alt="nothing")
    ax.set_title("short")
    figures.show(fig, alt="nothing")
