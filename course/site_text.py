"""Markdown as the site shows it: formulas by KaTeX, code by Pygments, anchors that both languages share, links resolved."""

import html
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

from markdown_it import MarkdownIt
from markdown_it.token import Token
from mdit_py_plugins.amsmath import amsmath_plugin
from mdit_py_plugins.dollarmath import dollarmath_plugin
from mdit_py_plugins.footnote import footnote_plugin
from mdit_py_plugins.tasklists import tasklists_plugin
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexer import Lexer
from pygments.lexers import get_lexer_by_name
from pygments.util import ClassNotFound

from course.site_math import Formulas

CHAPTERS = {
    "zh": re.compile(r"第 ?(?:\d\d|A\d)(?:(?:[、和与到]| ?[–-] ?)(?:\d\d|A\d))* ?章"),
    "en": re.compile(r"\b[Cc]hapters? (?:\d\d|A\d)(?:(?:, | and | to | or |–)(?:\d\d|A\d))*\b"),
}
BOX = '<input class="task-list-item-checkbox"'
FORMATTER = HtmlFormatter(nowrap=True)
SHORT = 18  # characters of a formula that never breaks across lines
NUMBER = re.compile(r"\d\d|A\d")
MATH = {"math_inline": False, "math_inline_double": True, "math_block": True, "amsmath": True}


class Piece(NamedTuple):
    """A piece of Markdown, parsed: a prose cell or a whole document."""

    tokens: list[Token]
    env: dict
    where: str


@dataclass
class Context:
    """What rendering needs to know of the page that the piece stands on."""

    language: str
    words: dict
    resolve: Callable[[str], str]  # a link as written → as it stands in the page
    picture: Callable[[str], str]  # a picture as written → its file in the site
    chapter: Callable[[str], str | None]  # "05" → that chapter, or None
    mention: Callable[[str], str | None]  # inline code → the page that it names, or None
    anchors: list[str] = field(default_factory=list)  # of the headings still to come


@lru_cache(maxsize=4096)
def highlighted(code: str, language: str = "python") -> str:
    """Code as spans of Pygments' classes, without a wrapper."""
    lexer = lexer_of(language)
    return highlight(code, lexer, FORMATTER).rstrip("\n") if lexer else html.escape(code)


@lru_cache
def lexer_of(language: str) -> Lexer | None:
    """Pygments' lexer for a language, or None when it knows none of that name."""
    try:
        return get_lexer_by_name(language, stripnl=False)
    except ClassNotFound:
        return None


def code_block(code: str, language: str, label: str = "") -> str:
    """A block of code; the page's script adds the copy button to its bar."""
    tag = f'<span class="tag">{html.escape(label)}</span>' if label else ""
    shown = highlighted(code.rstrip("\n"), language)
    return f'<div class="source"><div class="bar">{tag}</div><pre tabindex="0"><code>{shown}</code></pre></div>'


