"""The playground: its controls draw, mistakes are told in the engine's words, and its notebooks read well without a kernel."""

import json
import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from course.adopt import adopt_notebook
from course.check import check_all
from course.export import export_chapter
from course.playground import WORDS, Playground, session_language, stations
from course.run import kernel_environment
from course.source import LANGUAGES, load_chapters
from course.twins import stamp_chapter
from diffusion_engine import TextToImage

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def engine():
    return TextToImage.from_pretrained(device="cpu")


@pytest.fixture
def panel(engine):
    made = Playground("en", engine)
    made.steps.value = 2
    return made


def pictures(text: str) -> list[str]:
    return re.findall(r'<img src="(data:image/png;base64,[^"]+)"', text)


def test_the_controls_ask_the_engine_for_what_they_show(panel, engine):
    panel.prompt.value, panel.negative.value, panel.seed.value = "smiling cat", "dog", 7
    panel.guidance.value, panel.solver.value = 4.0, "heun"
    assert panel.request() == {
        "prompt": "smiling cat",
        "negative_prompt": "dog",
        "seed": 7,
        "num_inference_steps": 2,
        "guidance_scale": 4.0,
        "solver": "heun",
    }
    fresh = Playground("zh", engine)
    assert fresh.guidance.value == engine.guidance_scale and fresh.request()["negative_prompt"] is None


def test_a_click_draws_the_picture_and_its_trace(panel):
    panel.button.click()
    first = panel.picture.value
    assert len(pictures(first)) == 1 and 'alt="red apple"' in first
    assert len(pictures(panel.trace.value)) == 2 and panel.trace.value.count("σ 0.") == 2
    assert panel.message.value.count("2 steps,") == 1 and not panel.button.disabled
    panel.button.click()
    assert panel.picture.value == first  # the same request, the same picture
    panel.another.click()
    assert panel.seed.value == 1 and panel.picture.value != first


def test_words_in_a_prompt_are_words(panel):
    panel.prompt.value = '<b>"apple"</b>'
    panel.draw()
    assert 'alt="&lt;b&gt;&quot;apple&quot;&lt;/b&gt;"' in panel.picture.value


@pytest.mark.parametrize(("control", "value"), [("steps", 0), ("steps", 10_000), ("seed", -1)])
def test_a_mistake_is_told_in_the_engines_own_line(panel, engine, control, value):
    panel.draw()
    before = panel.picture.value
    getattr(panel, control).value = value
    with pytest.raises(ValueError) as refused:
        engine(**panel.request())
    panel.button.click()  # no traceback
    said = re.sub(r"<[^>]*>", "", panel.message.value)
    assert said == str(refused.value) and "\n" not in said and "Traceback" not in said
    assert panel.picture.value == before and not panel.button.disabled
    assert panel.progress.layout.visibility == "hidden"


def test_a_warning_stands_beside_the_picture(panel):
    panel.guidance.value, panel.negative.value = 1.0, "cat"
    panel.draw()
    assert "negative prompt" in panel.message.value and pictures(panel.picture.value)


def test_the_language_is_the_notebooks(engine, monkeypatch):
    assert session_language("/home/x/notebooks/playground.zh.ipynb") == "zh"
    assert session_language("/home/x/notebooks/playground.en.ipynb") == session_language("") == "en"
    monkeypatch.setenv("JPY_SESSION_NAME", "playground.zh.ipynb")
    assert Playground(engine=engine).button.description == "画"
    assert WORDS["zh"].keys() == WORDS["en"].keys()
    with pytest.raises(ValueError, match="language 'fr' is unknown; try zh or en"):
        Playground("fr", engine)


@pytest.mark.parametrize("steps", [1, 2, 7, 8, 9, 28, 1000])
def test_the_trace_begins_at_the_beginning_and_ends_at_the_end(steps):
    places = stations(steps)
    assert places[0] == 0 and places[-1] == steps - 1
    assert len(places) == len(set(places)) == min(steps, 8) and places == sorted(places)


