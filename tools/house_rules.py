"""Check the rules of the house that no common linter knows.

Usage: python tools/house_rules.py [ROOT]

Prints one line for each violation, "path:line: rule: message", and exits with 1 if there are any.
Where a rule makes the code worse, break it in the open, with the reason on the reported line:

    qk = peer.scores()  # breaks banned-name: the peer's test compares the attribute by name
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from house_names import BANNED_KERNEL_NAMES, BANNED_NAMES, BANNED_WORDS, STRIDE_NAME

FOLDERS = ("src", "tests", "tools", "docs")

MAX_FILE_LINES = 500  # only a warning: a file ends where its idea ends
MAX_FUNCTION_LINES = 60
MAX_KERNEL_LINES = 110
MAX_KERNEL_ARGUMENTS = 20
MAX_KERNEL_BOOLEANS = 3

# Rules that are printed and break nothing.
WARNINGS = {"file-length"}

# Names that tell nothing about what is inside: such a file collects whatever has no better place.
BANNED_FILE_NAMES = {"utils", "common", "helpers"}

# Rooms of src/saccade -> rooms that they may not import. Arrows point down: the calls of an
# operation (its api, autograd, custom_op) use runtime/, which uses modifiers/; backends (ops/*/cpu,
# triton, hopper) use gpu/ and runtime/, but never a call nor one another. Only hopper rests on
# triton: how calls are prepared and tiles are planned has nothing of Hopper in it, and kernels in
# Triton serve what Hopper's do not, or have to repeat.
BACKENDS = {"cpu", "triton", "hopper"}
CALLS = {"api", "autograd", "custom_op"}
TOP = {"kv_cache", "integrations", "serving", "bench", "demo", "kernel_check", "parallel"}
FORBIDDEN_IMPORTS = {
    "modifiers": TOP | CALLS | BACKENDS | {"reference", "runtime", "gpu"},
    "runtime": TOP | CALLS | BACKENDS | {"reference"},
    "gpu": TOP | CALLS | BACKENDS | {"reference", "ops"},
    "reference": TOP | CALLS | BACKENDS,
    "cpu": TOP | CALLS | {"reference", "triton", "hopper", "gpu"},
    "triton": TOP | CALLS | {"reference", "cpu", "hopper"},
    "hopper": TOP | CALLS | {"reference", "cpu"},
    "parallel": (TOP - {"parallel", "kv_cache"}) | BACKENDS | {"reference", "gpu"},
}
# What looks at kernels from outside reaches for their insides, so nothing may come to rest on it.
ONLY_IMPORTED_BY = {"kernel_check": {"kernel_check"}}
# What is built on the library sees only its public names, and its own package.
PUBLIC_NAME_USERS = {
    "integrations": {"integrations"},
    "serving": {"serving", "integrations"},
    "bench": {"bench"},
    "demo": {"demo", "serving", "bench"},
}

Function = ast.FunctionDef | ast.AsyncFunctionDef
Finding = tuple[int, str]


class Source(NamedTuple):
    """One Python file, parsed."""

    path: PurePosixPath  # from the root of the repository
    text: str
    tree: ast.Module
    public_names: frozenset[str]  # saccade.__all__

    @property
    def layer(self) -> str:
        """The folder or module just under src/saccade; "" for a file that lies elsewhere."""
        parts = self.path.with_suffix("").parts
        return parts[2] if parts[:2] == ("src", "saccade") else ""


class Violation(NamedTuple):
    """A place where a rule does not hold."""

    path: PurePosixPath
    line: int
    rule: str
    message: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.rule}: {self.message}"


def file_name(source: Source) -> Iterator[Finding]:
    """A file is named for what it does."""
    for part in source.path.with_suffix("").parts:
        if part in BANNED_FILE_NAMES:
            yield 1, f"`{part}` says nothing about what is inside; name the one idea"


def file_length(source: Source) -> Iterator[Finding]:
    """A file has one idea; a long one may hold a second."""
    length = len(source.text.splitlines())
    if length > MAX_FILE_LINES:
        yield 1, f"{length} lines, more than {MAX_FILE_LINES}"


def function_length(source: Source) -> Iterator[Finding]:
    """A function fits on a screen, a kernel on two."""
    for function in functions(source.tree):
        limit = MAX_KERNEL_LINES if is_kernel(function) else MAX_FUNCTION_LINES
        length = (function.end_lineno or function.lineno) - function.lineno + 1
        if length > limit:
            yield function.lineno, f"`{function.name}` has {length} lines, more than {limit}"


def kernel_arguments(source: Source) -> Iterator[Finding]:
    """A kernel takes views, masks and scores, not their parts."""
    for function in filter(is_kernel, functions(source.tree)):
        count = len(arguments(function))
        if count > MAX_KERNEL_ARGUMENTS:
            message = f"`{function.name}` takes {count} arguments, more than {MAX_KERNEL_ARGUMENTS}"
            yield function.lineno, f"{message}; what belongs together is a NamedTuple"


def kernel_booleans(source: Source) -> Iterator[Finding]:
    """A kernel has few forms: what it does hangs on what it is given, not on a row of flags.

    Fields of a NamedTuple that a kernel takes as META count like arguments.
    """
    metas = [node for node in source.tree.body if isinstance(node, ast.ClassDef)]
    for kernel, flags in boolean_arguments(source.tree).items():
        for types in map(types_of_fields, metas):
            if fields_of_meta(kernel) and fields_of_meta(kernel) <= types.keys():
                flags = flags - types.keys() | {name for name in types if types[name] == "bool"}
        if len(flags) > MAX_KERNEL_BOOLEANS:
            names = ", ".join(sorted(flags))
            message = f"`{kernel.name}` takes {len(flags)} booleans, more than"
            yield kernel.lineno, f"{message} {MAX_KERNEL_BOOLEANS}: {names}"


def banned_name(source: Source) -> Iterator[Finding]:
    """A thing has one name everywhere."""
    # A kernel's body is walked twice, so findings are collected in a set.
    found = set(find_banned_names(source.tree, BANNED_NAMES, source.layer))
    for function in filter(is_kernel, functions(source.tree)):
        found |= set(find_banned_names(function, BANNED_KERNEL_NAMES, source.layer))
    yield from found


def banned_word(source: Source) -> Iterator[Finding]:
    """What has a term in the field is called by it."""
    if not source.layer:
        return
    for node in ast.walk(source.tree):
        if isinstance(node, Function | ast.ClassDef):
            name = node.name
        elif isinstance(node, ast.arg):
            name = node.arg
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            name = node.id if isinstance(node, ast.Name) else node.attr
        else:
            continue
        for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+", name):
            if word.lower() in BANNED_WORDS:
                yield node.lineno, f"`{name}`: the field says `{BANNED_WORDS[word.lower()]}`"


def docstring_start(source: Source) -> Iterator[Finding]:
    """A docstring's first sentence makes sense to a reader who has read nothing else."""
    for node in ast.walk(source.tree) if source.layer else ():
        if isinstance(node, Function | ast.ClassDef | ast.Module):
            text = ast.get_docstring(node) or ""
            if text.startswith(("The same ", "As ")):
                yield node.body[0].lineno, f"begins with {text[:8]!r}: say what it is"


