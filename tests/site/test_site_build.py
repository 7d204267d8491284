"""What `course site` writes and what stops it, without a browser."""

import json
import re
import subprocess
import sys
import time

import pytest
from small_site import ROOT, code, foreign, markdown, picture, png, small_site

from course.files import CourseError
from course.site import build_site
from course.site_api import docstring_html, read_module
from course.site_check import site_faults
from course.site_pages import anchor_name, github_name
from course.sliders import Frame, static_face
from course.source import LANGUAGES

COLOURS = list(enumerate(("red", "blue")))
STEMS = sorted(path.stem for path in (ROOT / "notebooks" / "zh").glob("*.ipynb"))


def page(root, path: str) -> str:
    return (root / "site" / "build" / path).read_text(encoding="utf-8")


# --- the course's own site -------------------------------------------------------------------------------------------


def test_every_chapter_has_a_page_in_both_languages(built):
    assert STEMS
    for language in LANGUAGES:
        there = {path.stem for path in (built.output / language).glob("*.html")}
        assert there == {"index", "api", *STEMS}


@pytest.mark.parametrize("language", LANGUAGES)
def test_previous_and_next_walk_the_course(built, language):
    walked, after = [], STEMS[0]
    while after:
        text = (built.output / language / f"{after}.html").read_text()
        before = re.findall(r'rel="prev" href="([^"]+)\.html"', text)
        assert before == walked[-1:]
        walked.append(after)
        after = next(iter(re.findall(r'rel="next" href="([^"]+)\.html"', text)), None)
    assert walked == STEMS


def test_it_is_small_and_quick(tmp_path):
    start = time.process_time()  # the machine may be busy with something else; this is our own time
    built = build_site(ROOT, tmp_path / "build")
    assert time.process_time() - start < 20
    assert built.size < 25e6


def test_nothing_is_imported_or_executed(tmp_path):
    asked = f"""
import sys
from pathlib import Path
from course.site import build_site
build_site(Path({str(ROOT)!r}), Path({str(tmp_path / "build")!r}))
print(sorted({{name.split(".")[0] for name in sys.modules}} & {{"torch", "matplotlib", "diffusion_engine", "ipykernel", "IPython"}}))
"""
    done = subprocess.run([sys.executable, "-c", asked], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_second_build_is_the_same(small_built, tmp_path):
    again = build_site(small_site(tmp_path))
    for path in small_built.output.rglob("*"):
        if path.is_file():
            assert path.read_bytes() == (again.output / path.relative_to(small_built.output)).read_bytes(), path.name


def test_katex_ships_its_fonts_once():
    vendor = ROOT / "site" / "vendor" / "katex"
    style = (vendor / "katex.min.css").read_text()
    fonts = set(re.findall(r"url\(fonts/([^)]+)\)", style))
    assert fonts == {path.name for path in (vendor / "fonts").iterdir()}
    assert all(name.endswith(".woff2") for name in fonts) and "http" not in style


# --- what stops a build ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cell", "message"),
    [
        (markdown("01-x-01", r"Bad: $\frac{1$"), r"01_small.ipynb, cell 6: the formula .* does not parse"),
        (markdown("01-x-01", "Bad: $速度 = 3$"), "does not parse"),
        (markdown("01-x-01", "See [this](99_nothing.ipynb)."), "leads to nothing"),
        (markdown("01-x-01", "See [this](#nowhere)."), "no such anchor"),
        (markdown("01-x-01", "![a figure](missing.png)"), "not a file"),
        (markdown("01-x-01", '<img src="https://example.org/x.png" alt="x">'), "loads .* from elsewhere"),
        (code("01-x-01", "plot()", picture(alt=None)), "without alt text"),
        (code("01-x-01", "table()", foreign(f'<img src="data:image/png;base64,{png()}">')), "without alt text"),
        (code("01-x-01", "x()", foreign('<script src="//cdn.example.org/x.js"></script>')), "loads .* from elsewhere"),
        (code("01-x-01", "x()", foreign("<style>@import 'https://example.org/x.css'</style>")), "from elsewhere"),
    ],
)
def test_what_would_be_broken_stops_the_build(tmp_path, cell, message):
    small_site(tmp_path, cell)
    with pytest.raises(CourseError, match=message):
        build_site(tmp_path)
    assert not (tmp_path / "site" / "build").exists()


def test_a_failed_build_leaves_the_last_one(tmp_path):
    small_site(tmp_path)
    build_site(tmp_path)
    before = page(tmp_path, "en/01_small.html")
    notebook = tmp_path / "notebooks" / "en" / "01_small.ipynb"
    notebook.write_text(notebook.read_text().replace("count to $3$", r"count to $\\nosuchcommand$"))
    with pytest.raises(CourseError, match="nosuchcommand"):
        build_site(tmp_path)
    assert page(tmp_path, "en/01_small.html") == before


def test_it_writes_only_where_it_wrote(tmp_path):
    small_site(tmp_path / "repository")
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "letter.txt").write_text("mine")
    with pytest.raises(CourseError, match="not empty"):
        build_site(tmp_path / "repository", tmp_path / "home")
    assert [path.name for path in (tmp_path / "home").iterdir()] == ["letter.txt"]


