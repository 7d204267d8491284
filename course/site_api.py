"""The engine's reference, read from its source: nothing is imported, docstrings and signatures come from the syntax tree."""

import ast
import html
import re
from dataclasses import dataclass, field
from pathlib import Path

from course.site_pages import Section

SECTIONS = {"Args", "Attributes", "Returns", "Raises", "Yields", "Example", "Note"}
ITEM = re.compile(r"(\*{0,2}[A-Za-z_][\w.]*(?:, \*{0,2}[A-Za-z_][\w.]*)*(?: \([^)]*\))?): (.*)", re.DOTALL)
SHOWN_METHODS = {"__call__", "__iter__", "__len__"}
WIDE = 88  # characters after which a signature gets one argument a line


@dataclass
class Entry:
    """A function, class or method: its name in the module, its signature and its docstring as HTML."""

    name: str
    kind: str
    signature: str
    doc: str
    plain: str
    members: list["Entry"] = field(default_factory=list)


@dataclass
class Module:
    """A module: its dotted name, where it comes from, its docstring and what it offers."""

    name: str
    path: str
    source: str
    doc: str
    plain: str
    entries: list[Entry]

    @property
    def anchor(self) -> str:
        """The module's place on the page."""
        return self.name.replace(".", "-")


def read_package(root: Path, package: str, order: list[str]) -> list[Module]:
    """Every public module of a package that offers something, chapters' modules first and in reading order.

    Args:
        order: paths of the chapters' modules from the root, in reading order.
    """
    paths = [path for path in sorted((root / package).rglob("*.py")) if not path.name.startswith("__")]
    ranks = {name: place for place, name in enumerate(order)}
    paths.sort(key=lambda path: ranks.get(path.relative_to(root).as_posix(), len(ranks)))
    first = [path for path in [root / package / "__init__.py"] if path.is_file()]
    modules = [read_module(path, root) for path in [*first, *paths]]
    return [module for module in modules if module.entries or module.doc]


def read_module(path: Path, root: Path) -> Module:
    """One module."""
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text, str(path))
    shown = path.relative_to(root).as_posix()
    source = re.match(r"# Generated from (\S+)", text)
    name = shown.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    doc = ast.get_docstring(tree) or ""
    kinds = (ast.FunctionDef, ast.ClassDef)
    public = [node for node in tree.body if isinstance(node, kinds) and not node.name.startswith("_")]
    entries = [_class(node) if isinstance(node, ast.ClassDef) else _function(node, "function") for node in public]
    return Module(name, shown, source.group(1) if source else "", docstring_html(doc), doc, entries)


def _function(node: ast.FunctionDef, kind: str) -> Entry:
    decorators = {ast.unparse(decorator).split("(")[0].split(".")[-1] for decorator in node.decorator_list}
    arguments = [argument for argument in _arguments(node.args) if argument not in ("self", "cls")]
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    signature = node.name if decorators & {"property", "cached_property"} else _call(node.name, arguments)
    doc = ast.get_docstring(node) or ""
    label = next((name for name in ("property", "classmethod", "staticmethod") if name in decorators), kind)
    return Entry(node.name, label, signature + returns, docstring_html(doc), doc)


def _class(node: ast.ClassDef) -> Entry:
    bodies = [child for child in node.body if isinstance(child, ast.FunctionDef)]
    constructor = next((child for child in bodies if child.name == "__init__"), None)
    if constructor:
        arguments = [argument for argument in _arguments(constructor.args) if argument != "self"]
    else:
        arguments = [ast.unparse(child) for child in node.body if isinstance(child, ast.AnnAssign)]
    members = [
        _function(child, "method")
        for child in bodies
        if (not child.name.startswith("_") or child.name in SHOWN_METHODS) and ast.get_docstring(child)
    ]
    bases = ", ".join(ast.unparse(base) for base in node.bases)
    doc = ast.get_docstring(node) or ""
    signature = _call(node.name, arguments) + (f": {bases}" if bases else "")
    return Entry(node.name, "class", signature, docstring_html(doc), doc, members)


