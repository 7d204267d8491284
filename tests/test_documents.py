"""Reading cards and notes: their code runs, their figures come from code, and every card keeps its form."""

import ast
import io
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from course.documents import half
from course.prose import analyse, reader, words
from course.site_text import Context, Markdown
from course.source import LANGUAGES
from recipes.card_figures import FIGURES, picture

ROOT = Path(__file__).resolve().parents[1]
SECTIONS = {
    "zh": ["一个公式", "一张图", "结构", "我们的代码有何不同", "打个折扣", "考考自己", "在引擎里"],
    "en": [
        *("The one equation", "The picture", "Architecture", "What our code does differently", "With a pinch of salt"),
        *("Test yourself", "Where it lives"),
    ],
}
SOURCE = {"zh": "**来源**：", "en": "**Source:** "}
FOLD = re.compile(r'<details class="fold">\n<summary>(答案|Answer)</summary>\n\n(.+?)\n\n</details>', re.DOTALL)
LENGTH = {"zh": (500, 1200), "en": (350, 700)}  # one page; tables and answers included
NOTE_SECTIONS = {
    "zh": ["打破它", "正确的图景", "在引擎里"],
    "en": ["Break it", "The right picture", "Where it lives"],
}
MISCONCEPTION = {"zh": "**误解**：", "en": "**Misconception:** "}
NOTE_LENGTH = {"zh": (300, 550), "en": (200, 350)}


def names(folder: str) -> list[str]:
    """Documents of a folder without language and suffix."""
    return sorted({path.name[:-6] for path in (ROOT / folder).glob("*.??.md")})


CARDS, NOTES = names("papers"), names("notes")
DOCUMENTS = [f"papers/{name}" for name in CARDS] + [f"notes/{name}" for name in NOTES]
HALVES = [(name, language) for name in CARDS for language in LANGUAGES]


def text_of(document: str, language: str) -> str:
    return half(ROOT / document, language).read_text(encoding="utf-8")


def fences(document: str, language: str) -> list[tuple[str, int]]:
    """Python fences of a document with the line on which their code begins."""
    return [(code, line) for code, line, _ in shown(document, language)]


def shown(document: str, language: str) -> list[tuple[str, int, str | None]]:
    """Python fences with the line on which their code begins and, where one is shown right below, what they print."""
    tokens = reader().parse(text_of(document, language))
    found = []
    for token, below in zip(tokens, [*tokens[1:], None]):
        if token.type == "fence" and token.info.split()[:1] == ["python"]:
            printed = below.content if below and below.type == "fence" and below.info == "text" else None
            found.append((token.content, token.map[0] + 2, printed))
    return found


def own_lines(code: str) -> list[str]:
    """The lines of a fence that are neither empty nor imports; a comment on a line of its own counts."""
    imports = [node for node in ast.parse(code).body if isinstance(node, (ast.Import, ast.ImportFrom))]
    skipped = {line for node in imports for line in range(node.lineno, node.end_lineno + 1)}
    return [line for k, line in enumerate(code.splitlines(), 1) if line.strip() and k not in skipped]


# --- code ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("document", DOCUMENTS)
def test_code_runs_and_prints_what_is_shown(document, capsys):
    torch.manual_seed(0)
    names = {"__name__": "__main__"}
    for code, line, printed in shown(document, "zh"):
        exec(compile("\n" * (line - 1) + code, str(half(ROOT / document, "zh")), "exec"), names)
        found = capsys.readouterr().out
        assert printed is None or found == printed


@pytest.mark.parametrize("document", DOCUMENTS)
def test_code_is_the_same_in_both_languages(document):
    zh, en = ([(code, printed) for code, _, printed in shown(document, language)] for language in LANGUAGES)
    assert zh == en


@pytest.mark.parametrize("name", CARDS)
def test_a_card_has_one_short_fence_that_asserts(name):
    (code, _), *rest = fences(f"papers/{name}", "en")
    tree = ast.parse(code)
    imports = {alias.name for node in tree.body if isinstance(node, ast.Import) for alias in node.names}
    imports |= {node.module for node in tree.body if isinstance(node, ast.ImportFrom)}
    assert not rest and isinstance(tree.body[-1], ast.Assert)
    assert {name.split(".")[0] for name in imports} <= {"torch", "diffusion_engine"}
    assert len(code.splitlines()) <= 12 and max(map(len, code.splitlines())) <= 120


# --- form ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NOTES)
@pytest.mark.parametrize("language", LANGUAGES)
def test_a_note_breaks_its_misconception_with_five_lines(name, language):
    """The fence under "Break it": five lines besides imports, one statement each; what they print stands below."""
    broken = text_of(f"notes/{name}", language).split(f"\n## {NOTE_SECTIONS[language][0]}\n")[1].split("\n## ")[0]
    code, _, printed = shown(f"notes/{name}", language)[0]
    assert code in broken and broken.count("```python") == 1 and printed and "print(" in code
    assert len(own_lines(code)) <= 5, f"{len(own_lines(code))} lines"
    assert ";" not in code and max(map(len, code.splitlines())) <= 100
    heads = [node.lineno for node in ast.walk(ast.parse(code)) if isinstance(node, ast.stmt)]
    assert len(heads) == len(set(heads)), "two statements on one line"


