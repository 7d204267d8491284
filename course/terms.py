"""The one list of terms, ``notes/terms.csv``, and the words that prose may not use in their place."""

import csv
import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from course.files import CourseError

COLUMNS = ["zh", "en", "forbidden_zh", "forbidden_en"]


@dataclass(frozen=True)
class Term:
    """One row: the fixed term in both languages, and for each language the variants that are red."""

    fixed: dict[str, str]
    forbidden: dict[str, tuple[str, ...]]


def load_terms(root: Path) -> tuple[Term, ...]:
    """Read the list; no list, no terms.

    Raises:
        CourseError: other columns, a term without its twin, or a variant that is itself a fixed term.
    """
    path = root / "notes" / "terms.csv"
    if not path.is_file():
        return ()
    with path.open(encoding="utf-8", newline="") as file:
        reader = csv.DictReader(file)
        if reader.fieldnames != COLUMNS:
            raise CourseError(f"notes/terms.csv has columns {reader.fieldnames}; expected {','.join(COLUMNS)}")
        rows = list(reader)
    terms = []
    for row in rows:
        if not row["zh"] or not row["en"]:
            raise CourseError(f"notes/terms.csv: {row['zh'] or row['en']} lacks the term of the other language")
        variants = {lang: tuple(filter(None, (row[f"forbidden_{lang}"] or "").split("|"))) for lang in ("zh", "en")}
        terms.append(Term({"zh": row["zh"], "en": row["en"]}, variants))
    for language in ("zh", "en"):
        fixed = {term.fixed[language].lower() for term in terms}
        for term in terms:
            if both := fixed & {variant.lower() for variant in term.forbidden[language]}:
                raise CourseError(f"notes/terms.csv: {both.pop()} is both a term and forbidden")
    return tuple(terms)


def term_faults(text: str, language: str, terms: tuple[Term, ...]) -> list[str]:
    """One message for each forbidden variant that the text uses."""
    faults = []
    for term in terms:
        for variant in term.forbidden[language]:
            if _uses(text, variant, language, terms):
                faults.append(f"{variant}: the term is {term.fixed[language]} (notes/terms.csv)")
    return faults


def _uses(text: str, variant: str, language: str, terms: tuple[Term, ...]) -> bool:
    """Whether the variant stands in the text other than inside a longer fixed term."""
    pattern = _pattern(variant, language)
    if not pattern.search(text):
        return False
    for other in terms:
        if pattern.search(other.fixed[language]):
            text = text.replace(other.fixed[language], " ")
    return bool(pattern.search(text))


@lru_cache(maxsize=1024)
def _pattern(variant: str, language: str) -> re.Pattern:
    """Whole words in any case for English; the bare characters for Chinese."""
    if language == "en":
        return re.compile(rf"(?<![\w-]){re.escape(variant)}s?(?![\w-])", re.IGNORECASE)
    return re.compile(re.escape(variant))
