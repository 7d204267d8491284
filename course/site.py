"""``course site``: chapters, cards, notes and the engine's reference as static HTML in two languages, from committed files."""

import html
import json
import os
import re
import time
from dataclasses import dataclass
from pathlib import Path

import jinja2

from course.files import CourseError
from course.site_api import api_sections, read_package
from course.site_chapters import ChapterExporter, name_page, take
from course.site_check import REMOTE, site_faults
from course.site_hero import hero_svg
from course.site_library import Library
from course.site_pages import Page, Section, commits
from course.site_search import search_index
from course.site_text import highlighted
from course.source import LANGUAGES

MANIFEST = ".files"  # what the last build wrote, so that the next one removes what is gone, and nothing else


@dataclass(frozen=True)
class Built:
    """What a build made: the folder, how many pages and files, how large, how long it took."""

    output: Path
    pages: int
    files: int
    size: int
    seconds: float


class Site(Library):
    """All pages of one build, held in memory until every link is known to resolve."""

    def __init__(self, root: Path):
        super().__init__(root)
        self.exporter = ChapterExporter(self.home / "templates", self.markdown, self.media)
        self.templates = jinja2.Environment(
            loader=jinja2.FileSystemLoader(self.home / "templates"),
            undefined=jinja2.StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        plain = {"e": lambda text: html.escape(str(text)), "highlighted": highlighted, "relink": relink}
        self.templates.filters |= plain
        self.commits = commits(root)

    def render(self) -> dict[str, bytes]:
        """Every file of the site by path."""
        self._add_reference()
        for page in self.pages.values():
            if page.kind in ("chapter", "notebook"):
                page.body = self.exporter.convert(page, self.context(page))
            elif page.kind == "document":
                self._render_document(page)
        maps = [Page(language, "index", "map", "", "", title=self.words[language]["site"]) for language in LANGUAGES]
        self.pages |= {(page.language, page.key): page for page in maps}
        files = {page.path: self._html(page).encode() for page in self.pages.values()}
        files["index.html"] = self._front().encode()
        files["assets/search-index.js"] = search_index(list(self.pages.values()), LANGUAGES).encode()
        return files | self._assets() | self.media.files

    def _add_reference(self) -> None:
        order = [f"{module}.py" for module in self.modules]
        modules = read_package(self.root, "diffusion_engine", order)
        for language in LANGUAGES:
            page = Page(language, "api", "api", "diffusion_engine", "", title=self.words[language]["api"])
            page.heading, page.sections = page.title, api_sections(modules)
            page.anchors = [module.anchor for module in modules]
            self._add(page)
            chapters = {f"{module}.py": self.pages.get((language, stem)) for module, stem in self.modules.items()}
            template = self.templates.get_template("api.html.j2")
            page.body = template.render(modules=modules, chapters=chapters, page=page, words=self.words[language])

    def _render_document(self, page: Page) -> None:
        (piece,), context = page.pieces.values(), self.context(page)
        tokens = list(piece.tokens)
        page.sections = list(self._document_sections(page))
        if heading := take(tokens, "heading_open"):
            context.anchors.pop(0)
            name_page(page, self.markdown.inline(heading[1].children, piece, context))
        else:
            page.heading = html.escape(page.title)
        page.body = self.markdown.render(piece._replace(tokens=tokens), context)
        first = next((a for b, a in zip(piece.tokens, piece.tokens[1:]) if b.type == "paragraph_open"), None)
        page.promise = self.markdown.inline(first.children, piece, context) if first else ""

    def _document_sections(self, page: Page) -> list[Section]:
        anchors, sections = iter(page.anchors), []
        for level, said in self.markdown.spoken(page.pieces["text"]):
            if level:
                sections.append(Section(next(anchors), level, said.strip()))
            elif sections:
                sections[-1].prose.append(said)
        return sections

    def group(self, language: str, name: str) -> list[Page]:
        """The pages of one part in reading order: ``chapters``, ``appendix``, ``papers``, ``notes`` or ``pages``."""
        pages = [page for page in self.pages.values() if page.language == language]
        if name in ("chapters", "appendix"):
            return [p for p in pages if p.kind == "chapter" and p.key.startswith("A") == (name == "appendix")]
        return [page for page in pages if page.kind == "document" and page.key.startswith(f"{name}/")]

    def _groups(self, language: str) -> list[tuple[str, list[Page]]]:
        names = ("pages", "chapters", "appendix", "papers", "notes")
        return [(name, found) for name in names if (found := self.group(language, name))]

    def _neighbours(self, page: Page) -> tuple[Page | None, Page | None]:
        """The pages before and after this one in its part."""
        row = [other for _, pages in self._groups(page.language) for other in pages if _same_part(other, page)]
        place = row.index(page) if page in row else -1
        if place < 0:
            return None, None
        return (row[place - 1] if place else None), (row[place + 1] if place + 1 < len(row) else None)

    def _html(self, page: Page) -> str:
        language = page.language
        other = next(name for name in LANGUAGES if name != language)
        twin = self.pages.get((other, page.key)) or self.pages[other, "index"]
        before, after = self._neighbours(page)
        template = self.templates.get_template("map.html.j2" if page.kind == "map" else "page.html.j2")
        return template.render(
            page=page,
            words=self.words[language],
            other=other,
            twin=page.href(twin),
            groups=self._groups(language),
            before=before,
            after=after,
            commit=self.commits.get(page.source, "") or (self.commits.get("", "") if not page.source else ""),
            source=page.source,
            home=self.pages[language, "index"],
            api=self.pages[language, "api"],
            up=page.up,
            settings=self._settings(page),
        )

    def _settings(self, page: Page) -> str:
        """What the page's script needs to know, as JSON inside a script element."""
        words = self.words[page.language]["script"]
        key = page.key if page.kind == "chapter" else ""
        data = {"language": page.language, "up": page.up, "chapter": key, "words": words}
        return json.dumps(data, ensure_ascii=False).replace("</", "<\\/")

    def _front(self) -> str:
        demo = self.home / "images" / "demo.png"
        picture = self.media.add(demo.read_bytes(), "png") if demo.is_file() else ""
        template = self.templates.get_template("front.html.j2")
        hero = hero_svg().replace("LABEL", html.escape(self.words["en"]["hero"]))
        return template.render(words=self.words, hero=hero, picture=picture, up="", commit=self.commits.get("", ""))

    def _assets(self) -> dict[str, bytes]:
        """Styles, scripts and fonts; KaTeX's script stays behind, its work is done."""
        files = {f"assets/{path.name}": path.read_bytes() for path in sorted((self.home / "assets").iterdir())}
        katex = self.home / "vendor" / "katex"
        shipped = [katex / "katex.min.css", katex / "LICENSE", *sorted((katex / "fonts").glob("*.woff2"))]
        return files | {f"katex/{path.relative_to(katex).as_posix()}": path.read_bytes() for path in shipped}


def relink(shown: str, source: Page, page: Page) -> str:
    """HTML made for one page as another page may show it: its links start elsewhere."""

    def move(found: re.Match) -> str:
        link = found.group(1)
        if REMOTE.match(link) or link.startswith("mailto:"):
            return found.group()
        if link.startswith("#"):
            return f'href="{page.href(source)}{link}"'
        path, mark, anchor = link.partition("#")
        target = os.path.normpath(os.path.join(os.path.dirname(source.path), path))
        return f'href="{os.path.relpath(target, os.path.dirname(page.path)).replace(os.sep, "/")}{mark}{anchor}"'

    return re.sub(r'href="([^"]*)"', move, shown)


def _same_part(one: Page, other: Page) -> bool:
    return one.key.rpartition("/")[0] == other.key.rpartition("/")[0] and one.kind == other.kind


def build_site(root: Path, output: Path | None = None) -> Built:
    """Build the site; nothing is executed, and nothing is written unless everything is right.

    Args:
        output: a folder; ``site/build`` by default.

    Raises:
        CourseError: a formula that does not parse, a link, anchor or picture that leads nowhere, a figure without alt
            text, anything that would be loaded from elsewhere.
    """
    start = time.perf_counter()
    output = output or root / "site" / "build"
    site = Site(root)
    site.collect()
    files = site.render()
    if faults := site_faults(files):
        more = f"\n… and {len(faults) - 20} more" if len(faults) > 20 else ""
        raise CourseError("the site would be broken:\n" + "\n".join(faults[:20]) + more)
    write_site(output, files)
    size = sum(len(data) for data in files.values())
    return Built(output, len(site.pages) + 1, len(files), size, time.perf_counter() - start)


def write_site(output: Path, files: dict[str, bytes]) -> None:
    """Write the files that changed and remove those that an earlier build wrote and this one did not.

    Raises:
        CourseError: the folder holds files that no build wrote.
    """
    manifest = output / MANIFEST
    if output.is_dir() and not manifest.is_file() and any(output.iterdir()):
        raise CourseError(f"{output} is not empty and was not written by `course site`; name another folder")
    old = manifest.read_text(encoding="utf-8").splitlines() if manifest.is_file() else []
    output.mkdir(parents=True, exist_ok=True)
    manifest.write_text("".join(f"{name}\n" for name in sorted({*old, *files})), encoding="utf-8")
    for name, data in files.items():
        path = output / name
        if not path.is_file() or path.read_bytes() != data:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
    for name in set(old) - set(files):
        (output / name).unlink(missing_ok=True)
    manifest.write_text("".join(f"{name}\n" for name in sorted(files)), encoding="utf-8")
