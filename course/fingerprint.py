"""What a chapter's outputs depend on: its code, and every file of ours that the code imports."""

import ast
from functools import lru_cache
from pathlib import Path

from course.files import digest
from course.source import PACKAGES, Chapter

OURS = (*PACKAGES, "course")
REPORTS = ("*.md", "*.png", "quality.json", "training.json")  # assets written about the model, which no chapter reads


@lru_cache(maxsize=4096)
def imports(code: str, package: str = "") -> tuple[tuple[str, str | None], ...]:
    """Every import as (module, name): ``from a.b import c`` is ("a.b", "c"), ``import a.b`` is ("a.b", None).

    Args:
        code: Python source; raises SyntaxError when it does not parse.
        package: dotted package that relative imports start from.
    """
    found = []
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            found += [(alias.name, None) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            module = ".".join([*parts, *([node.module] if node.module else [])])
            found += [(module, alias.name) for alias in node.names]
    return tuple(found)


def is_ours(module: str) -> bool:
    """Whether a dotted name belongs to one of the repository's packages."""
    return module.split(".")[0] in OURS


def locate(root: Path, module: str, name: str | None = None) -> Path | None:
    """The module file or package folder that an import of ours reaches, or None when there is none."""
    for dotted in [f"{module}.{name}"] * (name is not None) + [module]:
        place = root.joinpath(*dotted.split("."))
        if place.with_suffix(".py").is_file():
            return place.with_suffix(".py")
        if place.is_dir():
            return place
    return None


def upstream(root: Path, codes: list[str]) -> list[Path]:
    """Files of ours that the pieces of code import, and those that these import, and so on; sorted.

    A name taken from a package itself (``from diffusion_engine import TextToImage``) may come from anywhere in it,
    so it stands for every module of the package.
    """
    files: set[Path] = set()
    waiting = [(code, "") for code in codes]
    while waiting:
        code, package = waiting.pop()
        for module, name in _imports_or_none(code, package):
            place = locate(root, module, name) if is_ours(module) else None
            reached = sorted(place.rglob("*.py")) if place and place.is_dir() else [place] if place else []
            for path in reached:
                if path not in files:
                    files.add(path)
                    waiting.append((_read(path), ".".join(path.relative_to(root).parts[:-1])))
    return sorted(files)


def run_hash(chapter: Chapter) -> str:
    """Digest of the chapter's code, the modules it reaches, and the shipped assets if one of them names ``assets``."""
    codes = [cell.text for cell in chapter.code]
    files = upstream(chapter.root, codes)
    texts = [_read(path) for path in files]
    if any("assets" in text for text in codes + texts):
        touched = {PACKAGES[0], *(path.relative_to(chapter.root).parts[0] for path in files)}
        for package in [name for name in PACKAGES if name in touched]:
            assets = sorted((chapter.root / package / "assets").rglob("*"))
            files += [path for path in assets if path.is_file() and not any(map(path.match, REPORTS))]
    contents = [digest(path.read_bytes(), length=16) for path in files]
    names = [path.relative_to(chapter.root).as_posix() for path in files]
    return digest(*codes, *names, *contents, length=16)


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def _imports_or_none(code: str, package: str) -> tuple[tuple[str, str | None], ...]:
    """The imports of code that parses; code that does not never ran, so nothing depends on them."""
    try:
        return imports(code, package)
    except SyntaxError:
        return ()
