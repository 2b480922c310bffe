"""Expressions: what a mask or a score computes, as a list of steps.

A step applies one operation to earlier steps; the last one is the result. Written as text, the
steps are the *key* of an expression. A key travels through PyTorch's operators beside the tensors
and numbers that were captured, and any process rebuilds the expression from it:

    kv_row;query_row;shift;+ 1 2;<= 0 3                    kv_row <= query_row + shift
    kv_row;batch;read t0:i 1;< 0 2                         kv_row < lengths[batch]

Captured values are slots, numbered in the order in which the steps mention them: ``i0``, ``i1`` …
whole numbers, ``f0`` … real ones, ``t0:b``, ``t1:i``, ``t2:l``, ``t3:f`` tensors of bools, of whole
numbers of up to 32 bits, of 64, and of real numbers. So a captured value may change without a
change of the key, and equal expressions have equal keys in every process.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

from torch import Tensor

TRUTH, WHOLE, REAL = "truth", "whole", "real"
VARIABLES = {
    "batch": WHOLE, "head": WHOLE, "query_row": WHOLE, "kv_row": WHOLE, "shift": WHOLE,
    "score": REAL,
}  # fmt: skip
READS = ("take", "read")  # of captured tensors: the nearest entry; the entry itself, -1 the last
COMPARISONS = ("<", "<=", "==")
GROWING = ("exp", "exp2", "log", "log2", "sqrt", "tanh", "sigmoid")  # with their operand
FUNCTIONS = (*GROWING, "log1p", "expm1", "sin", "cos", "erf")  # of a real number
OPERATORS = frozenset((
    *COMPARISONS, *FUNCTIONS, "+", "-", "*", "/", "//", "%", "<<", ">>", "&", "|", "^", "~", "neg",
    "abs", "min", "max", "where", "whole", "real",
))  # fmt: skip
KIND_OF_TENSOR = {"b": TRUTH, "i": WHOLE, "l": WHOLE, "f": REAL}


class Step(NamedTuple):
    """One operation on earlier steps.

    Attributes:
        op: a variable's name, "number", "literal", one of `READS`, or an operation.
        operands: the numbers of the steps that it is applied to; for a read, its indices.
        detail: the slot of a number or tensor, or a literal written out.
        kind: whether it gives truths, whole or real numbers.
    """

    op: str
    operands: tuple[int, ...]
    detail: str
    kind: str

    @property
    def slot(self) -> tuple[str, int]:
        """The kind (t, i or f) and number of the captured value that a number or read uses."""
        name = self.detail.partition(":")[0]
        return name[0], int(name[1:])

    @property
    def dtype(self) -> str:
        """The letter of a read's tensor: b, i, l or f."""
        return self.detail.split(":")[1]

    @property
    def label(self) -> str:
        """The argument that a read's tensor came by, where its sizes must be those of the call."""
        return self.detail.split(":")[2] if self.detail.count(":") == 2 else ""

    @property
    def literal(self) -> bool | int | float:
        """The value of a literal."""
        if self.kind == TRUTH:
            return self.detail == "True"
        return int(self.detail) if self.kind == WHOLE else float(self.detail)

    def text(self) -> str:
        """The step as a key spells it."""
        return " ".join(filter(None, [self.op, self.detail, *map(str, self.operands)]))


Expression = tuple[Step, ...]


class Coordinates(NamedTuple):
    """Where the pairs of a tile lie: index tensors that broadcast against each other, or intervals.

    Rows are numbered within their sequence. ``shift`` is kv_len - query_len of the sequence: a
    function aligned at the bottom right sees query_row + shift, so that the last query row and
    the last key row have the same number.
    """

    batch: Any
    head: Any
    query_row: Any
    kv_row: Any
    shift: Any


class Captured(NamedTuple):
    """The tensors and numbers that an expression captured, in the order of its slots."""

    tensors: Sequence[Tensor] = ()
    ints: Sequence[int] = ()
    floats: Sequence[float] = ()

    def joined(self, other: Captured) -> Captured:
        """This, then the other, kind by kind."""
        return Captured(
            (*self.tensors, *other.tensors),
            (*self.ints, *other.ints),
            (*self.floats, *other.floats),
        )

    def value(self, slot: tuple[str, int]) -> Any:
        """What was captured in a slot, such as ("t", 0)."""
        return {"t": self.tensors, "i": self.ints, "f": self.floats}[slot[0]][slot[1]]