def import_direction(source: Source) -> Iterator[Finding]:
    """Imports point down: calls, the runtime, a backend, what kernels share."""
    room = room_of(".".join(source.path.with_suffix("").parts[2:])) if source.layer else ""
    forbidden = FORBIDDEN_IMPORTS.get(room, set())
    for line, module in imported_modules(source):
        top = module.split(".")[0]
        if room_of(module) in forbidden:
            yield line, f"{room} must not import saccade.{module}"
        elif source.layer and source.layer not in ONLY_IMPORTED_BY.get(top, {source.layer}):
            yield (
                line,
                f"{source.layer} must not import saccade.{module}, as the cli alone does",
            )


def room_of(module: str) -> str:
    """The room of a module below saccade: its folder; of an operation the backend, or the file."""
    parts = module.split(".")
    if parts[0] != "ops":
        return parts[0]
    return parts[2] if len(parts) > 2 else "ops"


def public_names_only(source: Source) -> Iterator[Finding]:
    """What is built on the library uses what every user has."""
    if source.layer not in PUBLIC_NAME_USERS:
        return
    public = source.public_names | {"", "__version__"}
    for line, module in imported_modules(source):
        if module not in public and module.split(".")[0] not in PUBLIC_NAME_USERS[source.layer]:
            yield line, f"{source.layer} uses public names only; saccade.{module} is private"