@pytest.mark.parametrize("name", NOTES)
def test_what_else_a_note_runs_is_short_and_asserts(name):
    for code, _, printed in shown(f"notes/{name}", "en")[1:]:
        assert printed is None and isinstance(ast.parse(code).body[-1], ast.Assert)
        assert len(own_lines(code)) <= 9 and max(map(len, code.splitlines())) <= 100


@pytest.mark.parametrize("name", NOTES)
@pytest.mark.parametrize("language", LANGUAGES)
def test_a_note_takes_one_misconception_on_one_page(name, language):
    text = text_of(f"notes/{name}", language)
    headings = analyse(text).headings
    assert headings[0][0] == 1 and headings[0][1].startswith(f"{name[:2]} · ")
    assert headings[1:] == [(2, section) for section in NOTE_SECTIONS[language]]
    assert text.split("\n\n")[1].startswith(MISCONCEPTION[language]) and text.count(MISCONCEPTION[language]) == 1
    low, high = NOTE_LENGTH[language]
    assert low <= words(analyse(text).text, language) <= high


@pytest.mark.parametrize(("name", "language"), HALVES)
def test_a_card_has_its_sections(name, language):
    headings = analyse(text_of(f"papers/{name}", language)).headings
    assert headings[0][0] == 1 and headings[0][1].startswith(f"{name[:2]} · ")
    assert headings[1:] == [(2, section) for section in SECTIONS[language]]


@pytest.mark.parametrize(("name", "language"), HALVES)
def test_a_card_begins_with_its_problem_and_its_source(name, language):
    _, problem, source, *_ = text_of(f"papers/{name}", language).split("\n\n")
    assert problem.rstrip().endswith(("？", "?", "。", "."))  # one paragraph: the map of the site shows it
    assert source.startswith(SOURCE[language])
    assert re.search(r"\(https://(arxiv\.org/abs/\d{4}\.\d{5}|github\.com/[\w.-]+/[\w.-]+)\)", source)


@pytest.mark.parametrize(("name", "language"), HALVES)
def test_a_card_asks_three_questions_and_folds_the_answers(name, language):
    text = text_of(f"papers/{name}", language)
    section = text.split(f"## {SECTIONS[language][-2]}\n")[1].split("\n## ")[0]
    assert re.findall(r"^\*\*(\d)\.\*\* ", section, re.MULTILINE) == ["1", "2", "3"]
    assert len(FOLD.findall(section)) == 3 == text.count("<details") == text.count("</details>")


@pytest.mark.parametrize(("name", "language"), HALVES)
def test_a_card_is_one_page(name, language):
    low, high = LENGTH[language]
    assert low <= words(analyse(text_of(f"papers/{name}", language)).text, language) <= high


@pytest.mark.parametrize(("folder", "there"), [("papers", CARDS), ("notes", NOTES)])
def test_every_card_and_note_that_a_chapter_names_is_there(folder, there):
    named = set()
    for path in (ROOT / "notebooks" / "source").glob("*.py"):
        named |= set(re.findall(rf"`{folder}/(\w+)`", path.read_text(encoding="utf-8")))
    assert named and named <= set(there)


# --- figures ---------------------------------------------------------------------------------------------------------


def test_every_card_has_its_figure():
    assert sorted(FIGURES) == CARDS == sorted(path.stem for path in (ROOT / "papers" / "img").iterdir())
    for name, language in HALVES:
        assert [source for source, _ in analyse(text_of(f"papers/{name}", language)).images] == [f"img/{name}.png"]


@pytest.mark.parametrize("name", FIGURES)
def test_figures_come_from_the_code(name):
    path = ROOT / "papers" / "img" / f"{name}.png"
    kept, drawn = (np.asarray(Image.open(f).convert("RGB"), dtype=int) for f in (path, io.BytesIO(picture(name))))
    assert kept.shape == drawn.shape, f"python -m recipes.card_figures {name}"
    apart = np.abs(kept - drawn).max(-1)
    assert apart.mean() < 1 and (apart > 48).mean() < 0.005, f"python -m recipes.card_figures {name}"
    assert path.stat().st_size < 40_000


def test_an_unknown_figure_is_refused():
    with pytest.raises(ValueError, match="99_x.*try one of 01_rectified_flow"):
        picture("99_x")


# --- on the site -----------------------------------------------------------------------------------------------------


class PlainFormulas:
    """Stands in for KaTeX."""

    def html(self, formula: str, display: bool, where: str) -> str:
        return f"<i>{formula}</i>"

    def plain(self, formula: str, display: bool = False) -> str:
        return formula


def test_the_site_folds_answers_and_renders_what_is_inside():
    markdown = Markdown(PlainFormulas())
    piece = markdown.parse('<details class="fold">\n<summary>A</summary>\n\n*Six*, $k$.\n\n</details>\n', "x", "en")
    context = Context("en", {}, str, str, lambda _: None, lambda _: None)
    html = markdown.render(piece, context)
    assert html.index('<details class="fold">') < html.index("<em>Six</em>") < html.index("</details>")
    assert "<i>k</i>" in html and "&lt;" not in html