class ExpressionBuilder:
    """Collects steps; equal ones are one, and comparisons have one form.

    x > y becomes y < x, x != y becomes ~(x == y), and what is certain falls away.
    """

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self._numbers: dict[tuple[str, tuple[int, ...], str], int] = {}

    def add(self, op: str, *operands: int, detail: str = "") -> int:
        """The number of a step, a new one or one that is there."""
        if op in (">", ">="):
            op, operands = {">": "<", ">=": "<="}[op], operands[::-1]
        if op == "!=":
            return self.add("~", self.add("==", *operands))
        key = (op, operands, detail)
        known = self._numbers.get(key)
        if known is None and op in ("~", "&", "|"):
            known = self._folded(op, operands)
        if known is None and op == "where":
            known = self._joined_by_where(*operands)
        if known is None:
            kinds = [self.steps[number].kind for number in operands]
            known = self._numbers[key] = len(self.steps)
            self.steps.append(Step(op, operands, detail, _kind(op, detail, kinds)))
        return known

    def literal(self, value: bool | int | float) -> int:
        """A number or truth that is part of the code."""
        return self.add("literal", detail=repr(value))

    def is_literal(self, number: int, value: object) -> bool:
        """Whether a step is that literal."""
        return self.steps[number].op == "literal" and self.steps[number].detail == repr(value)

    def _folded(self, op: str, operands: tuple[int, ...]) -> int | None:
        """The step that an operation on truths comes to, where that is known."""
        if op == "~":
            (of,) = (self.steps[number] for number in operands)
            if of.op == "literal":
                return self.literal(of.detail == "False")
            if of.op == "~":
                return of.operands[0]
            whole = all(self.steps[number].kind == WHOLE for number in of.operands)
            if of.op in ("<", "<=") and whole:  # of real numbers NaN is neither
                return self.add("<=" if of.op == "<" else "<", *of.operands[::-1])
        if op in ("&", "|") and self.steps[operands[0]].kind == TRUTH:
            if operands[0] == operands[1]:
                return operands[0]
            neutral = op == "&"
            for one, other in (operands, operands[::-1]):
                if self.is_literal(one, neutral):
                    return other
                if self.is_literal(one, not neutral):
                    return one
        return None

    def _joined_by_where(self, test: int, yes: int, no: int) -> int | None:
        """`where` of truths of which one is certain, as what joins two truths."""
        if self.is_literal(yes, True) and self.steps[no].kind == TRUTH:
            return self.add("|", test, no)
        if self.is_literal(no, False) and self.steps[yes].kind == TRUTH:
            return self.add("&", test, yes)
        return None

    def include(
        self,
        expression: Expression,
        counts: tuple[int, int, int] = (0, 0, 0),
        variables: Mapping[str, int] = MappingProxyType({}),
    ) -> int:
        """Add an expression, whose slots come after so many; give its result.

        variables: the steps that replace some of its variables.
        """
        added: list[int] = []
        for step in expression:
            detail = step.detail
            if step.op == "number" or step.op in READS:
                kind, position = step.slot
                _, colon, rest = detail.partition(":")
                detail = f"{kind}{position + counts['tif'.index(kind)]}{colon}{rest}"
            if step.op in variables:
                added.append(variables[step.op])
            else:
                added.append(self.add(step.op, *(added[n] for n in step.operands), detail=detail))
        return added[-1]

    def expression(self, result: int) -> tuple[Expression, tuple[tuple[str, int], ...]]:
        """The steps that a result needs, with slots in order; and which slot each one was."""
        return _only(tuple(self.steps), result)

    def combination(self, result: int) -> Combination:
        """The key of a result, and which of the values in slots it has."""
        expression, chosen = self.expression(result)
        indices = (tuple(index for kind, index in chosen if kind == letter) for letter in "tif")
        return Combination(key_of(expression), *indices)


@functools.lru_cache(maxsize=1024)  # functions that compute the same are traced again and again
def _only(steps: tuple[Step, ...], result: int) -> tuple[Expression, tuple[tuple[str, int], ...]]:
    """The steps that a result needs, operands first; see `ExpressionBuilder.expression`."""
    order: list[int] = []
    waiting, seen = [(result, False)], set()
    while waiting:
        number, done = waiting.pop()
        if done:
            order.append(number)
        elif number not in seen:
            seen.add(number)
            waiting.append((number, True))
            waiting += [(of, False) for of in reversed(steps[number].operands)]
    indices = {number: index for index, number in enumerate(order)}
    slots: dict[tuple[str, int], int] = {}
    used = {"t": 0, "i": 0, "f": 0}
    found = []
    for number in order:
        step = steps[number]
        detail = step.detail
        if step.op == "number" or step.op in READS:
            if step.slot not in slots:
                slots[step.slot] = used[step.slot[0]]
                used[step.slot[0]] += 1
            _, colon, rest = detail.partition(":")
            detail = f"{step.slot[0]}{slots[step.slot]}{colon}{rest}"
        operands = tuple(indices[of] for of in step.operands)
        found.append(step._replace(operands=operands, detail=detail))
    return tuple(found), tuple(slots)