RULES: tuple[Callable[[Source], Iterator[Finding]], ...] = (
    file_name,
    file_length,
    function_length,
    kernel_arguments,
    kernel_booleans,
    banned_name,
    banned_word,
    docstring_start,
    import_direction,
    public_names_only,
)


def functions(tree: ast.AST) -> Iterator[Function]:
    """Every function in the tree, nested ones too."""
    for node in ast.walk(tree):
        if isinstance(node, Function):
            yield node


def arguments(function: Function) -> list[ast.arg]:
    """All arguments of a function, `*args` and `**kwargs` among them."""
    given = function.args
    starred = [argument for argument in (given.vararg, given.kwarg) if argument]
    return [*given.posonlyargs, *given.args, *given.kwonlyargs, *starred]


def is_kernel(function: Function) -> bool:
    """Whether Triton or Gluon compiles the function."""
    names = (ast.unparse(decorator).split("(")[0] for decorator in function.decorator_list)
    return any(name in {"triton.jit", "gluon.jit"} for name in names)


def boolean_arguments(tree: ast.Module) -> dict[Function, set[str]]:
    """The arguments of each kernel, and fields of its META, that are true or false: by their
    default, by what a call in the same file passes, or as the kernel tests them alone."""
    kernels = {kernel.name: kernel for kernel in functions(tree) if is_kernel(kernel)}
    flags = {kernel: tested_alone(kernel) | defaults(kernel) for kernel in kernels.values()}
    calls = [
        (kernel, kernels[callee], dict(zip(names_of(kernels[callee]), passed, strict=False)))
        for kernel in kernels.values()
        for callee, passed in passed_arguments(kernel)
        if callee in kernels
    ]
    known = -1
    while known != (known := sum(map(len, flags.values()))):
        for caller, callee, passed in calls:
            for name, value in passed.items():
                if isinstance(value, ast.Constant) and isinstance(value.value, bool):
                    flags[callee].add(name)
                elif name in flags[callee] and (text := own_name(value, caller)):
                    flags[caller].add(text)
    return {kernel: found - counted(kernel) for kernel, found in flags.items()}


def tested_alone(kernel: Function) -> set[str]:
    """Arguments that stand alone in a condition, or beside `and`, `or` and `not`."""
    found = set()
    for node in ast.walk(kernel):
        tests: list[ast.expr] = []
        if isinstance(node, ast.If | ast.IfExp | ast.While):
            tests = [node.test]
        elif isinstance(node, ast.BoolOp):
            tests = node.values
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            tests = [node.operand]
        found |= {own_name(test, kernel) for test in tests}
    return found - {""}


def counted(kernel: Function) -> set[str]:
    """Arguments that are compared with something or calculated with: numbers, not booleans."""
    found = set()
    for node in ast.walk(kernel):
        if isinstance(node, ast.Compare):
            found |= {own_name(side, kernel) for side in (node.left, *node.comparators)}
        elif isinstance(node, ast.BinOp) and not isinstance(node.op, ast.BitAnd | ast.BitOr):
            found |= {own_name(side, kernel) for side in (node.left, node.right)}
    return found - {""}


def defaults(kernel: Function) -> set[str]:
    """Arguments whose default is a boolean."""
    pairs = zip(reversed(kernel.args.args), reversed(kernel.args.defaults), strict=False)
    return {
        argument.arg
        for argument, default in pairs
        if isinstance(default, ast.Constant) and isinstance(default.value, bool)
    }


def passed_arguments(kernel: Function) -> Iterator[tuple[str, list[ast.expr]]]:
    """What a kernel calls, by name, with its positional arguments: `f(a)`, and `(f, (a,))`, which
    is how Gluon starts the roles of warps."""
    for node in ast.walk(kernel):
        match node:
            case ast.Call(func=ast.Name(id=callee), args=passed):
                yield callee, passed
            case ast.Tuple(elts=[ast.Name(id=callee), ast.Tuple(elts=passed)]):
                yield callee, passed