def _arguments(args: ast.arguments) -> list[str]:
    """The arguments as they are written, with ``/`` and ``*`` where they stand."""
    plain = [*args.posonlyargs, *args.args]
    defaults = [None] * (len(plain) - len(args.defaults)) + list(args.defaults)
    shown = [_argument(argument, default) for argument, default in zip(plain, defaults, strict=True)]
    if args.posonlyargs:
        shown.insert(len(args.posonlyargs), "/")
    if args.vararg or args.kwonlyargs:
        shown.append(f"*{_argument(args.vararg, None)}" if args.vararg else "*")
    shown += [_argument(arg, default) for arg, default in zip(args.kwonlyargs, args.kw_defaults, strict=True)]
    return shown + ([f"**{_argument(args.kwarg, None)}"] if args.kwarg else [])


def _argument(argument: ast.arg, default: ast.expr | None) -> str:
    note = f": {ast.unparse(argument.annotation)}" if argument.annotation else ""
    equals = " = " if note else "="
    return argument.arg + note + (equals + ast.unparse(default) if default is not None else "")


def _call(name: str, arguments: list[str]) -> str:
    """``name(a, b)`` on one line if it fits, else one argument a line."""
    short = f"{name}({', '.join(arguments)})"
    if len(short) <= WIDE:
        return short
    return f"{name}(\n" + "".join(f"    {argument},\n" for argument in arguments) + ")"


# --- docstrings ------------------------------------------------------------------------------------------------------


def docstring_html(doc: str) -> str:
    """A docstring in Google's layout as HTML: paragraphs, examples, and a list for each section."""
    parts, blocks = [], re.split(r"\n\s*\n", doc.strip("\n"))
    section = ""
    for block in blocks:
        head, _, rest = block.partition("\n")
        title = head.strip().rstrip(":")
        if head.rstrip().endswith(":") and title in SECTIONS and rest:
            section = title
            parts.append(f'<p class="doc-section">{title}</p>{_items(_dedent(rest), section)}')
        elif block.startswith("    "):
            shown = (
                _items(_dedent(block), section) if section else f'<pre tabindex="0">{html.escape(_dedent(block))}</pre>'
            )
            parts.append(shown)
        elif block.strip():
            section = ""
            parts.append(f"<p>{inline_html(' '.join(block.split()))}</p>")
    return "".join(parts)


def _items(text: str, section: str) -> str:
    """The entries of one section: ``name: what it is`` becomes a list of definitions, anything else a paragraph."""
    entries = re.split(r"\n(?=\S)", text)
    found = [ITEM.fullmatch(entry) for entry in entries]
    if section in ("Returns", "Yields", "Example", "Note") or not all(found):
        return f"<p>{inline_html(' '.join(text.split()))}</p>"
    rows = [
        f"<dt><code>{html.escape(item.group(1))}</code></dt><dd>{inline_html(' '.join(item.group(2).split()))}</dd>"
        for item in found
    ]
    return f'<dl class="doc-items">{"".join(rows)}</dl>'


def inline_html(text: str) -> str:
    """Text with ```code``` and `` `code` `` shown as code."""
    shown = html.escape(text, quote=False)
    return re.sub(r"``(.+?)``|`([^`]+)`", lambda m: f"<code>{m.group(1) or m.group(2)}</code>", shown)


def _dedent(text: str) -> str:
    lines = text.splitlines()
    indent = min((len(line) - len(line.lstrip()) for line in lines if line.strip()), default=0)
    return "\n".join(line[indent:] for line in lines)


def api_sections(modules: list[Module]) -> list[Section]:
    """The reference cut into what search finds: each module, each name in it."""
    sections = []
    for module in modules:
        sections.append(Section(module.anchor, 2, module.name.split(".", 1)[-1], [module.plain]))
        for entry in module.entries:
            texts = [entry.plain, *(member.plain for member in entry.members)]
            signatures = [entry.signature, *(member.signature for member in entry.members)]
            sections.append(Section(f"{module.anchor}.{entry.name}", 4, entry.name, texts, signatures))
    return sections
