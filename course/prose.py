"""What a piece of Markdown says once rendered: its headings, formulas, links, figures, plain text and leftovers."""

import re
from dataclasses import dataclass, field
from functools import lru_cache

from markdown_it import MarkdownIt
from markdown_it.token import Token
from mdit_py_plugins.dollarmath import dollarmath_plugin
from mdit_py_plugins.footnote import footnote_plugin

HAN = re.compile(r"[\u3400-\u9fff\uf900-\ufaff]")
WORD = re.compile(r"[A-Za-zÀ-ÿ0-9][\w'’.-]*")
HTML_LINK = re.compile(r"""<a\b[^>]*\bhref=["']([^"']+)""", re.IGNORECASE)
HTML_IMAGE = re.compile(r"""<img\b[^>]*\bsrc=["']([^"']+)""", re.IGNORECASE)
ESCAPED = "\ufffc"  # stands where an escaped character stood, so that `\*\*` and `\$` are no leftovers


@dataclass
class Prose:
    """One piece of Markdown, taken apart."""

    headings: list[tuple[int, str]] = field(default_factory=list)
    formulas: list[str] = field(default_factory=list)
    links: list[str] = field(default_factory=list)
    images: list[tuple[str, str]] = field(default_factory=list)
    tables: list[tuple[int, int]] = field(default_factory=list)  # rows, cells
    items: int = 0
    fences: int = 0
    texts: list[str] = field(default_factory=list)  # every inline text, without code and formulas
    paragraphs: list[str] = field(default_factory=list)  # those outside headings, tables and lists

    @property
    def text(self) -> str:
        """Everything a reader reads as words, one block a line."""
        return "\n".join(self.texts)


@lru_cache(maxsize=1)
def reader() -> MarkdownIt:
    """The course's Markdown: CommonMark, tables, strikethrough, footnotes, dollar maths; escapes are kept apart."""
    markdown = MarkdownIt("commonmark").enable(["table", "strikethrough"]).use(footnote_plugin)
    return markdown.use(dollarmath_plugin, double_inline=True, allow_labels=False).disable("text_join")


@lru_cache(maxsize=8192)
def analyse(text: str) -> Prose:
    """Take one piece of Markdown apart."""
    prose, open_blocks = Prose(), []
    for token in reader().parse(text):
        if token.nesting == 1:
            open_blocks.append(token.tag if token.type == "heading_open" else token.type.removesuffix("_open"))
            _open(token, prose)
        elif token.nesting == -1:
            open_blocks.pop()
        elif token.type == "inline":
            _inline(token, prose, open_blocks)
        elif token.type.startswith("math_block"):
            prose.formulas.append(token.content)
        elif token.type in ("fence", "code_block"):
            prose.fences += 1
        elif token.type == "html_block":
            _html(token.content, prose)
    return prose


def _open(token: Token, prose: Prose) -> None:
    """Count what a block adds by being there."""
    if token.type == "table_open":
        prose.tables.append((0, 0))
    elif token.type in ("tr_open", "td_open", "th_open"):
        rows, cells = prose.tables[-1]
        prose.tables[-1] = (rows + 1, cells) if token.type == "tr_open" else (rows, cells + 1)
    elif token.type == "list_item_open":
        prose.items += 1


def _inline(token: Token, prose: Prose, blocks: list[str]) -> None:
    """Sort the pieces of one line of prose."""
    words = []
    for child in token.children or []:
        if child.type == "text":
            words.append(child.content)
        elif child.type == "text_special":
            words.append(ESCAPED)
        elif child.type in ("softbreak", "hardbreak"):
            words.append("\n")
        elif child.type.startswith("math_inline"):
            prose.formulas.append(child.content)
            words.append(" ")
        elif child.type == "link_open":
            prose.links.append(str(child.attrGet("href")))
        elif child.type == "image":
            prose.images.append((str(child.attrGet("src")), child.content))
        elif child.type == "html_inline":
            _html(child.content, prose)
        elif child.type == "code_inline":
            words.append(" ")
    text = "".join(words)
    prose.texts.append(text)
    if blocks and re.fullmatch(r"h[1-6]", blocks[-1]):
        prose.headings.append((int(blocks[-1][1]), text.strip()))
    elif not {"table", "bullet_list", "ordered_list"} & set(blocks):
        prose.paragraphs.append(text)


def _html(text: str, prose: Prose) -> None:
    """Links and pictures written as HTML."""
    prose.links += HTML_LINK.findall(text)
    prose.images += [(source, "html") for source in HTML_IMAGE.findall(text)]


def words(text: str, language: str) -> int:
    """Length as a reader feels it: words in English, Han characters and Latin words in Chinese."""
    if language == "en":
        return len(WORD.findall(text))
    return len(HAN.findall(text)) + len(WORD.findall(HAN.sub(" ", text)))