def _kind(op: str, detail: str, kinds: list[str]) -> str:
    """What an operation gives."""
    if op in VARIABLES:
        return VARIABLES[op]
    if op == "number":
        return WHOLE if detail[0] == "i" else REAL
    if op == "literal":
        return TRUTH if detail in ("True", "False") else REAL if _is_real(detail) else WHOLE
    if op in READS:
        return KIND_OF_TENSOR[detail.split(":")[1]]
    if op in COMPARISONS:
        return TRUTH
    if op in ("/", "real", *FUNCTIONS):
        return REAL
    if op == "whole":
        return WHOLE
    if op in ("&", "|", "^", "~") and kinds[0] == TRUTH:
        return TRUTH
    values = kinds[1:] if op == "where" else kinds
    if op == "where" and set(values) == {TRUTH}:
        return TRUTH
    return REAL if REAL in values else WHOLE


def num_operands(op: str) -> int:
    """How many operands an operation on numbers and truths has."""
    alone = ("neg", "abs", "~", "real", "whole", *FUNCTIONS)
    return 3 if op == "where" else 1 if op in alone else 2


def _is_real(literal: str) -> bool:
    return not literal.lstrip("-").isdigit()


# ---- keys -----------------------------------------------------------------------------------


Function = TypeVar("Function", bound=Callable[..., Any])


def constant(function: Function) -> Function:
    """Cache a function's results; where torch.compile knows its arguments, a result is a constant.

    Dynamo looks for its mark at plain functions only, and warns of caches that it would trace.
    """
    remembered = functools.lru_cache(maxsize=4096)(function)

    def call(*args: Any, **options: Any) -> Any:
        return remembered(*args, **options)

    functools.update_wrapper(call, function)
    vars(call).pop("__wrapped__", None)  # by which Dynamo would find the way around the mark
    call._dynamo_marked_constant = True  # type: ignore[attr-defined]
    call.cache_clear = remembered.cache_clear  # type: ignore[attr-defined]
    return call  # type: ignore[return-value]


@functools.lru_cache(maxsize=1024)
def key_of(expression: Expression) -> str:
    """An expression as text."""
    return ";".join(step.text() for step in expression)


LITERAL = r"True|False|-?\d+|-?\d+(?:\.\d+)?(?:e[+-]?\d+)?|-?inf|nan"
READ = r"t\d+:[bilf](?::\w+)?"
DETAILS = {
    name: re.compile(text, re.ASCII)
    for name, text in (("number", r"[if]\d+"), ("literal", LITERAL), *((op, READ) for op in READS))
}


def takes(op: str) -> int:
    """How many operands an operation or a variable has; -1: there is no such operation."""
    return num_operands(op) if op in OPERATORS else 0 if op in VARIABLES else -1


@constant
def parse(key: str) -> Expression:
    """The expression of a key; the empty key has no steps.

    A key may come out of a file, and what it says becomes code for Triton: so nothing passes but
    known operations, with slots and numbers.

    Raises:
        ValueError: for anything else.
    """
    steps: list[Step] = []
    for text in filter(None, key.split(";")):
        op, *words = text.split(" ")
        has_detail = op in DETAILS
        detail, numbers = ("".join(words[:1]), words[1:]) if has_detail else ("", words)
        known = DETAILS[op].fullmatch(detail) if has_detail else takes(op) == len(numbers)
        operands = tuple(map(int, filter(str.isdecimal, numbers)))
        exist = len(operands) == len(numbers) and all(number < len(steps) for number in operands)
        if not (known and exist):
            raise ValueError(f"not the key of an expression: {key!r}")
        kinds = [steps[number].kind for number in operands]
        steps.append(Step(op, operands, detail, _kind(op, detail, kinds)))
    return tuple(steps)


def slots(key: str) -> list[tuple[str, int]]:
    """The slots of an expression in the order in which its steps mention them."""
    found = (step.slot for step in parse(key) if step.op == "number" or step.op in READS)
    return list(dict.fromkeys(found))


class Combination(NamedTuple):
    """The key of two expressions combined, and which of their captured values it has, by kind;
    those of the second expression are counted behind all of the first one's."""

    key: str
    tensors: tuple[int, ...]
    ints: tuple[int, ...]
    floats: tuple[int, ...]

    def captured(self, first: Captured, second: Captured) -> Captured:
        """What the combination captured."""
        both = first.joined(second)
        return Captured(
            tuple(both.tensors[index] for index in self.tensors),
            tuple(both.ints[index] for index in self.ints),
            tuple(both.floats[index] for index in self.floats),
        )


@constant
def combined(combiner: str, first: str, second: str = "") -> Combination:
    """Two masks joined by & or |, one turned round by ~, or two scores one after another (>>)."""
    builder, one, other = ExpressionBuilder(), parse(first), parse(second)
    result = builder.include(one)
    if combiner == "~":
        result = builder.add("~", result)
    elif combiner == ">>":
        result = builder.include(other, counts_of(one), {"score": result})
    else:
        result = builder.add(combiner, result, builder.include(other, counts_of(one)))
    return builder.combination(result)


