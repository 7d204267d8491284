"""Reading cards, notes and the site's pages: Markdown pairs ``NAME.zh.md`` and ``NAME.en.md``, held to the rules of twins."""

import re
from pathlib import Path

from course.files import CourseError
from course.findings import Finding
from course.prose import analyse
from course.results import Results, fill, places
from course.rules_prose import differences, link_faults, render_faults, stamp_fault
from course.source import twin_stamp
from course.terms import Term, term_faults

FOLDERS = ("papers", "notes", "site/pages")
STAMP = re.compile(r"\n*<!-- twin: ([0-9a-f]{8}) -->\n*$")


def document_names(root: Path) -> list[Path]:
    """Every document without its ``.zh.md`` or ``.en.md``, whether both halves are there or one."""
    paths = [path for folder in FOLDERS for path in (root / folder).glob("*.md")]
    return sorted({path.with_name(path.name[:-6]) for path in paths if path.name.endswith((".zh.md", ".en.md"))})


def half(name: Path, language: str) -> Path:
    """The file of one language."""
    return name.with_name(f"{name.name}.{language}.md")


def read_pair(name: Path) -> tuple[str, str, str | None]:
    """Both texts without the stamp, and the stamp."""
    zh, en = (half(name, language).read_text(encoding="utf-8") for language in ("zh", "en"))
    found = STAMP.search(en)
    return zh, STAMP.sub("\n", en), found.group(1) if found else None


def document_findings(root: Path, terms: tuple[Term, ...]) -> list[Finding]:
    """All pairs: both halves there, stamped, with the same skeleton, and each well written."""
    findings = []
    for name in document_names(root):
        files = {language: half(name, language) for language in ("zh", "en")}
        shown = {language: path.relative_to(root).as_posix() for language, path in files.items()}
        for language in ("zh", "en"):
            if files[language].is_file():
                findings += _half_findings(files[language], shown[language], language, root, terms)
            else:
                findings.append(Finding(shown[language], "twin", "missing; its twin in the other language is there"))
        if all(path.is_file() for path in files.values()):
            zh, en, stamp = read_pair(name)
            findings += [Finding(shown["en"], "parity", m) for m in differences(analyse(zh), analyse(en))]
            if is_page(name) and places(zh) != places(en):
                findings.append(Finding(shown["en"], "parity", f"the results that are read differ: {_apart(zh, en)}"))
            if message := stamp_fault(zh, en, stamp):
                fix = f"look at both, then `course twins {name.relative_to(root).as_posix()}`"
                findings.append(Finding(shown["en"], "stamp", f"{message}; {fix}"))
    return findings


def _half_findings(path: Path, name: str, language: str, root: Path, terms: tuple[Term, ...]) -> list[Finding]:
    """One file: rendering, terms, links."""
    text = path.read_text(encoding="utf-8")
    findings = [Finding(name, rule, message) for rule, message in render_faults(text)]
    findings += [Finding(name, "term", m) for m in term_faults(analyse(text).text, language, terms)]
    findings += [Finding(name, "link", m) for m in link_faults(text, path.parent, root)]
    if is_page(path):
        try:
            fill(text, Results(root), "–", name)
        except CourseError as error:
            findings.append(Finding(name, "result", str(error)))
    return findings


def is_page(path: Path) -> bool:
    """Whether a document is one of the site's own pages, which read results: ``{{quality.vae.mean_psnr_db:.1f}}``."""
    return path.parent.name == "pages"


def _apart(zh: str, en: str) -> str:
    """What only one of the twins reads."""
    return ", ".join(sorted(set(places(zh)) ^ set(places(en)))) or "one reads something twice"


def stamped(zh: str, en: str) -> str:
    """The en text with a fresh stamp as its last line."""
    return f"{en.rstrip()}\n\n<!-- twin: {twin_stamp(zh, en)} -->\n"