class Markdown:
    """The site's Markdown: parse everything first, render when every anchor and formula is known."""

    def __init__(self, formulas: Formulas):
        self.formulas = formulas
        self.md = MarkdownIt("commonmark").enable(["table", "strikethrough", "smartquotes"]).use(footnote_plugin)
        self.md.use(dollarmath_plugin, double_inline=True, allow_labels=False).use(amsmath_plugin)
        self.md.use(tasklists_plugin)
        rules = {name: self._math for name in MATH} | {"heading_open": self._heading, "heading_close": self._close}
        rules |= {"text": self._text, "code_inline": self._code, "fence": self._fence, "code_block": self._fence}
        rules |= {"link_open": self._link, "image": self._image, "html_inline": self._inline_html}
        for name, rule in rules.items():  # assigned, so that a rule stays a method of this object
            self.md.renderer.rules[name] = rule
        self.md.renderer.rules["table_open"] = lambda *_: '<div class="table" tabindex="0"><table>\n'
        self.md.renderer.rules["table_close"] = lambda *_: "</table></div>\n"

    def parse(self, text: str, where: str, language: str) -> Piece:
        """Parse one piece; ``where`` names it in errors. English gets its curly quotes."""
        self.md.options["typographer"] = language == "en"
        env: dict = {"docId": re.sub(r"\W+", "-", where)}  # footnotes of two cells must not share ids
        return Piece(self.md.parse(text, env), env, where)

    def render(self, piece: Piece, context: Context) -> str:
        """The piece as HTML."""
        return self.md.renderer.render(piece.tokens, self.md.options, self._env(piece, context))

    def inline(self, children: list[Token], piece: Piece, context: Context) -> str:
        """The inside of one heading, paragraph or table cell as HTML, without links to chapters."""
        env = self._env(piece, context) | {"in_heading": True}
        return self.md.renderer.renderInline(children, self.md.options, env)

    @staticmethod
    def _env(piece: Piece, context: Context) -> dict:
        return {**piece.env, "context": context, "where": piece.where}

    # --- rules -------------------------------------------------------------------------------------------------------

    def _math(self, tokens, idx, options, env) -> str:
        token, display = tokens[idx], MATH[tokens[idx].type]
        shown = self.formulas.html(token.content.strip(), display, env["where"])
        if not display:
            short = " short" if len(self.formulas.plain(token.content.strip())) <= SHORT else ""
            return f'<span class="math{short}">{shown}</span>'
        tag = "span" if token.type == "math_inline_double" else "div"
        label = env["context"].words["formula"]
        return f'<{tag} class="math display" tabindex="0" role="group" aria-label="{label}">{shown}</{tag}>'

    def _heading(self, tokens, idx, options, env) -> str:
        anchors = env["context"].anchors
        env["in_heading"], env["anchor"] = True, anchors.pop(0)
        return f'<{tokens[idx].tag} id="{env["anchor"]}">'

    def _close(self, tokens, idx, options, env) -> str:
        env["in_heading"], label = False, env["context"].words["anchor"]
        tag = tokens[idx].tag
        link = "" if tag == "h1" else f' <a class="anchor" href="#{env["anchor"]}" aria-label="{label}">#</a>'
        return f"{link}</{tag}>\n"

    def _text(self, tokens, idx, options, env) -> str:
        shown = html.escape(tokens[idx].content, quote=True)
        if env.get("in_heading") or _inside_link(tokens, idx):
            return shown
        return CHAPTERS[env["context"].language].sub(lambda found: _chapters(found.group(), env["context"]), shown)

    def _code(self, tokens, idx, options, env) -> str:
        content = tokens[idx].content
        shown = f"<code>{html.escape(content).replace('/', '/<wbr>')}</code>"
        linkable = not env.get("in_heading") and not _inside_link(tokens, idx)
        target = env["context"].mention(content) if linkable else None
        return f'<a href="{html.escape(target)}">{shown}</a>' if target else shown

    def _fence(self, tokens, idx, options, env) -> str:
        language = (tokens[idx].info.split() or ["text"])[0]
        return code_block(tokens[idx].content, language)

    def _link(self, tokens, idx, options, env) -> str:
        target = env["context"].resolve(str(tokens[idx].attrGet("href")))
        return f'<a href="{html.escape(target, quote=True)}">'

    def _image(self, tokens, idx, options, env) -> str:
        source = env["context"].picture(str(tokens[idx].attrGet("src")))
        alt = html.escape(tokens[idx].content, quote=True)
        return f'<img class="figure" src="{html.escape(source, quote=True)}" alt="{alt}" loading="lazy">'

    def _inline_html(self, tokens, idx, options, env) -> str:
        content, label = tokens[idx].content, env["context"].words["task"]
        return content.replace(BOX, f'{BOX} aria-label="{label}"')

    # --- what a piece says -------------------------------------------------------------------------------------------

    def wanted_formulas(self, piece: Piece) -> Iterator[tuple[str, bool]]:
        """Every formula of the piece as (TeX, display)."""
        for token in every_token(piece.tokens):
            if token.type in MATH:
                yield token.content.strip(), MATH[token.type]

    def plain(self, inline: Token) -> str:
        """The words of one inline token."""
        said = []
        for token in inline.children or []:
            if token.type in MATH:
                said.append(self.formulas.plain(token.content.strip(), MATH[token.type]))
            elif token.type in ("softbreak", "hardbreak"):
                said.append(" ")
            elif token.type != "html_inline":
                said.append(token.content)
        return "".join(said)

    def spoken(self, piece: Piece) -> Iterator[tuple[int, str]]:
        """The piece in order as (heading level or 0, words)."""
        for token, before in zip(piece.tokens, [None, *piece.tokens]):
            if token.type == "inline":
                level = int(before.tag[1]) if before is not None and before.type == "heading_open" else 0
                yield level, self.plain(token)
            elif token.type in ("math_block", "amsmath"):
                yield 0, self.formulas.plain(token.content.strip(), True)
            elif token.type in ("fence", "code_block"):
                yield 0, token.content


def every_token(tokens: list[Token]) -> Iterator[Token]:
    """The tokens and their children."""
    for token in tokens:
        yield token
        yield from token.children or []


def links(piece: Piece) -> list[str]:
    """The targets of the piece's links as they are written."""
    return [str(token.attrGet("href")) for token in every_token(piece.tokens) if token.type == "link_open"]


def _inside_link(tokens: list[Token], idx: int) -> bool:
    opened = sum({"link_open": 1, "link_close": -1}.get(token.type, 0) for token in tokens[:idx])
    return opened > 0


def _chapters(said: str, context: Context) -> str:
    """“chapter 05” as one link; in “chapters 05 and 06” each number is one."""
    numbers = NUMBER.findall(said)
    if len(numbers) == 1:
        target = context.chapter(numbers[0])
        return f'<a class="ref" href="{target}">{said}</a>' if target else said

    def link(found: re.Match) -> str:
        target = context.chapter(found.group())
        return f'<a class="ref" href="{target}">{found.group()}</a>' if target else found.group()

    return NUMBER.sub(link, said)