def test_the_notebook_runs_and_its_panel_draws(tmp_path):
    stored = nbformat.read(ROOT / "notebooks" / "playground.zh.ipynb", as_version=4)
    drive = """
panel = _
panel.steps.value = 2
panel.prompt.value = "smiling cat"
panel.button.click()
assert 'alt="smiling cat"' in panel.picture.value and panel.button.description == "画"
panel.steps.value = 0
panel.button.click()
panel.message.value
"""
    stored.cells.append(nbformat.v4.new_code_cell(drive))
    environment = kernel_environment(ROOT, str(tmp_path)) | {"JPY_SESSION_NAME": "playground.zh.ipynb"}
    NotebookClient(stored, timeout=300, store_widget_state=False, record_timing=False).execute(env=environment)
    live, said = (cell.outputs[-1].data for cell in stored.cells if cell.cell_type == "code")
    assert "application/vnd.jupyter.widget-view+json" in live and "image/png" in live
    assert "steps 0 is below 1; try 1" in said["text/plain"]


@pytest.mark.parametrize("language", LANGUAGES)
def test_without_a_kernel_the_first_picture_stands_there(language):
    notebook = json.loads((ROOT / "notebooks" / f"playground.{language}.ipynb").read_text(encoding="utf-8"))
    (output,) = [output for cell in notebook["cells"] for output in cell.get("outputs", [])]
    assert set(output["data"]) == {"image/png", "text/plain"} and output["metadata"]["image/png"]["alt"]
    assert "widgets" not in notebook["metadata"] and "object at 0x" not in "".join(output["data"]["text/plain"])


SOURCE = """# ---
# jupyter:
#   course:
#     minutes: 1
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown] lang="zh"
# # 试验台
#
# 看[第一章](zh/01_sums.ipynb)，再动手：写一句提示词，按下按钮，看看图怎样一步步出来。

# %% [markdown] lang="en"
# # Playground
#
# Read [the first chapter](en/01_sums.ipynb), then try: write a prompt, press the button, and see how the picture comes about.

# %%
print(6)
"""


def test_its_source_is_exported_stamped_checked_and_adopted_like_a_chapter(root):
    first = next((root / "notebooks" / "source").glob("01_*.py")).stem
    source = root / "notebooks" / "source" / "playground.py"
    source.write_text(SOURCE.replace("01_sums", first), encoding="utf-8")
    (chapter,) = load_chapters(root, ["playground"])
    assert not chapter.is_chapter and load_chapters(root)[-1].path == source
    written = {path.relative_to(root).as_posix() for path in export_chapter(chapter)}
    assert written == {"notebooks/playground.zh.ipynb", "notebooks/playground.en.ipynb"}
    stamp_chapter(chapter)
    export_chapter(load_chapters(root, ["playground"])[0])
    assert {finding.message.split(";")[0] for finding in check_all(root, ["playground"])} == {
        "outputs were never stored"
    }
    path = root / "notebooks" / "playground.en.ipynb"
    notebook = json.loads(path.read_text())
    notebook["metadata"]["widgets"] = {}
    notebook["cells"][0]["source"] = [
        "# Playground\n",
        "\n",
        "Read [the first chapter](nowhere.ipynb), then try: write a prompt, press the button, and watch the picture.",
    ]
    path.write_text(json.dumps(notebook))
    said = " ".join(finding.text() for finding in check_all(root, ["playground"]))
    assert "saved widget state" in said and "course adopt notebooks/playground.en.ipynb" in said
    assert adopt_notebook(path, root).cells and "nowhere.ipynb" in source.read_text(encoding="utf-8")
    said = " ".join(finding.text() for finding in check_all(root, ["playground"]))
    assert "nowhere.ipynb does not exist from notebooks/" in said  # links start where the notebook lies


@pytest.mark.parametrize(("readme", "language"), [("README.md", "en"), ("README.zh.md", "zh")])
def test_the_readmes_lead_to_it(readme, language):
    assert f"](notebooks/playground.{language}.ipynb)" in (ROOT / readme).read_text(encoding="utf-8")
