"""What the site is made of: chapters, documents and the files that they link to, read once and tied together by links."""

import os
import re
import tomllib
from pathlib import Path
from urllib.parse import unquote

from course.documents import STAMP, document_names, half, is_page
from course.files import CourseError, read_notebook
from course.results import Results, fill
from course.site_check import REMOTE
from course.site_math import Formulas
from course.site_pages import Media, Page, share_anchors
from course.site_text import Context, Markdown, code_block, links
from course.source import CHAPTER_NAME, LANGUAGES, Chapter

PICTURES = (".png", ".jpg", ".jpeg", ".gif", ".webp", ".svg")
LARGEST = 300_000  # bytes of a linked text file that gets a page
NOTEBOOK = re.compile(r"\.(zh|en)\.ipynb$")  # a notebook beside the chapters, one a language: the playground
COMMENT = re.compile(r"\A\s*<!--.*?-->\s*", re.DOTALL)  # who wrote a generated file: not for readers
PARTS = re.compile(r"(papers|notes|pages|files)/")
HEADER = re.compile(r"^#     (module|package): (\S+)$", re.MULTILINE)
MODULE = re.compile(r"(diffusion_engine|minivllm)(/\w+)+\.py")


class Library:
    """Every page of the site, read but not yet rendered, and the ways between them.

    Attributes:
        pages: by language and key. by_source: a file from the root → the key of its page.
        modules: a module's path without ``.py`` → the chapter that builds it.
    """

    def __init__(self, root: Path):
        self.root, self.home = root, root / "site"
        self.words = tomllib.loads((self.home / "words.toml").read_text(encoding="utf-8"))
        self.formulas = Formulas(self.home / "vendor" / "katex" / "katex.min.js")
        self.markdown, self.media = Markdown(self.formulas), Media()
        self.pages: dict[tuple[str, str], Page] = {}
        self.by_source: dict[str, str] = {}
        self.modules = chapter_modules(root)
        self.results = Results(root)

    # --- what there is -----------------------------------------------------------------------------------------------

    def collect(self) -> None:
        """Find every page, parse its Markdown, and follow links to files of the repository that need a page too."""
        for path in source_paths(self.root):
            self._add_chapter(path.stem)
        for name in document_names(self.root):
            folder = name.parent.relative_to(self.root).as_posix()
            key = f"{'pages' if folder == 'site/pages' else folder}/{name.name}"
            for language in LANGUAGES:
                if half(name, language).is_file():
                    self._add_document(language, key, half(name, language))
        waiting = list(self.pages.values())
        while waiting:
            waiting = [new for page in waiting for new in self._linked_files(page)]
        self._share_anchors()
        self.formulas.prepare(
            formula
            for page in self.pages.values()
            for piece in page.pieces.values()
            for formula in self.markdown.wanted_formulas(piece)
        )
        for page in self.pages.values():
            page.title = self._title(page)

    def _add_chapter(self, stem: str) -> None:
        for language in LANGUAGES:
            folder = f"notebooks/{language}"
            notebook = read_notebook(self.root / folder / f"{stem}.ipynb")
            if notebook is not None:
                self._add_notebook(language, stem, "chapter", f"{folder}/{stem}.ipynb", notebook["cells"])

    def _add_notebook(self, language: str, key: str, kind: str, path: str, cells: list) -> Page:
        folder, name = os.path.split(path)
        page = Page(language, key, kind, f"notebooks/source/{name.split('.')[0]}.py", folder, cells=cells)
        for place, cell in enumerate(cells):
            if cell["cell_type"] == "markdown":
                page.pieces[cell["id"]] = self.markdown.parse(cell["source"], f"{path}, cell {place + 1}", language)
        self._add(page, path, page.source)
        return page

    def _add_document(self, language: str, key: str, path: Path) -> Page:
        source = path.relative_to(self.root).as_posix()
        page = Page(language, key, "document", source, os.path.dirname(source))
        text = COMMENT.sub("", STAMP.sub("\n", path.read_text(encoding="utf-8")))
        if is_page(path):
            nothing = f'<span class="unmeasured">{self.words[language]["unmeasured"]}</span>'
            text = fill(text, self.results, nothing, source)
        page.pieces["text"] = self.markdown.parse(text, source, language)
        self._add(page, source)
        return page

    def _add(self, page: Page, *sources: str) -> None:
        self.pages[page.language, page.key] = page
        self.by_source |= dict.fromkeys(sources, page.key)

    def _linked_files(self, page: Page) -> list[Page]:
        """New pages for files that this page links to: a model card in both languages, a module's text."""
        new = []
        for link in [link for piece in page.pieces.values() for link in links(piece)]:
            path = self._target(page, link)
            if path is None or path in self.by_source or not (self.root / path).is_file():
                continue
            if path.endswith(".md"):
                base = re.sub(r"(\.zh|\.en)?\.md$", "", path)
                for language in LANGUAGES:
                    choices = [f"{base}.{language}.md", f"{base}.md", path]
                    found = next(choice for choice in choices if (self.root / choice).is_file())
                    new.append(self._add_document(language, f"files/{base}", self.root / found))
                self.by_source[path] = f"files/{base}"
            elif NOTEBOOK.search(path):
                base = NOTEBOOK.sub("", path)
                for language in LANGUAGES:
                    half_path = f"{base}.{language}.ipynb"
                    if notebook := read_notebook(self.root / half_path):
                        new.append(
                            self._add_notebook(language, f"files/{base}", "notebook", half_path, notebook["cells"])
                        )
            elif not path.endswith(PICTURES) and (self.root / path).stat().st_size <= LARGEST:
                new += [self._add_code(language, path) for language in LANGUAGES]
        return new

    def _add_code(self, language: str, path: str) -> Page:
        page = Page(language, f"files/{path}", "code", path, os.path.dirname(path), title=path, heading=path)
        page.body = code_block((self.root / path).read_text(encoding="utf-8"), Path(path).suffix.lstrip(".") or "text")
        self._add(page, path)
        return page

    def _share_anchors(self) -> None:
        for key in dict.fromkeys(key for _, key in self.pages):
            twins = [self.pages[language, key] for language in LANGUAGES if (language, key) in self.pages]
            share_anchors(twins, [self._headings(page) for page in twins])

    def _headings(self, page: Page) -> dict[str, list[str]]:
        """The words of a page's headings by cell, without formulas: they become anchors."""
        found = {}
        for cell, piece in page.pieces.items():
            pairs = zip(piece.tokens, [None, *piece.tokens])
            lines = [now for now, before in pairs if before is not None and before.type == "heading_open"]
            found[cell] = ["".join(child.content for child in line.children or []) for line in lines]
        return found

    def _title(self, page: Page) -> str:
        """The first heading's words."""
        for piece in page.pieces.values():
            for level, said in self.markdown.spoken(piece):
                if level:
                    return said.strip()
        return page.title or page.key

    # --- how things find each other ----------------------------------------------------------------------------------

    def _target(self, page: Page, link: str) -> str | None:
        """The file from the root that a relative link means, or None for a remote link or an anchor alone."""
        place = unquote(link.split("#")[0].split("?")[0])
        if not place or REMOTE.match(link) or link.startswith("mailto:"):
            return None
        return os.path.normpath(os.path.join(page.folder, place)).replace(os.sep, "/")

    def resolve(self, page: Page, link: str) -> str:
        """A link as it stands in the page.

        Raises:
            CourseError: it leads to nothing that the site holds.
        """
        path = self._target(page, link)
        anchor = link.partition("#")[2]
        if path is None:
            return f"#{page.aliases.get(unquote(anchor), anchor)}" if link.startswith("#") else link
        if path.endswith(PICTURES) and (self.root / path).is_file():
            return page.up + self.media.add((self.root / path).read_bytes(), path.rsplit(".", 1)[1])
        other = self.pages.get((page.language, self.by_source.get(path, "")))
        if other is None:
            raise CourseError(f"{page.source}: the link {link} leads to nothing that the site holds")
        return page.href(other, other.aliases.get(unquote(anchor), anchor))

    def picture(self, page: Page, source: str) -> str:
        """A picture of a piece of Markdown as a file of the site."""
        if source.startswith("data:"):
            return self.media.externalise(source, page.up)
        path = self._target(page, source)
        if path is None or not (self.root / path).is_file():
            raise CourseError(f"{page.source}: the picture {source} is not a file of the repository")
        return page.up + self.media.add((self.root / path).read_bytes(), path.rsplit(".", 1)[-1])

    def chapter(self, page: Page, number: str) -> str | None:
        """The way from a page to a chapter by its number; None for the page itself and for chapters to come."""
        found = [other for (language, key), other in self.pages.items() if key.startswith(f"{number}_")]
        found = [other for other in found if other.language == page.language and other.kind == "chapter"]
        return page.href(found[0]) if found and found[0] is not page else None

    def mention(self, page: Page, code: str) -> str | None:
        """The page that a piece of inline code names: ``papers/03_dit``, ``diffusion_engine/dit.py``."""
        if PARTS.match(code) and (other := self.pages.get((page.language, re.sub(r"(\.(zh|en))?\.md$", "", code)))):
            return page.href(other)
        api = self.pages.get((page.language, "api"))
        if api and MODULE.fullmatch(code) and (anchor := code.removesuffix(".py").replace("/", "-")) in api.anchors:
            return page.href(api, anchor)
        return None

    def context(self, page: Page) -> Context:
        """Everything that rendering a page's Markdown needs to know."""
        return Context(
            page.language,
            self.words[page.language],
            lambda link: self.resolve(page, link),
            lambda source: self.picture(page, source),
            lambda number: self.chapter(page, number),
            lambda code: self.mention(page, code),
            list(page.anchors),
        )


def source_paths(root: Path) -> list[Path]:
    """The chapters' sources in reading order."""
    paths = sorted((root / "notebooks" / "source").glob("*.py"))
    return [path for path in paths if CHAPTER_NAME.fullmatch(path.stem)]


def chapter_modules(root: Path) -> dict[str, str]:
    """Module path without ``.py`` → the chapter that builds it, from the sources' headers alone: parsing them takes long."""
    chapters = []
    for path in source_paths(root):
        header = path.read_text(encoding="utf-8").partition("\n# %%")[0]
        chapters.append(Chapter(root, path, dict(HEADER.findall(header)), [], header))
    return {chapter.module: chapter.path.stem for chapter in chapters if chapter.module}
