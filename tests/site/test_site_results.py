"""Numbers on the site's pages: read from committed results, refused when unknown, told when not measured yet."""

import copy
import json
import re
import shutil

import pytest
from bench_example import bench
from small_site import ROOT, small_site

from course.documents import document_findings, half
from course.files import CourseError
from course.results import LATER, SOURCES, Results, fill, places
from course.site import build_site
from course.source import LANGUAGES
from course.terms import load_terms

PAGES = sorted({path.name[:-6] for path in (ROOT / "site" / "pages").glob("*.??.md")})
NUMBERS = {
    "quality": {
        "vae": {"mean": 32.06, "best": [3.0, 1.0, 5.0]},
        "rows": [{"a b 0.1": 1}, {"a b 0.1": 4}],
        "none": None,
    },
    "training": {"word": "a|b", "yes": True, "list": [{"k": "x", "n": 1, "v": 6}, {"k": "x", "n": 2, "v": 7}]},
}


@pytest.fixture
def root(tmp_path):
    """A small repository with results and no bench."""
    small_site(tmp_path)
    for name, data in NUMBERS.items():
        path = tmp_path / SOURCES[name]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(data))
    return tmp_path


def page(root, zh: str, en: str | None = None):
    """Write one page of the site."""
    for language, text in (("zh", zh), ("en", zh if en is None else en)):
        path = root / "site" / "pages" / f"01_page.{language}.md"
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"# P\n\n{text}\n")


def read(root, text: str) -> str:
    return fill(text, Results(root), "?", "here.md")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("{{quality.vae.mean:.1f}} dB", "32.1 dB"),
        ("{{ quality.vae.mean :.0f}}", "32"),
        ("{{quality.vae.mean:.1%}}", "3206.0%"),
        ("{{quality.vae.best:.1f}}", "3.0 (1.0 … 5.0)"),
        ("{{quality.vae.best.1:g}}", "1"),
        ("{{quality.rows.1.a b 0.1}}", "4"),  # a key with a dot and spaces in it
        ("{{sum quality.rows.*.a b 0.1}} {{max quality.rows.*.a b 0.1}}", "5 4"),
        ("{{sum quality.rows.*.a b 0.1:.2f}} {{training.list.k=x,n=2.v}}", "5.00 7"),
        ("{{median quality.rows.*.a b 0.1:.1f}} {{min quality.rows.*.a b 0.1}}", "2.5 1"),
        ("{{quality.none:.1f}}", "–"),
        ("{{training.word}}", "a\\|b"),  # it may stand in a table
        ("{{bench.picture.picture.seconds:.2f}}", "?"),
        ("{{max bench.diffusers.stacks.*.peak_ratio:.2f}}", "?"),
        ("{{course.chapters}} {{course.cards}}", "1 1"),
        ("x^{a} and {b}", "x^{a} and {b}"),
    ],
)
def test_a_place_is_filled(root, text, shown):
    header = root / "notebooks" / "source" / "01_small.py"
    header.write_text("# ---\n# jupyter:\n#   course:\n#     minutes: 5\n# ---\n\n# %%\n")
    assert read(root, text) == shown


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{{quality.vae.meen:.1f}}", "there is no meen; try mean"),
        ("{{quality.vae.mean.x}}", "one step too many"),
        ("{{quality.rows.2.a b 0.1}}", "there is no 2"),
        ("{{quality.rows.*.a b 0.1}}", "2 values; put min, max, median, sum before it"),
        ("{{qualty.vae.mean}}", "no results called qualty"),
        ("{{bench.pictur.seconds}}", "no section pictur; try one of picture"),
        ("{{quality.vae}}", "a dict is no number"),
        ("{{training.yes}}", "a bool is no number"),
        ("{{training.word:.1f}}", "here.md: {{training.word:.1f}}"),
        ("{{clip_quality.a}}", "clip_model/quality.json cannot be read"),
        ("{{training.list.k=x.v}}", "2 values"),
        ("{{training.list.k=y.v}}", "no entry has k=y"),
        ("{{}}", "is not {{source.path:spec}}"),
        ("{{mean quality.vae.mean}}", "is not {{source.path:spec}}"),
    ],
)
def test_what_is_not_there_is_refused(root, text, told):
    with pytest.raises(CourseError) as error:
        read(root, text)
    assert told in str(error.value) and "here.md" in str(error.value)


def test_an_unknown_key_stops_the_site(root):
    page(root, "{{quality.vae.meen}}")
    with pytest.raises(CourseError, match="01_page.zh.md.*there is no meen; try mean"):
        build_site(root)
    assert not (root / "site" / "build").exists()


