"""How far off a failed comparison was: the assertion once more, with its comparisons watched."""

import ast
import re
import sys
from contextlib import nullcontext
from types import FrameType
from typing import Any

COMPARISONS = {"allclose", "equal", "isclose"}
SIGNS = {ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "==", ast.NotEq: "!="}


def measure(text: str, line: int, frame: FrameType) -> tuple[str, str]:
    """The failed assertion at a line of a cell: its text with the author's comment, and how far off it was.

    Args:
        text: the cell.
        line: where the assertion failed.
        frame: the frame in which it failed.
    """
    found = [n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Assert) and n.lineno <= line <= n.end_lineno]
    if not found:
        return "", ""
    node = found[-1]
    lines = text.split("\n")[node.lineno - 1 : node.end_lineno]
    shown = re.sub(r"\s+", " ", " ".join(part.strip() for part in lines))
    watch = Watch()
    expression = ast.fix_missing_locations(
        ast.Expression(Watching().visit(ast.parse(ast.unparse(node.test), mode="eval").body))
    )
    try:
        torch = sys.modules.get("torch")
        with torch.random.fork_rng(devices=[]) if torch else nullcontext():
            eval(compile(expression, "<measure>", "eval"), {**frame.f_globals, **frame.f_locals, "__watch__": watch})
    except Exception:  # a comparison that cannot be repeated is told without its distance
        return shown, ""
    return shown, watch.last


class Watching(ast.NodeTransformer):
    """Sends every comparison of an expression through ``__watch__``."""

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.op, ast.Not) and isinstance(node.operand, ast.Call) and _watched(node.operand, "call"):
            node.operand.func.attr = "differ"
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.func, ast.Attribute) and node.func.attr in COMPARISONS:
            return ast.Call(_watch("call"), [node.func, *node.args], node.keywords)
        return node

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        self.generic_visit(node)
        if all(type(op) in SIGNS for op in node.ops):
            signs = ast.List([ast.Constant(SIGNS[type(op)]) for op in node.ops], ast.Load())
            return ast.Call(_watch("order"), [signs, node.left, *node.comparators], [])
        return node


def _watch(method: str) -> ast.Attribute:
    return ast.Attribute(ast.Name("__watch__", ast.Load()), method, ast.Load())


def _watched(node: ast.Call, method: str) -> bool:
    return ast.dump(node.func) == ast.dump(_watch(method))


class Watch:
    """Repeats comparisons and remembers the last one that was not as it should be."""

    last = ""

    def call(self, function: Any, *args: Any, **options: Any) -> Any:
        """``torch.allclose(a, b, …)`` and its like."""
        result = function(*args, **options)
        allowed = f", allowed {options['atol']:g}" if "atol" in options else ""
        self.last = "" if truth(result) or len(args) < 2 else distance(*args[:2]) + allowed
        return result

    def differ(self, function: Any, *args: Any, **options: Any) -> Any:
        """``not torch.allclose(a, b, …)``."""
        result = function(*args, **options)
        self.last = f"{distance(*args[:2])}; they should differ" if truth(result) and len(args) > 1 else ""
        return result

    def order(self, signs: list[str], *values: Any) -> Any:
        """``a < b < c``, each operand once."""
        result, self.last = True, ""
        for sign, left, right in zip(signs, values, values[1:]):
            result = OPERATORS[sign](left, right)
            if not truth(result):
                many = getattr(result, "numel", int)() > 1
                wrong = f"{result.numel() - int(result.sum())} of {result.numel()} numbers are not" if many else ""
                if sign in ("==", "!=") and not many:
                    self.last = f"{brief(left)} {sign} {brief(right)} is false"
                else:
                    self.last = f"{wrong or brief(left) + ', expected'} {sign} {brief(right)}"
                break
        return result


OPERATORS = {
    "<": lambda a, b: a < b,
    "<=": lambda a, b: a <= b,
    ">": lambda a, b: a > b,
    ">=": lambda a, b: a >= b,
    "==": lambda a, b: a == b,
    "!=": lambda a, b: a != b,
}


def truth(value: Any) -> bool:
    """Whether a result, or every number of it, is true."""
    return bool(value.all() if hasattr(value, "all") else value)


def brief(value: Any) -> str:
    """A number, a shape, or the beginning of a text."""
    if hasattr(value, "detach"):
        if value.numel() == 1:
            return f"{value.item():.4g}"
        value = value.detach().tolist() if value.numel() <= 8 else f"tensor {tuple(value.shape)}"
    if isinstance(value, float):
        return f"{value:.4g}"
    text = repr(value) if not isinstance(value, str) or not value.startswith("tensor (") else value
    return text if len(text) <= 60 else text[:57] + "…"


def distance(a: Any, b: Any) -> str:
    """Shapes where they differ, else the largest difference."""
    if getattr(a, "shape", None) is None or getattr(b, "shape", None) is None:
        return f"{brief(a)} against {brief(b)}"
    if a.shape != b.shape:
        return f"shape {tuple(a.shape)} against {tuple(b.shape)}"
    if not a.numel():
        return "nothing to compare"
    return f"largest difference {(a.detach().double() - b.detach().double()).abs().max().item():.3g}"
