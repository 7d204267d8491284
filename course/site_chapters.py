"""A chapter's notebook as HTML: nbconvert's exporter with the site's template, Markdown, highlighting and pictures."""

import base64
import html
import re
from collections.abc import Iterator
from pathlib import Path

import nbformat
from markdown_it.token import Token
from nbconvert.exporters.templateexporter import TemplateExporter
from nbformat.v4.rwbase import rejoin_lines

from course.files import CourseError
from course.outputs import ALT, IMAGE
from course.site_pages import Media, Page, Section
from course.site_text import Context, Markdown, Piece, code_block

TITLE = re.compile(r"(?P<number>\d\d|A\d) · (?P<title>.*?)(?:（(?P<gloss>[^（）]*)）)?")
FOLDED = ("hide", "solution")
SLIDER = '<figure class="slider"'
SPOKEN_OUTPUT = 2000  # characters of one text output that search looks through


class ChapterExporter(TemplateExporter):
    """Notebook → the HTML of its cells. One exporter serves every page; `convert` tells it which.

    Args:
        templates: the folder that holds ``notebook/index.html.j2``.
    """

    file_extension = ".html"
    template_extension = ".html.j2"
    output_mimetype = "text/html"

    def __init__(self, templates: Path, markdown: Markdown, media: Media):
        super().__init__(extra_template_basedirs=[str(templates)], template_name="notebook")
        self.markdown, self.media = markdown, media
        self.page: Page | None = None
        self.context: Context | None = None
        ours = {"prose": self._prose, "code": self._code, "kind": self._kind, "role": self._role}
        ours |= {"picture": self._picture, "foreign": self._foreign, "word": self._word, "fold": self._fold}
        for name, function in ours.items():
            self.register_filter(name, function)

    def convert(self, page: Page, context: Context) -> str:
        """The cells of a chapter as HTML; fills the page's heading, promise, facts and sections too."""
        self.page, self.context = page, context
        page.sections = list(chapter_sections(page, self.markdown))
        notebook = nbformat.from_dict({"cells": page.cells, "metadata": {}, "nbformat": 4, "nbformat_minor": 5})
        return self.from_notebook_node(rejoin_lines(notebook))[0]

    # --- filters of the template -------------------------------------------------------------------------------------

    def _prose(self, cell) -> str:
        piece = self.page.pieces[cell.id]
        if cell.id == self.page.cells[0].get("id"):
            return self._lead(piece)
        return self.markdown.render(piece, self.context)

    def _lead(self, piece: Piece) -> str:
        """The chapter's head: the rest of the first cell after title, promise and facts; those go to the page."""
        page, context, rest = self.page, self.context, list(piece.tokens)
        heading, promise = take(rest, "heading_open"), take(rest, "paragraph_open")
        table = take(rest, "table_open")
        if heading:
            context.anchors.pop(0)
            name_page(page, self.markdown.inline(heading[1].children, piece, context))
        if promise:
            page.promise = self.markdown.inline(promise[1].children, piece, context)
        cells = [token for token in table if token.type == "inline"]
        if table and len(cells) % 2 == 0 and sum(token.type == "tr_open" for token in table) == 2:
            half = len(cells) // 2
            shown = [self.markdown.inline(cell.children, piece, context) for cell in cells]
            page.facts = list(zip(shown[:half], shown[half:], strict=True))
            table = []
        return self.markdown.render(piece._replace(tokens=table + rest), context)

    def _code(self, cell) -> str:
        return code_block(cell.source, "python", self._label(cell))

    def _label(self, cell) -> str:
        words, kind = self.context.words, self._kind(cell)
        if kind == "export":
            return words["export"]
        if kind == "check":
            return words["passed"] if cell.get("execution_count") else words["check"]
        return ""

    @staticmethod
    def _kind(cell) -> str:
        """The first of a cell's tags that the site shows, or ``demo``."""
        tags = cell.metadata.get("tags", [])
        return next((tag for tag in ("solution", "hide", "check", "export") if tag in tags), "demo")

    def _role(self, cell) -> str:
        return "prose" if cell.cell_type == "markdown" else self._kind(cell)

    def _fold(self, cell) -> str:
        """What stands on a folded cell."""
        kind = self._kind(cell)
        if kind == "solution":
            found = re.match(r"#\s*(\d)\b", cell.source)
            return f"{self.context.words['solution']}{' ' + found.group(1) if found else ''}"
        exported = "export" in cell.metadata.get("tags", [])
        return self.context.words["folded" if exported else kind]

    def _picture(self, output, mime: str) -> str:
        data, extension = output.data[mime], {"image/svg+xml": "svg", "image/jpeg": "jpg"}.get(mime, "png")
        alt = (output.get("metadata", {}).get(mime) or {}).get("alt", "")
        if not alt.strip():
            raise CourseError(f"{self.page.source}: a picture without alt text; end the plot with show(fig, alt=…)")
        raw = "".join(data).encode() if extension == "svg" else base64.b64decode("".join(data))
        return self.media.figure(raw, extension, alt, self.page.up, "en" if self.page.language != "en" else "")

    def _foreign(self, output) -> str:
        """HTML that a cell made (a slider, a table), its pictures moved to files."""
        text = "".join(output.data["text/html"])
        for image in IMAGE.findall(text):
            if not ALT.search(image):
                raise CourseError(f"{self.page.source}: an HTML output holds a picture without alt text: {image[:60]}…")
        if SLIDER in text:
            return self.media.externalise(slider_html(text, self.context.words["still"]), self.page.up)
        return f'<div class="foreign" tabindex="0">{self.media.externalise(text, self.page.up)}</div>'

    def _word(self, name: str) -> str:
        return self.context.words[name]