def test_course_check_finds_an_unknown_key_and_twins_that_read_other_numbers(root):
    page(root, "{{quality.vae.mean}} {{quality.vae.meen}}", "{{quality.vae.mean:.2f}}")
    found = {(finding.rule, finding.message) for finding in document_findings(root, load_terms(root))}
    told = {rule: message for rule, message in found}
    assert "there is no meen" in told["result"]
    assert "parity" in told and "{{quality.vae.meen}}" in told["parity"] and "mean}}" not in told["parity"]
    assert places("{{a.b:.1f}} {{ max a.*.c }}") == ["{{ max a.*.c}}", "{{a.b}}"]


def test_the_site_shows_numbers_and_says_what_is_not_measured(root):
    page(root, "{{quality.vae.mean:.1f}} dB, {{bench.picture.picture.seconds:.2f}} s", None)
    html = {
        language: (build_site(root).output / language / "pages" / "01_page.html").read_text() for language in LANGUAGES
    }
    assert "32.1 dB" in html["zh"] and '<span class="unmeasured">未测</span> s' in html["zh"]
    assert '<span class="unmeasured">unmeasured</span> s' in html["en"] and "{{" not in html["en"]
    path = root / SOURCES["bench"]
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({"picture": {"picture": {"seconds": [1.25, 1.0, 1.5]}}}))
    html = (build_site(root).output / "en" / "pages" / "01_page.html").read_text()
    assert "1.25 (1.00 … 1.50) s" in html and "unmeasured</span>" not in html


# --- the pages of the course -----------------------------------------------------------------------------------------


def test_the_example_has_the_form_of_a_real_report():
    from recipes.bench import SECTIONS, minivllm, optimizations, reference
    from recipes.bench.__main__ import markdown

    report = bench()
    assert list(report) == list(LATER["bench"]) and set(report) <= set(SECTIONS)
    assert "# Measurements" in markdown(report)  # every section writes its lines from it
    assert set(report["optimizations"]["switches"]) == set(optimizations.SWITCHES)
    assert {row["family"] for row in report["reference"]["rows"]} == set(reference.CASES)
    assert {row["model"] for row in report["minivllm"]["transformers"]} == set(minivllm.MODELS)


@pytest.fixture
def measured(tmp_path):
    """The course's results, with the example as its bench."""
    for name in SOURCES.values():
        if name != SOURCES["bench"]:
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, tmp_path / name)
    for folder in ("notebooks/source", "tests/mutants", "diffusion_engine", "papers", "notes"):
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
    for path in (ROOT / "notebooks" / "source").glob("*.py"):
        shutil.copy(path, tmp_path / "notebooks" / "source" / path.name)
    (tmp_path / SOURCES["bench"]).write_text(json.dumps(bench()))
    return tmp_path


@pytest.mark.parametrize("name", PAGES)
@pytest.mark.parametrize("language", LANGUAGES)
def test_every_place_on_every_page_is_found(measured, name, language):
    """With a whole report nothing is left unmeasured; without one, or with half, everything else is there."""
    text = half(ROOT / "site" / "pages" / name, language).read_text(encoding="utf-8")
    filled = fill(text, Results(measured), "UNMEASURED", name)
    assert "UNMEASURED" not in filled and "{{" not in filled
    path = measured / SOURCES["bench"]
    path.write_text(json.dumps({"picture": bench()["picture"]}))
    asked = [place for place in places(text) if "bench." in place and "bench.picture." not in place]
    assert fill(text, Results(measured), "UNMEASURED", name).count("UNMEASURED") == len(asked)
    path.unlink()
    every = [place for place in places(text) if "bench." in place]
    assert fill(text, Results(measured), "UNMEASURED", name).count("UNMEASURED") == len(every)


@pytest.mark.parametrize("language", LANGUAGES)
def test_the_report_reads_its_measurements_and_types_none(language):
    """In the tables of what got faster every row's numbers are read; what is typed there are goals."""
    text = half(ROOT / "site" / "pages" / "05_report", language).read_text(encoding="utf-8")
    section = text.split("\n## ")[4]
    tables = re.findall(r"(?:^\|.*\n)+", section, re.MULTILINE)
    rows = [row for table in tables for row in table.splitlines()[2:]]
    assert len(tables) >= 7 and len(rows) > 30
    for row in rows:
        assert "bench." in row, f"{row} reads nothing"
        typed = re.sub(r"\{\{.*?\}\}|`[^`]*`|[≤≥] [\d.]+", "", row)
        assert set(re.findall(r"(?<![\w.])\d[\d.]*", typed)) <= {"2048", "16", "32", "512", "0"}, (
            f"{row} has a typed number"
        )


def test_a_report_that_lost_a_key_is_noticed(measured):
    report = copy.deepcopy(bench())
    del report["minivllm"]["cache"]["speed"]
    (measured / SOURCES["bench"]).write_text(json.dumps(report))
    text = half(ROOT / "site" / "pages" / "05_report", "zh").read_text(encoding="utf-8")
    with pytest.raises(CourseError, match="there is no speed"):
        fill(text, Results(measured), "?", "05_report.zh.md")
