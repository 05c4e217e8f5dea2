"""Cost expressions: what a block costs, as a formula in the symbolic axes of its inputs.

The exporter writes them ("batch*seq*(3541248 + 1536*seq)"), the runtime evaluates them at a request's
own axes. The language is integers, axis names, + - * // and parentheses; nothing is ever executed.
"""

import ast
from collections.abc import Callable, Mapping
from functools import lru_cache

from offramp.runtime.errors import BundleError

_OPERATIONS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.FloorDiv: lambda a, b: a // b,
}
_MAX_LENGTH = 20_000


@lru_cache(maxsize=4096)
def _parse(expression: str) -> ast.expr:
    if len(expression) > _MAX_LENGTH:
        raise BundleError(f"cost expression of {len(expression)} characters: expected at most {_MAX_LENGTH}.")
    try:
        tree = ast.parse(expression, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise BundleError(f"cost expression {expression!r} is not a formula of integers and axis names.") from error
    for node in ast.walk(tree):
        arithmetic = isinstance(node, ast.BinOp | ast.Name | ast.Load | ast.operator)
        integer = isinstance(node, ast.Constant) and type(node.value) is int
        if not (arithmetic or integer) or (isinstance(node, ast.operator) and type(node) not in _OPERATIONS):
            raise BundleError(
                f"cost expression {expression!r}: {type(node).__name__} is not allowed, "
                "only integers, axis names, + - * // and parentheses."
            )
    return tree


def axes_of(expression: str) -> frozenset[str]:
    """The axis names an expression mentions."""
    return frozenset(node.id for node in ast.walk(_parse(expression)) if isinstance(node, ast.Name))


def evaluate(expression: str, axes: Mapping[str, int]) -> int:
    """The integer value of a cost expression.

    axes: a size for each axis name the expression mentions.
    Raises BundleError for anything that isn't such a formula, or names an axis that isn't given.
    """

    def value(node: ast.expr) -> int:
        if isinstance(node, ast.Constant):
            return int(node.value)  # type: ignore[arg-type]
        if isinstance(node, ast.Name):
            if node.id not in axes:
                raise BundleError(f"cost expression {expression!r} needs the axis {node.id!r}; known: {sorted(axes)}.")
            return axes[node.id]
        assert isinstance(node, ast.BinOp)
        left, right = value(node.left), value(node.right)
        if isinstance(node.op, ast.FloorDiv) and right == 0:
            raise BundleError(f"cost expression {expression!r} divides by zero at {dict(axes)}.")
        return _OPERATIONS[type(node.op)](left, right)

    return value(_parse(expression))
