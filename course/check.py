"""All rules over the whole repository, without running anything."""

from pathlib import Path

from course.contract import import_findings, module_order
from course.documents import document_findings
from course.files import CourseError
from course.findings import Finding
from course.rules_generated import generated_findings, orphan_findings
from course.rules_prose import text_findings, twin_findings
from course.rules_source import source_findings
from course.source import Chapter, chapter_paths, load_chapter
from course.terms import load_terms


def check_all(root: Path, wanted: list[str] | None = None) -> list[Finding]:
    """Every finding, in reading order; with ``wanted`` only those of some chapters."""
    chapters, findings = _load(root)
    chosen = set(chapter_paths(root, wanted))
    terms, order = load_terms(root), module_order(chapters)
    for chapter in chapters:
        if chapter.path in chosen:
            findings += source_findings(chapter) + import_findings(chapter, order)
            findings += twin_findings(chapter) + text_findings(chapter, terms) + generated_findings(chapter)
    findings += _shared_modules(chapters)
    if not wanted:
        findings += orphan_findings(root, chapters) + document_findings(root, terms)
    return findings


def _load(root: Path) -> tuple[list[Chapter], list[Finding]]:
    """All chapters that can be read, and a finding for each that cannot."""
    chapters, findings = [], []
    for path in chapter_paths(root):
        try:
            chapters.append(load_chapter(path, root))
        except CourseError as error:
            findings.append(Finding(path.relative_to(root).as_posix(), "source", str(error)))
    return chapters, findings


def _shared_modules(chapters: list[Chapter]) -> list[Finding]:
    """Two chapters that claim one module, or one number."""
    findings, owners = [], {}
    for chapter in chapters:
        for key in filter(None, (chapter.module, f"number {chapter.number}")):
            if key in owners:
                findings.append(Finding(chapter.source, "header", f"{key} is already {owners[key]}'s"))
            owners.setdefault(key, chapter.source)
    return findings
