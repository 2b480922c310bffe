"""Source: a user's mask or score function as a syntax tree, and what its names stand for."""

from __future__ import annotations

import ast
import builtins
import inspect
import textwrap
import types
from collections.abc import Callable
from typing import Any

from saccade import language

# What functions may call, by identity, and the device function of kernels/language.py it becomes.
# PyTorch's own functions of these names are the same objects, so they may be called as well.
DEVICE_FUNCTIONS: dict[Any, str] = {
    language.absolute: "absolute",
    builtins.abs: "absolute",
    language.exp: "exp",
    language.log: "log",
    language.tanh: "tanh",
    language.minimum: "minimum",
    language.maximum: "maximum",
    language.where: "where",
}


class CannotCompile(Exception):
    """A mask or score function does something that no kernel can do; says what, and where."""


class Source:
    """A function's parameters, its statements, and the values of the names that it uses."""

    def __init__(self, body: Callable[..., Any], num_arguments: int):
        self.body = body
        definition = _definition(body)
        given = definition.args
        if given.kwonlyargs or given.kwarg:
            raise self.refuse(definition, "keyword-only parameters")
        names = [argument.arg for argument in (*given.posonlyargs, *given.args)]
        if given.vararg is not None:  # *captured: as many as there are, each with its own name
            names += [f"{given.vararg.arg}_{n}" for n in range(num_arguments - len(names))]
        self.parameters = names[:num_arguments]
        self.statements = definition.body
        self.locals = {*self.parameters} | {
            node.id
            for node in ast.walk(definition)
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
        }
        scope = inspect.getclosurevars(body)
        defaults = [argument.arg for argument in (*given.posonlyargs, *given.args)]
        defaults = dict(zip(reversed(defaults), reversed(body.__defaults__ or ()), strict=False))
        self.names = {**scope.builtins, **scope.globals, **scope.nonlocals}
        self.names.update(
            {name: defaults[name] for name in names[num_arguments:] if name in defaults}
        )

    def value(self, node: ast.expr) -> Any:
        """What a name or dotted name from outside the function stands for."""
        if isinstance(node, ast.Name):
            if node.id in self.locals:
                raise self.refuse(node, f"{node.id!r} in this place")
            if node.id not in self.names:
                raise self.refuse(node, f"the unknown name {node.id!r}")
            return self.names[node.id]
        if isinstance(node, ast.Attribute):
            return getattr(self.value(node.value), node.attr)
        raise self.refuse(node, ast.unparse(node))

    def constant(self, node: ast.expr) -> ast.Constant:
        """A number from outside the function, as a literal."""
        found = self.value(node)
        if isinstance(found, (bool, int, float)):
            return self.literal(node, found)
        raise self.refuse(node, f"{ast.unparse(node)!r}, which is no number")

    def literal(self, node: ast.expr, number: Any) -> ast.Constant:
        """A number as a kernel can hold it."""
        if isinstance(number, int) and not -(2**31) <= number < 2**31:
            raise self.refuse(node, f"{number}, which has more than 32 bits; capture it")
        if number != number:
            raise self.refuse(node, "NaN")
        return ast.Constant(number)

    def callee(self, node: ast.Call) -> Any:
        """What a call calls."""
        if node.keywords or any(isinstance(a, ast.Starred) for a in node.args):
            raise self.refuse(node, f"{ast.unparse(node)!r}: takes plain positional arguments")
        return self.value(node.func)

    def refuse(self, node: ast.AST, what: str) -> CannotCompile:
        """The error for something that cannot be compiled."""
        where = f"line {getattr(node, 'lineno', 1)} of {self.body.__qualname__!r}"
        return CannotCompile(f"{where} uses {what}")


def _definition(body: Callable[..., Any]) -> ast.FunctionDef:
    name = getattr(body, "__qualname__", repr(body))
    if not isinstance(body, types.FunctionType):
        raise CannotCompile(f"{name!r} is no plain function")
    try:
        text = textwrap.dedent(inspect.getsource(body))
    except OSError:
        raise CannotCompile(f"the source of {name!r} is not in a file") from None
    try:
        tree = ast.parse(text)
    except SyntaxError:  # a lambda in the middle of an expression
        tree = ast.Module([], [])
    if not tree.body or not isinstance(tree.body[0], ast.FunctionDef):
        raise CannotCompile(f"{name!r} is no function made by def")
    return tree.body[0]