def test_what_is_gone_disappears_and_nothing_else(tmp_path):
    small_site(tmp_path)
    build = build_site(tmp_path).output
    (build / "letter.txt").write_text("mine")
    for language in LANGUAGES:
        (tmp_path / "papers" / f"01_small.{language}.md").unlink()
    build_site(tmp_path)
    assert not (build / "en" / "papers" / "01_small.html").exists()
    assert (build / "letter.txt").read_text() == "mine"


def test_the_check_follows_links_as_a_browser_does():
    def faults(text: str) -> list[str]:
        return site_faults({"en/a.html": text.encode(), "b.html": b'<p id="here">', "x y.png": b""})

    assert not faults('<a href="../b.html#here">b</a><img src="../x%20y.png"><a href="https://example.org">o</a>')
    assert not faults('<p>a style="color:red" url(https://x) in prose</p>')
    for bad in (
        '<a href="b.html">b</a>',
        '<a href="../b.html#gone">b</a>',
        '<img src="../gone.png">',
        "<img src='//example.org/x.png'>",
        '<link rel="stylesheet" href="https://example.org/x.css">',
        '<p style="background: url(https://example.org/x.png)">',
    ):
        assert faults(bad), bad


# --- the small site --------------------------------------------------------------------------------------------------


def test_both_languages_share_anchors(small_built):
    for path in ("01_small.html", "papers/01_small.html"):
        ids = [
            re.findall(r'<h\d id="([^"]+)"', (small_built.output / language / path).read_text())
            for language in LANGUAGES
        ]
        assert ids[0] == ids[1] and len(ids[0]) == 2
    assert 'id="counting"' in (small_built.output / "zh" / "01_small.html").read_text()


def test_anchors_and_what_github_calls_them():
    assert anchor_name("QK-norm: content, not volume") == "qk-norm-content-not-volume"
    assert anchor_name("三") == "section"
    assert github_name("QK 归一化：别让嗓门") == "qk-归一化别让嗓门"


def test_cards_appear_by_themselves_and_are_linked(small_built, tmp_path):
    chapter = (small_built.output / "en" / "01_small.html").read_text()
    assert '<a href="papers/01_small.html"><code>' in chapter
    card = (small_built.output / "zh" / "papers" / "01_small.html").read_text()
    assert '<a class="ref" href="../01_small.html">第 01 章</a>' in card
    assert 'href="papers/01_small.html"' in (small_built.output / "zh" / "index.html").read_text()
    small_site(tmp_path, paper=False)
    build_site(tmp_path)
    assert "<code>papers/<wbr>01_small</code>" in page(tmp_path, "en/01_small.html")
    assert "papers/01_small.html" not in page(tmp_path, "en/01_small.html")


def test_links_by_the_names_that_the_repository_uses(tmp_path):
    text = "See [the twin](01_small.ipynb#数一数), [here](#counting), [card](../../papers/01_small.en.md#the-point), [it](../../diffusion_engine/README.md)."
    small_site(tmp_path, markdown("01-x-01", text))
    (tmp_path / "diffusion_engine" / "README.md").write_text(
        "<!-- Made by a script. -->\n\n# Read\n\n[code](small.py)\n"
    )
    (tmp_path / "diffusion_engine" / "README.zh.md").write_text("# 读\n\n[代码](small.py)\n")
    notebook = tmp_path / "notebooks" / "en" / "01_small.ipynb"
    notebook.write_text(notebook.read_text().replace("#数一数", "#counting"))
    build_site(tmp_path)
    assert 'href="#counting">the twin' in page(tmp_path, "zh/01_small.html")
    assert 'href="papers/01_small.html#the-point"' in page(tmp_path, "zh/01_small.html")
    assert "读" in page(tmp_path, "zh/files/diffusion_engine/README.html")
    read = page(tmp_path, "en/files/diffusion_engine/README.html")
    assert read.count("<h1") == 1 and "Made by" not in read
    assert "Peano" in page(tmp_path, "en/files/diffusion_engine/small.py.html")


def test_folds_tags_and_pictures(small_built):
    text = (small_built.output / "zh" / "01_small.html").read_text()
    assert re.search(
        r'class="cell code hide".*?<details class="fold"><summary>绘图代码</summary>.*?</details>.*?<img', text, re.S
    )
    assert re.search(r'class="cell code solution" id="[^"]+"><details class="fold"><summary>答案 1</summary>', text)
    assert "写进引擎" in text and 'alt="A red square" lang="en" width="8" height="6"' in text
    media = list((small_built.output / "media").iterdir())
    assert len(media) == 1  # both languages show the same file


def test_pictures_inside_html_become_files(tmp_path):
    frame = f"data:image/png;base64,{png('blue')}"
    slider = (
        f'<img src="{frame}" alt="One frame"><input type="range" aria-label="step" oninput="this.title=\'{frame}\'">'
    )
    small_site(tmp_path, code("01-x-01", "slide()", foreign(slider)))
    build_site(tmp_path)
    text = page(tmp_path, "en/01_small.html")
    assert "base64" not in text and text.count("../media/") == 3 and "oninput=" in text