def slider_html(text: str, still: str) -> str:
    """A slider of `course.sliders` as the site shows it: its picture on a card, its look left to the style sheet.

    Args:
        still: what stands there without scripts.
    """
    text = re.sub(r'(<(?!output)[^<>]*) style="[^"]*"', r"\1", text)
    text = re.sub(r"<noscript>.*?</noscript>", f"<noscript><small>{still}</small></noscript>", text, flags=re.DOTALL)
    return re.sub(r"<img\b([^<>]*)>", r'<div class="card"><img\1 loading="lazy" decoding="async"></div>', text, count=1)


def name_page(page: Page, heading: str) -> None:
    """Take a chapter's title apart: number, title, the English term in brackets."""
    found = TITLE.fullmatch(heading)
    page.number, page.heading = (found["number"], found["title"]) if found else ("", heading)
    page.gloss = (found["gloss"] or "") if found else ""


def take(tokens: list[Token], kind: str) -> list[Token]:
    """Remove the block that the list begins with, if it is of that kind, and return its tokens."""
    if not tokens or tokens[0].type != kind:
        return []
    depth, end = 0, 0
    while depth or not end:
        depth += tokens[end].nesting
        end += 1
    block = tokens[:end]
    del tokens[:end]
    return block


def chapter_sections(page: Page, markdown: Markdown) -> Iterator[Section]:
    """The chapter cut at its headings: prose, code and text outputs of each."""
    anchors = iter(page.anchors)
    section = None
    for cell in page.cells:
        if cell["cell_type"] == "markdown":
            for level, said in markdown.spoken(page.pieces[cell["id"]]):
                if level:
                    if section:
                        yield section
                    section = Section(next(anchors), level, said.strip())
                elif section:
                    section.prose.append(said)
        elif cell["cell_type"] == "code" and section:
            section.code += [cell["source"], *spoken_outputs(cell)]
    if section:
        yield section


def spoken_outputs(cell) -> Iterator[str]:
    """What a cell printed, and what its pictures show."""
    for output in cell.get("outputs", []):
        data = output.get("data", {})
        if "text" in output:
            yield "".join(output["text"])[:SPOKEN_OUTPUT]
        elif "image/png" in data:
            yield (output.get("metadata", {}).get("image/png") or {}).get("alt", "")
        elif "text/html" in data:
            text = re.sub(r"<noscript>.*?</noscript>", "", "".join(data["text/html"]), flags=re.DOTALL)
            said = [found.group(1)[1:-1] for found in map(ALT.search, IMAGE.findall(text)) if found]
            yield html.unescape(" ".join([*said, re.sub(r"<[^>]*>", " ", text)]))[:SPOKEN_OUTPUT]
        elif "text/plain" in data:
            yield "".join(data["text/plain"])[:SPOKEN_OUTPUT]
