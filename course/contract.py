"""The import contract: a chapter stands on earlier chapters alone, in every cell."""

import sys
from pathlib import Path

from course.findings import Finding, at
from course.fingerprint import OURS, imports, is_ours, locate, upstream
from course.source import PACKAGES, Cell, Chapter

RUNTIME = {"torch", "numpy", "safetensors", "tokenizers", "huggingface_hub", "PIL", "tqdm", "typer", "rich", "imageio"}
REFERENCES = {"diffusers", "transformers"}
BORROWER = "diffusion_engine/reference/run"  # the one module that borrows VAEs and text encoders
OVERVIEW = "00"


def import_findings(chapter: Chapter, order: dict[str, str]) -> list[Finding]:
    """Imports that break the contract.

    Args:
        chapter: the chapter.
        order: dotted module → number of the chapter that builds it, for all chapters.
    """
    findings = []
    for cell in chapter.code:
        try:
            found = imports(cell.text)
        except SyntaxError as error:
            findings.append(
                at(chapter, cell, "syntax", f"line {error.lineno}: {error.msg}; a cell is plain Python, no magics")
            )
            continue
        for module, name in found:
            rule = _ours if is_ours(module) else _theirs
            if message := rule(chapter, cell, module, name, order):
                findings.append(at(chapter, cell, "import", message))
    return findings


def _theirs(chapter: Chapter, cell: Cell, module: str, name: str | None, order: dict[str, str]) -> str:
    """Third-party imports: references only where parity is checked, in a module only the engine's own dependencies."""
    top = module.split(".")[0]
    if top in REFERENCES:
        allowed = "check" in cell.tags or chapter.module == BORROWER
        return "" if allowed else f"{top} outside a check cell; only parity checks and {BORROWER} use it"
    if "export" in cell.tags and top not in RUNTIME | set(sys.stdlib_module_names):
        return f"{top} in an export cell is no dependency of the engine; it may use {', '.join(sorted(RUNTIME))}"
    return ""


def _ours(chapter: Chapter, cell: Cell, module: str, name: str | None, order: dict[str, str]) -> str:
    """Imports of our packages: earlier modules only, packages apart, no tools in a module."""
    package = module.split(".")[0]
    if "export" in cell.tags and package != (chapter.module or "").split("/")[0]:
        return f"{package} in an export cell of {chapter.module}; {', '.join(OURS)} never import each other"
    if package == "course":
        return "" if locate_tool(module, name) else f"course has no {'.'.join(filter(None, [module, name]))}"
    dotted = f"{module}.{name}" if name and f"{module}.{name}" in order else module
    if dotted in order:
        return _early(chapter, dotted, order)
    place = locate(chapter.root, module, name)
    if place is None:
        return f"there is no module {module}; a chapter must build it first"
    if chapter.number == OVERVIEW:
        return ""
    if place.is_dir():
        return f"{name or module} comes from the package {module}; name the module that defines it"
    for path in upstream(chapter.root, [place.read_text(encoding="utf-8")]):  # hand-written: as late as what it uses
        inner = ".".join(path.relative_to(chapter.root).with_suffix("").parts)
        if inner in order and (message := _early(chapter, inner, order)):
            return f"{module} uses a later module: {message}"
    return ""


def _early(chapter: Chapter, dotted: str, order: dict[str, str]) -> str:
    """Nothing when the module's chapter comes before this one."""
    if chapter.number == OVERVIEW or order[dotted] < chapter.number:
        return ""
    return (
        f"{dotted} is built by chapter {order[dotted]}; chapter {chapter.number} may import earlier chapters' modules"
    )


def locate_tool(module: str, name: str | None) -> bool:
    """Whether the course's own package has such a module."""
    home = Path(__file__).resolve().parents[1]
    return locate(home, module, name) is not None


def module_order(chapters: list[Chapter]) -> dict[str, str]:
    """Dotted module → number of its chapter."""
    return {c.module.replace("/", "."): c.number for c in chapters if c.module and c.module.split("/")[0] in PACKAGES}
