"""Translation: a plain mask or score function as the source of a device function.

The function stays as it is written, but for what means something else on a device: ``take`` reads
a captured tensor, ``//`` and ``%`` round as Python rounds, numbers from outside become literals.
"""

from __future__ import annotations

import ast
import copy
import types
from collections.abc import Callable
from typing import Any

from saccade import language
from saccade.kernels.source import DEVICE_FUNCTIONS, CannotCompile, Source

FLOORS: dict[type[ast.operator], str] = {ast.FloorDiv: "floor_divide", ast.Mod: "floor_modulo"}
STATEMENTS = (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Return, ast.Pass, ast.Expr)
EXPRESSIONS = (
    ast.Name, ast.Constant, ast.BinOp, ast.UnaryOp, ast.Compare, ast.Call, ast.Attribute,
)  # fmt: skip
ADVICE = "takes operators, take, and the functions of saccade.scores; choose with where"


class Translator(ast.NodeTransformer):
    """Collects the text of device functions; functions that others call come before them."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.helpers: dict[tuple[Callable[..., Any], int], str] = {}
        self.source: Source | None = None

    def define(self, name: str, body: Callable[..., Any], num_arguments: int) -> None:
        """Add a device function of that name that does what a Python function does."""
        outer, self.source = self.source, Source(body, num_arguments)
        try:
            lines = [self._statement(statement) for statement in self.source.statements]
            parameters = ", ".join(self.source.parameters)
        finally:
            self.source = outer
        code = "\n".join(f"    {line}" for line in lines if line) or "    pass"
        self.texts.append(f"@triton.jit\ndef {name}({parameters}):\n{code}\n")

    def _statement(self, statement: ast.stmt) -> str:
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
            return ""  # a docstring
        if not isinstance(statement, STATEMENTS) or isinstance(statement, ast.Expr):
            raise self._refuse(statement, f"{type(statement).__name__.lower()}; {ADVICE}")
        if isinstance(statement, ast.AugAssign):
            target = ast.Name(_name(statement.target), ast.Load())
            value = ast.copy_location(ast.BinOp(target, statement.op, statement.value), statement)
            statement = ast.Assign([statement.target], value, lineno=statement.lineno)
        if isinstance(statement, ast.AnnAssign):
            statement = ast.Assign(
                [statement.target], statement.value or ast.Constant(None), lineno=statement.lineno
            )
        if isinstance(statement, ast.Assign) and not all(
            isinstance(target, ast.Name) for target in statement.targets
        ):
            raise self._refuse(statement, f"an assignment to something else than a name; {ADVICE}")
        statement = ast.fix_missing_locations(self.visit(copy.deepcopy(statement)))
        if isinstance(statement, ast.Assign):  # Triton takes one target a statement
            first, *others = [_name(target) for target in statement.targets]
            lines = [f"{first} = {ast.unparse(statement.value)}"]
            return "; ".join(lines + [f"{other} = {first}" for other in others])
        return ast.unparse(statement)

    def generic_visit(self, node: ast.AST) -> ast.AST:
        """Whatever has no rule of its own is refused if it is an expression."""
        if isinstance(node, ast.expr) and not isinstance(node, EXPRESSIONS):
            raise self._refuse(node, f"{ast.unparse(node)!r}; {ADVICE}")
        return super().generic_visit(node)

    def visit_Name(self, node: ast.Name) -> ast.AST:  # noqa: D102
        outside = isinstance(node.ctx, ast.Load) and node.id not in self._source.locals
        return self._source.constant(node) if outside else node

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:  # noqa: D102
        return self._source.constant(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.AST:  # noqa: D102
        if isinstance(node.op, ast.Not):
            raise self._refuse(node, f"'not', which has no meaning on tiles (~ has); {ADVICE}")
        if isinstance(node.op, ast.UAdd):  # Triton has none
            return self.visit(node.operand)
        return self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> ast.AST:  # noqa: D102
        return self._source.literal(node, node.value)

    def visit_Compare(self, node: ast.Compare) -> ast.AST:  # noqa: D102
        plain = (ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.Eq, ast.NotEq)
        if len(node.ops) > 1 or not isinstance(node.ops[0], plain):
            raise self._refuse(node, f"{ast.unparse(node)!r}; join two comparisons with &")
        return self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:  # noqa: D102
        if isinstance(node.op, (ast.Pow, ast.MatMult)):
            raise self._refuse(node, f"{ast.unparse(node)!r}; {ADVICE}")
        floor = FLOORS.get(type(node.op))
        visited = self.generic_visit(node)
        assert isinstance(visited, ast.BinOp)
        return _call(floor, [visited.left, visited.right]) if floor else visited

    def visit_Call(self, node: ast.Call) -> ast.AST:  # noqa: D102
        callee = self._source.callee(node)
        if callee is language.take:
            return self._take(node)
        arguments = [self.visit(argument) for argument in node.args]
        if callee in DEVICE_FUNCTIONS:
            return _call(DEVICE_FUNCTIONS[callee], arguments)
        if isinstance(callee, types.FunctionType):
            return _call(self._helper(callee, len(arguments)), arguments)
        raise self._refuse(node, f"{ast.unparse(node.func)!r}; {ADVICE}")

    def _take(self, node: ast.Call) -> ast.Call:
        """take(table, i, j) → read(table, nearest(i, table, 0) + nearest(j, table, 1))."""
        table, *indices = node.args
        if not isinstance(table, ast.Name) or table.id not in self._source.parameters:
            raise self._refuse(node, "take of something else than a captured tensor")
        places: list[ast.expr] = [
            _call("nearest", [self.visit(index), table, ast.Constant(dim)])
            for dim, index in enumerate(indices)
        ]
        offset = places[0]
        for place in places[1:]:
            offset = ast.BinOp(offset, ast.Add(), place)
        return _call("read", [table, offset, ast.Constant(len(indices))])

    def _helper(self, body: Callable[..., Any], num_arguments: int) -> str:
        if (body, num_arguments) not in self.helpers:
            name = f"helper_{len(self.helpers)}"
            self.helpers[body, num_arguments] = name
            self.define(name, body, num_arguments)
        return self.helpers[body, num_arguments]

    @property
    def _source(self) -> Source:
        assert self.source is not None
        return self.source

    def _refuse(self, node: ast.AST, what: str) -> CannotCompile:
        return self._source.refuse(node, what)


def _call(name: str, arguments: list[ast.expr]) -> ast.Call:
    return ast.Call(ast.Name(name, ast.Load()), arguments, [])


def _name(target: ast.expr) -> str:
    return target.id if isinstance(target, ast.Name) else ""
