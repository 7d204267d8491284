"""Sliders: two faces of one output, frames that are small and steady, and notebooks that keep no widget."""

import base64
import html
import io
import json
import re
import subprocess
import sys
from pathlib import Path

import matplotlib

matplotlib.use("agg")

import matplotlib.pyplot as plt  # noqa: E402
import nbformat  # noqa: E402
import numpy as np  # noqa: E402
import pytest  # noqa: E402
from nbclient import NotebookClient  # noqa: E402
from PIL import Image  # noqa: E402

from course import sliders  # noqa: E402
from course.outputs import clean  # noqa: E402
from course.rules_generated import SIZE, output_findings  # noqa: E402
from course.run import kernel_environment  # noqa: E402
from course.sliders import make_frames, share_palette, slider, static_face, tiles  # noqa: E402
from course.source import LANGUAGES  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*/*.ipynb")) + sorted((ROOT / "notebooks").glob("*.ipynb"))
LIVE = "application/vnd.jupyter.widget"


def plot(k: float):
    fig, ax = plt.subplots(figsize=(3, 2))
    ax.plot([0, 1], [0, k])
    ax.set(ylim=(0, 10), title=f"k = {k:g}")
    return fig


def attribute(text: str, name: str) -> str:
    return html.unescape(re.search(rf'\s{name}="([^"]*)"', text).group(1))


def picture(uri: str) -> Image.Image:
    return Image.open(io.BytesIO(base64.b64decode(uri.partition(",")[2])))


@pytest.fixture
def shown(monkeypatch):
    """What was displayed."""
    displayed = []
    monkeypatch.setattr(sliders, "display", lambda bundle, raw: displayed.append(bundle))
    return displayed


@pytest.fixture
def widget(monkeypatch):
    """The last live face that was made."""
    made = []
    face = sliders._face
    monkeypatch.setattr(sliders, "_face", lambda *args: made.append(face(*args)) or made[-1])
    return made


# --- two faces -------------------------------------------------------------------------------------------------------


def test_one_output_with_two_faces_and_a_word_for_terminals(shown):
    slider(plot, [1, 2, 3], label="shift k", alt="A line of slope {}.")
    (bundle,) = shown
    assert set(bundle) == {"application/vnd.jupyter.widget-view+json", "text/html", "text/plain"}
    assert bundle["text/plain"] == "slider: shift k, 1 to 3, 3 pictures"
    assert not plt.get_fignums()


def test_the_static_face_holds_every_frame_and_no_script(shown):
    slider(plot, [1, 2, 3], label="shift <k>", alt='A "line" of slope {}.', start=1)
    text = shown[0]["text/html"]
    assert "<script" not in text and "http" not in text and "shift &lt;k&gt;" in text
    frames = attribute(text, "data-frames").split("|")
    assert len(frames) == len(set(frames)) == 3
    assert attribute(text, "data-texts") == "1|2|3"
    assert attribute(text, "data-alts") == "|".join(f'A "line" of slope {k}.' for k in (1, 2, 3))
    assert [attribute(text, name) for name in ("min", "max", "step", "value")] == ["0", "2", "1", "1"]
    image = re.search(r"<img[^>]*>", text).group()  # the first frame stands alone, as a PNG with its own alt text
    assert attribute(image, "src") == frames[1] and frames[1].startswith("data:image/png;")
    assert attribute(image, "alt") == 'A "line" of slope 2.'
    assert re.search(r"<output[^>]*>2</output>", text) and attribute(text, "aria-valuetext") == "2"
    assert {picture(frame).size for frame in frames} == {picture(frames[0]).size}


def test_the_page_says_the_current_value_and_where_it_moves_when_scripts_are_stripped():
    text = static_face(make_frames(plot, [1, 2], "A line."), "k")
    stripped = re.sub(r"<[^>]*>", " ", text)  # what is left of it on GitHub, beside the picture
    assert "k" in stripped and "1" in stripped and "One of 2 pictures" in stripped
    assert "base64" not in stripped


def test_the_live_face_steps_through_the_frames(shown, widget):
    calls = []
    slider(lambda k: calls.append(k) or plot(k), [1, 2, 3], label="k", alt="Slope {}.", start=1)
    (face,) = widget
    image, control = face.children
    assert calls == [1, 2, 3] and control.label == "2" and 'alt="Slope 2."' in image.value
    control.value = 2
    assert calls == [1, 2, 3] and 'alt="Slope 3."' in image.value
    frames = attribute(shown[0]["text/html"], "data-frames").split("|")
    assert attribute(image.value, "src") == frames[2]


def test_live_values_are_drawn_when_they_are_reached_and_once(shown, widget):
    calls = []
    slider(lambda k: calls.append(k) or plot(k), [1, 3], label="k", alt="Slope {}.", start=1, live=[1, 1.5, 2, 2.5, 3])
    image, control = widget[0].children
    assert control.label == "3" and len(control.options) == 5
    before = len(calls)
    for place in (1, 2, 1):
        control.value = place
    assert calls[before:] == [1.5, 2] and 'alt="Slope 1.5."' in image.value
    assert attribute(shown[0]["text/html"], "data-texts") == "1|3"  # a reader without a kernel sees what was drawn


def test_words_and_functions_serve_as_values_and_texts(shown):
    slider(lambda name: plot(len(name)), ["one", "three"], label="word", alt=lambda name: f"The length of {name}.")
    assert attribute(shown[0]["text/html"], "data-texts") == "one|three"
    slider(plot, [0.5, 1], label="share", alt="Slope {}.", text=lambda k: f"{k:.0%}")
    assert attribute(shown[1]["text/html"], "data-alts") == "Slope 50%.|Slope 100%."


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"values": [1]}, "1 values; a slider needs 2 to 24"),
        ({"values": range(25)}, "25 values; a slider needs 2 to 24"),
        ({"start": 3}, "start 3 is no index of 3 values; try 0 to 2"),
        ({"alt": "  "}, "the alt text for 1 is empty"),
        ({"alt": lambda k: "" if k == 2 else "A line."}, "the alt text for 2 is empty"),
        ({"alt": "a | b"}, "holds |, which keeps the frames apart"),
        ({"draw": lambda k: np.zeros((8, 8 + k))}, "frames of sizes 9×8, 10×8, 11×8; one size for all"),
        ({"draw": lambda k: np.zeros((2, 8, 8, 3))}, r"a picture has shape \(2, 8, 8, 3\)"),
    ],
)
def test_what_cannot_be_a_slider_is_refused(shown, change, message):
    arguments = {"draw": plot, "values": [1, 2, 3], "label": "k", "alt": "A line."} | change
    with pytest.raises(ValueError, match=message.replace("|", r"\|") if "holds" in message else message):
        slider(**arguments)
    plt.close("all")
    assert not shown


# --- frames ----------------------------------------------------------------------------------------------------------


def test_the_same_frames_are_the_same_bytes_and_small():
    one, two = (make_frames(plot, [1, 2, 3], "A line of slope {}.") for _ in range(2))
    assert one == two
    assert all(len(frame.uri) < 8_000 for frame in one)
    assert picture(one[0].uri).convert("RGBA").getpixel((0, 0)) == (255, 255, 255, 255)


def test_a_palette_is_shared_and_lines_keep_their_colour():
    pictures = [sliders.render(plot(k)) for k in (1, 9)]
    reduced = [np.asarray(frame.convert("RGB")).astype(int) for frame in share_palette(pictures, 16)]
    for before, after in zip(map(np.asarray, pictures), reduced):
        blue = (before == (43, 108, 176)).all(-1)
        assert blue.sum() > 20 and (after[blue] == (43, 108, 176)).all()  # COLORS[0], exactly
        assert abs(before - after).mean() < 1
    used = {tuple(colour) for frame in reduced for colour in frame.reshape(-1, 3)}
    assert len(used) <= 16


def test_few_colours_are_kept_without_loss():
    board = [np.indices((6, 6)).sum(0) % 2, np.zeros((6, 6))]
    frames = make_frames(lambda place: board[place], [0, 1], "A board.", zoom=3)
    assert (np.asarray(picture(frames[0].uri).convert("L")) == 255 * board[0]).all()
    assert (frames[0].width, frames[0].height) == (18, 18) and picture(frames[0].uri).size == (6, 6)
    assert make_frames(lambda place: board[place], [0, 1], "A board.")[0].width == 87 * 6  # about 520 pixels


def test_painted_pictures_may_lose_a_little_but_the_first_is_a_png():
    painted = np.random.default_rng(0).random((2, 5, 5, 3)).repeat(8, 1).repeat(8, 2)
    frames = make_frames(lambda k: painted[k], [0, 1], "Colours.", colors=None, start=1)
    assert frames[0].uri.startswith("data:image/webp;") and frames[1].uri.startswith("data:image/png;")
    lost = np.asarray(picture(frames[0].uri).convert("RGB")) - 255 * painted[0]
    assert abs(lost).mean() < 12


def test_tiles_lie_side_by_side():
    red, blue = np.zeros((4, 6, 3)), np.zeros((4, 6, 3))
    red[..., 0] = blue[..., 2] = 1
    sheet = tiles([red, blue, red], columns=2, gap=2)
    assert sheet.size == (14, 10)
    assert [sheet.getpixel(at) for at in ((0, 0), (8, 0), (0, 6), (6, 0), (8, 6))] == [
        (255, 0, 0),
        (0, 0, 255),
        (255, 0, 0),
        (255, 255, 255),
        (255, 255, 255),
    ]
    with pytest.raises(ValueError, match="0 pictures"):
        tiles([])
    with pytest.raises(ValueError, match="2 pictures of sizes"):
        tiles([red, red[:2]])


# --- stored notebooks ------------------------------------------------------------------------------------------------

CELL = """
from course.figures import plt
from course.sliders import slider

def draw(k):
    fig, ax = plt.subplots(figsize=(3, 2))
    ax.plot([0, k])
    return fig

slider(draw, [1, 2], label="k", alt="A line that ends at {}.", live=[1, 1.5, 2])
"""


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """A notebook with one slider, executed as `course run` does."""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(CELL, id="k")])
    scratch = tmp_path_factory.mktemp("run")
    NotebookClient(notebook, store_widget_state=False, record_timing=False, timeout=120).execute(
        env=kernel_environment(ROOT, str(scratch))
    )
    return notebook


def test_a_run_shows_a_widget_and_stores_none(ran):
    (live,) = ran.cells[0].outputs
    assert any(mime.startswith(LIVE) for mime in live["data"])
    (stored,) = clean(ran.cells[0].outputs, ROOT)
    assert set(stored["data"]) == {"text/html", "text/plain"}
    frames = attribute(stored["data"]["text/html"], "data-frames").split("|")
    assert len(frames) == 2 and "widgets" not in ran.metadata


def test_nbval_reads_a_stored_slider(ran, tmp_path):
    notebook = nbformat.from_dict(json.loads(json.dumps(ran)))
    notebook.cells[0].outputs = [nbformat.from_dict(output) for output in clean(ran.cells[0].outputs, ROOT)]
    path = tmp_path / "slider.ipynb"
    nbformat.write(notebook, path)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--nbval", str(path)]  # outputs compared
    done = subprocess.run(
        command, cwd=ROOT, env=kernel_environment(ROOT, str(tmp_path)), capture_output=True, text=True
    )
    assert "1 passed" in done.stdout, done.stdout[-2000:]


def test_a_picture_inside_html_is_never_scrubbed():
    unlucky = "data:image/png;base64,AAAA/tmp/0xdeadbeef/AAA"
    output = {"output_type": "display_data", "metadata": {}, "data": {"text/html": f'/tmp/x <img src="{unlucky}">'}}
    (stored,) = clean([output], ROOT)
    assert stored["data"]["text/html"] == f'<tmp>/x <img src="{unlucky}">'


def test_course_check_wants_alt_texts_and_no_widget_in_html():
    def findings(data: dict) -> list[str]:
        output = {"output_type": "display_data", "metadata": {}, "data": data}
        notebook = {"metadata": {}, "cells": [{"id": "x", "outputs": [output]}]}
        chapter = type("Chapter", (), {"number": "01"})()
        return [finding.rule for finding in output_findings(chapter, "x.ipynb", notebook, "")][1:]

    frames = make_frames(plot, [1, 2], "A line.")
    assert findings({"text/html": static_face(frames, "k")}) == []
    assert findings({"text/html": '<img src="data:image/png;base64,AA">'}) == ["alt"]
    assert findings({"text/html": "x", f"{LIVE}-view+json": {"model_id": "a"}}) == ["outputs"]


def faces(notebook: dict) -> list[str]:
    outputs = [output for cell in notebook["cells"] for output in cell.get("outputs", [])]
    texts = ["".join(output.get("data", {}).get("text/html", "")) for output in outputs]
    return [text for text in texts if 'class="slider"' in text]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_every_notebook_is_small_and_holds_no_widget(path):
    """GitHub refuses a notebook with widget state that it does not understand, and large ones."""
    notebook = json.loads(path.read_text(encoding="utf-8"))
    assert path.stat().st_size <= SIZE
    assert "widgets" not in notebook["metadata"]
    mimes = {
        mime for cell in notebook["cells"] for output in cell.get("outputs", []) for mime in output.get("data", {})
    }
    assert not any(mime.startswith(LIVE) for mime in mimes)


@pytest.mark.parametrize("language", LANGUAGES)
def test_the_course_has_its_sliders(language):
    found = {path.stem[:2]: faces(json.loads(path.read_text())) for path in NOTEBOOKS if path.parent.name == language}
    assert sum(map(len, found.values())) >= 8
    labels = {
        attribute(face, "aria-valuetext") and re.search(r"<span>(.*?)</span>", face).group(1)
        for faces in found.values()
        for face in faces
    }
    assert {"σ", "shift k", "t", "guidance w", "steps", "preview after step"} <= labels
    for face in (face for faces in found.values() for face in faces):
        frames, alts = (attribute(face, f"data-{name}").split("|") for name in ("frames", "alts"))
        assert len(frames) == len(alts) >= 2 and all(alt.strip() for alt in alts)
        assert len({picture(frame).size for frame in frames}) == 1


def test_the_grader_draws_one_frame_of_a_slider():
    cell = "\n".join(
        [
            "from course.sliders import slider",
            "calls = []",
            "slider(lambda k: calls.append(k), [1, 2, 3], label='k', alt='x', start=1)",
            "assert calls == [2]",
        ]
    )
    asked = f"""
from course.trial import Code, Trial
results = Trial("diffusion_engine.nothing").run(Code("x", {cell!r}))
assert [result.state for result in results] == ["ok"] * 4, results
"""
    subprocess.run([sys.executable, "-c", asked], cwd=ROOT, check=True)