def test_a_slider_keeps_its_frames_as_files_and_loses_what_the_site_styles(tmp_path):
    frames = [Frame(str(n), f"data:image/png;base64,{png(name)}", f"A {name} square", 8, 6) for n, name in COLOURS]
    small_site(tmp_path, code("01-x-01", "slide()", foreign(static_face(frames, "n"))))
    build_site(tmp_path)
    for language, still in (("zh", "脚本"), ("en", "scripts")):
        text = page(tmp_path, f"{language}/01_small.html")
        figure = re.search(r'<figure class="slider".*?</figure>', text, re.S).group()
        assert "base64" not in figure and '<div class="card"><img src="../media/' in figure
        assert still in re.search("<noscript>(.*?)</noscript>", figure).group(1)
        files = re.search('data-frames="([^"]*)"', figure).group(1).split("|")
        assert len(set(files)) == 2
        assert all((tmp_path / "site" / "build" / language / file).is_file() for file in files)
    index = (tmp_path / "site" / "build" / "assets" / "search-index.js").read_text()
    assert "A red square" in index and "Run the cell" not in index


def test_a_slider_with_a_missing_frame_would_be_noticed():
    text = '<input type="range" data-frames="../media/a.png|../media/b.png">'
    faults = site_faults({"en/a.html": text.encode(), "media/a.png": b""})
    assert faults == ["en/a.html: ../media/b.png leads nowhere"]


def test_multiline_json_reads_as_one_text(tmp_path):
    output = {
        "output_type": "execute_result",
        "data": {"text/plain": ["[1,\n", " 2]"]},
        "metadata": {},
        "execution_count": 1,
    }
    small_site(tmp_path, code("01-x-01", "x", output))
    build_site(tmp_path)
    assert "[1,\n 2]</pre>" in page(tmp_path, "en/01_small.html")


def test_quotes_are_curly_in_english_alone(tmp_path):
    small_site(tmp_path, markdown("01-x-01", 'They said "go" and `"code"`.'))
    build_site(tmp_path)
    assert "“go”" in page(tmp_path, "en/01_small.html") and "&quot;go&quot;" in page(tmp_path, "zh/01_small.html")
    assert "<code>&quot;code&quot;</code>" in page(tmp_path, "en/01_small.html")


def test_the_index_joins_both_languages(small_built):
    script = (small_built.output / "assets" / "search-index.js").read_text()
    index = json.loads(script.removeprefix("window.SITE_INDEX=").rstrip(";\n"))
    (entry,) = [entry for entry in index["entries"] if entry[1] == "counting"]
    assert index["pages"][entry[0]] == [
        "01_small",
        "chapter",
        {"zh": "01 · 小章（small chapter）", "en": "01 · A small chapter"},
    ]
    assert entry[2]["zh"] == ["数一数", "注意力在这里，见 papers/01_small。"] and entry[2]["en"][0] == "Counting"
    assert "count(3)" in entry[3] and "3 of them" in entry[3] and "A red square" in entry[3]


# --- the reference ---------------------------------------------------------------------------------------------------


def test_the_reference_reads_signatures_and_docstrings(small_built, tmp_path):
    module = read_module(small_site(tmp_path) / "diffusion_engine" / "small.py", tmp_path)
    count, counter = module.entries
    assert module.source == "notebooks/source/01_small.py"
    assert count.signature == "count(n: int, *, step: float = 1.0) -> int"
    assert "<dt><code>n</code></dt><dd>how far, at least <code>0</code>.</dd>" in count.doc
    assert "<dt><code>ValueError</code></dt><dd><code>n</code> is below 0.</dd>" in count.doc
    assert counter.signature == "Counter(start: int = 0)" and counter.members[0].name == "next"
    text = (small_built.output / "en" / "api.html").read_text()
    assert 'id="diffusion_engine-small.Counter.next"' in text and 'href="01_small.html"' in text


def test_docstrings_are_text_not_markup():
    assert docstring_html("a <b> & c < d") == "<p>a &lt;b&gt; &amp; c &lt; d</p>"
    assert "<pre" in docstring_html("Use it:\n\n    x = 1\n")


def test_the_reference_covers_every_public_name(built):
    import ast

    text = (built.output / "en" / "api.html").read_text()
    for path in (ROOT / "diffusion_engine").glob("[a-z]*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
                assert f'id="diffusion_engine-{path.stem}.{node.name}"' in text


def test_folded_engine_code_is_not_called_plotting_code(built):
    """Chapter 02 folds a table of settings that belongs to its module."""
    text = (built.output / "en" / "02_scheduler.html").read_text(encoding="utf-8")
    fold = re.search(r"<summary>([^<]*)</summary>(?:(?!</details>).)*_FOLLOWED", text, re.S)
    assert fold and fold.group(1) == "More of the engine"
    assert "<summary>Plotting code</summary>" in text