@constant
def num_captured(key: str) -> tuple[int, int, int]:
    """How many tensors, whole and real numbers the expression of a key captured."""
    return counts_of(parse(key))


def counts_of(expression: Expression) -> tuple[int, int, int]:
    """How many tensors, whole and real numbers an expression captured."""
    used = {step.slot for step in expression if step.op == "number" or step.op in READS}
    tensors, ints, floats = (sum(kind == letter for kind, _ in used) for letter in "tif")
    return tensors, ints, floats


def needed(expression: Expression, *results: int) -> set[int]:
    """The steps that results are made of, themselves included."""
    found: set[int] = set()
    waiting = list(results)
    while waiting:
        number = waiting.pop()
        if number not in found:
            found.add(number)
            waiting += expression[number].operands
    return found


def never_negative(expression: Expression) -> list[bool]:
    """For each step, whether its form alone shows that it gives no number below 0."""
    found: list[bool] = []
    for step in expression:
        of = [found[number] for number in step.operands]
        if step.op == "literal":
            found.append(not step.detail.startswith("-"))
        elif step.op in ("+", "*", "min"):
            found.append(all(of))
        elif step.op in ("max", "//"):  # a divisor that is a number is greater than 0
            by = step.op == "//" and expression[step.operands[1]].op not in ("number", "literal")
            found.append(any(of) if step.op == "max" else of[0] and not by)
        elif step.op == "where":
            found.append(all(of[1:]))
        else:
            found.append(
                step.kind == TRUTH or step.op in ("batch", "head", "query_row", "kv_row", "abs")
            )
    return found


def mentions(expression: Expression, names: Iterable[str]) -> list[bool]:
    """For each step, whether it depends on one of these variables."""
    wanted, found = set(names), []
    for step in expression:
        found.append(step.op in wanted or any(found[number] for number in step.operands))
    return found


def needs_width(expression: Expression, step: Step) -> bool:
    """Whether 32 bits may not hold what an operation gives, of operands that they hold."""
    if step.kind != WHOLE or step.op not in ("+", "-", "*", "<<", "neg", "abs"):
        return False
    operands = [expression[number] for number in step.operands]
    if step.op in ("*", "<<"):
        return not any(of.op == "literal" and abs(int(of.literal)) < 2**10 for of in operands)
    return any(of.op in READS for of in operands) or _num_numbers(expression, step) > 1


@functools.lru_cache(maxsize=1024)
def only_index(expression: Expression) -> tuple[bool, ...]:
    """For each step, whether nothing uses it but indices of captured tensors, through sums and
    products.

    Those are right where 32 bits hold the index, whatever their parts go through on the way; and
    what an index outside of its tensor reads is not said (`read`, not `take`).
    """
    uses: list[list[int]] = [[] for _ in expression]
    for number, step in enumerate(expression):
        for operand in step.operands:
            uses[operand].append(number)
    found = [False] * len(expression)
    for number in reversed(range(len(expression))):
        of = [expression[use] for use in uses[number]]
        found[number] = bool(of) and all(
            step.op == "read" or (step.op in ("+", "-", "*", "neg") and found[use])
            for step, use in zip(of, uses[number], strict=True)
        )
    return tuple(found)


def may_overflow(expression: Expression, step: Step) -> bool:
    """Whether 64 bits may not hold it either."""
    if step.kind != WHOLE:
        return False
    if step.op == "*" and needs_width(expression, step):
        return True
    wide = any(is_wide(expression, number) for number in step.operands)
    return wide or _num_numbers(expression, step) > 1


def _num_numbers(expression: Expression, step: Step) -> int:
    """How many captured numbers, which may be large, are part of what a step adds up; of several
    of which one is chosen, the most that one has."""
    known: dict[int, int] = {}
    for number in sorted(needed(expression, *step.operands)):
        of = expression[number]
        if of.kind != WHOLE or of.op in READS or of.op in ("//", "%"):
            known[number] = 0
            continue
        counts = [known[operand] for operand in of.operands]
        one = max if of.op in ("min", "max", "where") else sum
        known[number] = int(of.op == "number") + one(counts or [0])
    return sum(known[number] for number in step.operands)


def is_wide(expression: Expression, number: int) -> bool:
    """Whether a whole number may have more than 32 bits, from a tensor of such or a product."""
    waiting = [number]
    while waiting:
        step = expression[waiting.pop()]
        if (step.op in READS and step.dtype == "l") or step.op in ("*", "whole", "<<"):
            return True
        if step.kind == WHOLE and step.op not in READS:
            waiting += step.operands
    return False