def own_name(node: ast.expr, kernel: Function) -> str:
    """The argument that an expression is, or the field of META; "" for anything else."""
    match node:
        case ast.Name(id=name) if name in names_of(kernel):
            return name
        case ast.Attribute(value=ast.Name(id="META"), attr=field):
            return f"META.{field}"
    return ""


def names_of(function: Function) -> list[str]:
    """The names of a function's arguments."""
    return [argument.arg for argument in arguments(function)]


def fields_of_meta(kernel: Function) -> set[str]:
    """The fields of META that a kernel names."""
    nodes = (node for node in ast.walk(kernel) if isinstance(node, ast.Attribute))
    return {own_name(node, kernel) for node in nodes} - {""}


def types_of_fields(node: ast.ClassDef) -> dict[str, str]:
    """The types of a NamedTuple's fields, as those of META."""
    return {
        f"META.{field.target.id}": ast.unparse(field.annotation)
        for field in node.body
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
    }


def find_banned_names(tree: ast.AST, banned: dict[str, str], layer: str) -> Iterator[Finding]:
    """Names that are assigned or taken as arguments; a keyword in a call belongs to the callee."""
    for node in ast.walk(tree):
        # An integration offers a peer's function, so the peer has chosen its arguments.
        if isinstance(node, ast.arg) and layer != "integrations":
            name = node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            name = node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            name = node.attr
        else:
            continue
        if name in banned:
            yield node.lineno, f"`{name}` is called `{banned[name]}` here"
        elif STRIDE_NAME.fullmatch(name):
            yield node.lineno, f"`{name}` belongs in `view.strides`"


def imported_modules(source: Source) -> Iterator[Finding]:
    """What a file imports from saccade, as dotted names below saccade ("" is saccade itself)."""
    package = source.path.with_suffix("").parts[1:-1]
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            parents = package[: len(package) - node.level + 1] if node.level else ()
            base = ".".join([*parents, *filter(None, [node.module])])
            names = [f"{base}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            if name.split(".")[0] == "saccade":
                yield node.lineno, name.removeprefix("saccade").removeprefix(".")


def read_public_names(root: Path) -> frozenset[str]:
    """`saccade.__all__`, read without importing the package."""
    path = root / "src/saccade/__init__.py"
    names: set[str] = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body if path.exists() else ():
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if any(isinstance(target, ast.Name) and target.id == "__all__" for target in targets):
            names |= set(ast.literal_eval(node.value))  # pyright: ignore[reportAttributeAccessIssue]
    return frozenset(names)


def check_file(path: Path, root: Path, public_names: frozenset[str]) -> list[Violation]:
    """All violations in one file, except those that the file says it makes."""
    relative = PurePosixPath(path.relative_to(root).as_posix())
    text = path.read_text(encoding="utf-8")
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        return [Violation(relative, error.lineno or 1, "syntax", error.msg)]
    source = Source(relative, text, tree, public_names)
    lines = [*text.splitlines(), ""]
    violations = []
    for rule in RULES:
        name = rule.__name__.replace("_", "-")
        for line, message in rule(source):
            if not re.search(rf"# breaks {name}: \S", lines[line - 1]):
                violations.append(Violation(relative, line, name, message))
    return sorted(violations)


def check_tree(root: Path) -> list[Violation]:
    """All violations under a repository's root."""
    public_names = read_public_names(root)
    paths = sorted(path for folder in FOLDERS for path in (root / folder).rglob("*.py"))
    return [violation for path in paths for violation in check_file(path, root, public_names)]


def main(argv: list[str]) -> int:
    """Print the violations; the exit status says whether there are any."""
    root = Path(argv[0]) if argv else Path(__file__).parent.parent
    violations = check_tree(root)
    broken = [violation for violation in violations if violation.rule not in WARNINGS]
    for violation in violations:
        print(violation)
    print(f"house rules: {len(broken)} violations" if broken else "house rules: all kept")
    return int(bool(broken))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
