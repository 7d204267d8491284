"""The site's pages: their code runs, their commands exist, their figures and their table of models are counted again."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from course.cli import app
from course.documents import half
from course.prose import analyse, reader
from course.source import LANGUAGES, load_chapters
from course.tasks import Sheet
from recipes import models
from recipes.page_figures import FIGURES, FOLDER, picture

ROOT = Path(__file__).resolve().parents[1]
PAGES = ["01_about", "02_background", "03_models", "04_plan", "05_report"]
GRADED = [f"{number:02}" for number in range(1, 17)] + ["24", "A1", "A2"]  # week by week
KEPT = json.loads((models.NOTES / "models.json").read_text(encoding="utf-8"))


def text_of(name: str, language: str) -> str:
    return half(ROOT / "site" / "pages" / name, language).read_text(encoding="utf-8")


def fences(name: str, language: str, kind: str) -> list[str]:
    tokens = reader().parse(text_of(name, language))
    return [token.content for token in tokens if token.type == "fence" and token.info == kind]


def test_the_pages_that_there_are():
    assert sorted({path.name[:-6] for path in (ROOT / "site" / "pages").iterdir()}) == PAGES


@pytest.mark.parametrize("name", PAGES)
@pytest.mark.parametrize("language", LANGUAGES)
def test_a_page_begins_with_one_title_and_one_paragraph(name, language):
    """The map of the site shows them."""
    text = text_of(name, language)
    assert [level for level, _ in analyse(text).headings].count(1) == 1 and text.startswith("# ")
    assert re.match(r"[^#|`\-{!]", text.split("\n\n")[1])


# --- the way of a prompt ---------------------------------------------------------------------------------------------


def test_the_loop_on_the_page_is_the_engines():
    (code,), (same,) = (fences("02_background", language, "python") for language in LANGUAGES)
    names = {"__name__": "__main__"}
    with torch.no_grad():
        exec(compile(code, "02_background", "exec"), names)
    assert code == same
    assert torch.allclose(names["x"], names["engine"]("rocket", seed=3).latents, atol=1e-5)
    assert names["picture"].size == (64, 64)


# --- the plan --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("language", LANGUAGES)
def test_every_week_ends_in_commands_that_exist(language):
    """As they are named: the subcommand, its options, a chapter with tasks; what is graded was written out before."""
    known = {command.name or command.callback.__name__ for command in app.registered_commands}
    weeks = [fence for fence in fences("04_plan", language, "sh") if "course " in fence]
    graded = []
    assert len(weeks) == 6
    for week in weeks:
        lines = [line for part in week.splitlines() for line in part.split(" && ")]
        found = [re.fullmatch(rf"course (\w+) ([\dA]\d) --lang {language}", line).groups() for line in lines]
        assert {command for command, _ in found} == {"exercise", "grade"} <= known
        written, asked = ([n for command, n in found if command == name] for name in ("exercise", "grade"))
        assert written == asked and "\n" not in week[week.index("course grade") :].strip()
        graded += asked
    assert graded == GRADED


def test_every_chapter_of_the_plan_has_tasks():
    for chapter in load_chapters(ROOT, GRADED):
        assert Sheet(chapter).tasks, f"chapter {chapter.number} has nothing to grade"


@pytest.mark.parametrize("language", LANGUAGES)
def test_what_a_week_grades_it_also_reads(language):
    for week in text_of("04_plan", language).split("\n## ")[2:8]:
        for number in re.findall(r"course grade ([\dA]\d)", week):
            assert f"notebooks/{language}/{number}_" in week


# --- the models ------------------------------------------------------------------------------------------------------


def test_the_kept_table_has_every_family_and_this_diffusers():
    import diffusers

    assert list(KEPT) == ["diffusers", *models.FAMILIES]
    assert KEPT["diffusers"] == diffusers.__version__, "python -m recipes.models"


@pytest.mark.parametrize("key", ["sana", "ltx"])
def test_a_family_counted_again_is_the_same(key):
    assert models.count(key) == KEPT[key], "python -m recipes.models"


@pytest.mark.parametrize("key", models.FAMILIES)
def test_weights_counted_again_are_the_same(key):
    family = models.FAMILIES[key]
    found = [
        round(models.weights(models.build("diffusers", *part)) / 1e9, 3) for part in (family.transformer, family.vae)
    ]
    assert found == [KEPT[key]["weights_b"], KEPT[key]["vae_b"]], "python -m recipes.models"


@pytest.mark.parametrize("key", ["sd35_large", "flux_dev", "cogvideox_2b", "cogvideox_5b"])
def test_work_is_what_the_formula_says(key):
    """24·D²·L·N + 4·N²·D·L for blocks of 12·D² weights a token, text joined; the rest (doors, knobs) is little."""
    row = KEPT[key]
    n, d, depth = row["tokens"] + row["text_tokens"], row["width"], sum(map(int, row["blocks"].split(" + ")))
    assert row["forward_tflop"] == pytest.approx((24 * d**2 * depth * n + 4 * n**2 * d * depth) / 1e12, rel=0.03)


def test_totals_are_sums_and_products():
    for key, row in KEPT.items():
        if key != "diffusers":
            assert row["bf16_gb"] == pytest.approx(2 * (row["weights_b"] + row["encoders_b"] + row["vae_b"]), abs=0.06)
            assert row["total_pflop"] == pytest.approx(row["forwards"] * row["forward_tflop"] / 1000, abs=0.01)
            assert row["largest_gb"] <= row["bf16_gb"] and row["forwards"] in (row["steps"], 2 * row["steps"])


def test_the_page_says_what_the_numbers_say():
    """The sentences between the tables of page 03, and of page 02."""
    rows = {key: row for key, row in KEPT.items() if key != "diffusers"}
    flux, sana, hunyuan, ltx = (rows[key] for key in ("flux_dev", "sana", "hunyuan_video", "ltx"))
    pictures, videos = ([row for row in rows.values() if bool(row["time"]) == kind] for kind in (False, True))
    assert 4 * sana["tokens"] == flux["tokens"] and 4 * sana["total_pflop"] < rows["sd35_medium"]["total_pflop"]
    assert flux["forward_tflop"] == max(row["forward_tflop"] for row in pictures) and flux["forwards"] == flux["steps"]
    assert rows["sd35_medium"]["encoders_b"] > rows["sd35_medium"]["weights_b"]
    assert hunyuan["width"] == flux["width"] and 28 < hunyuan["tokens"] / flux["tokens"] < 30
    assert hunyuan["forward_tflop"] > 100 * flux["forward_tflop"]
    assert ltx["frames"] == max(row["frames"] for row in videos) and ltx["tokens"] == min(
        row["tokens"] for row in videos
    )
    small = [row for row in videos if row["weights_b"] < 6]
    assert all(row["bf16_gb"] < flux["bf16_gb"] and row["total_pflop"] > flux["total_pflop"] for row in small)
    assert 1000 < flux["flop_per_weight_byte"] < 10000  # "three orders of magnitude" above 1


# --- figures ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FIGURES)
def test_figures_come_from_the_code(name, tmp_path):
    path, drawn = FOLDER / f"{name}.png", tmp_path / "drawn.png"
    drawn.write_bytes(picture(name))
    kept, again = (np.asarray(Image.open(f).convert("RGB"), dtype=int) for f in (path, drawn))
    assert kept.shape == again.shape, f"python -m recipes.page_figures {name}"
    apart = np.abs(kept - again).max(-1)
    assert apart.mean() < 1 and (apart > 48).mean() < 0.005, f"python -m recipes.page_figures {name}"
    assert path.stat().st_size < 80_000
    assert any(f"../images/{name}.png" in text_of(page, "en") for page in PAGES)


def test_an_unknown_figure_is_refused():
    with pytest.raises(ValueError, match="no figure 'x'; try one of road"):
        picture("x")
