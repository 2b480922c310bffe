"""The public names: what `saccade` and its public modules export, read without importing them.

`CHAPTERS` lists them for the reference of the site, in the order in which it shows them; a test
compares it with the modules' `__all__`. `public_types.py` checks their types, `reference_pages.py`
makes their pages, and a test runs the examples in their docstrings.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src"


class Definition(NamedTuple):
    """Where a name comes from: a module of ours and its name there, or another package's module."""

    module: str
    name: str

    @property
    def is_ours(self) -> bool:
        """Whether it is defined in this library."""
        return self.module.partition(".")[0] == "saccade"


def file_of(module: str) -> Path:
    """The file of one of our modules.

    Raises:
        FileNotFoundError: where there is no such module.
    """
    path = SOURCE.joinpath(*module.split("."))
    for file in (path / "__init__.py", path.with_suffix(".py")):
        if file.exists():
            return file
    raise FileNotFoundError(f"no module {module} below {SOURCE}")


@functools.cache
def tree_of(module: str) -> ast.Module:
    """A module, parsed."""
    return ast.parse(file_of(module).read_text(encoding="utf-8"))


def exported(module: str) -> tuple[str, ...]:
    """The names in a module's `__all__`.

    Raises:
        ValueError: where it has none: a public module says what is public in it.
    """
    for node in tree_of(module).body:
        match node:
            case ast.Assign(targets=[ast.Name(id="__all__")], value=value):
                return tuple(ast.literal_eval(value))
    raise ValueError(f"{module} has no __all__")


@functools.cache
def definition(module: str, name: str) -> Definition:
    """Where a name of a module is defined, through all imports."""
    for node in ast.walk(tree_of(module)):
        if not isinstance(node, ast.ImportFrom) or node.level:
            continue
        for alias in node.names:
            if (alias.asname or alias.name) == name:
                found = Definition(str(node.module), alias.name)
                is_module = found.is_ours and _is_module(f"{found.module}.{found.name}")
                is_shadowed = is_module and name in _assigned(found.module)
                if not found.is_ours or (is_module and not is_shadowed):
                    return found
                return definition(*found)
    return Definition(module, name)


def _is_module(name: str) -> bool:
    try:
        file_of(name)
    except FileNotFoundError:
        return False
    return True


def _assigned(module: str) -> set[str]:
    """What a module imports from its own modules by the names of these, as `explain`."""
    return {
        alias.name
        for node in tree_of(module).body
        if isinstance(node, ast.ImportFrom) and node.module == f"{module}.{node.names[0].name}"
        for alias in node.names
    }


INTEGRATIONS = "saccade.integrations"
# Modules of which each public name has a page. The others in saccade.__all__ are these modules.
MODULES = (
    "saccade",
    "saccade.masks",
    "saccade.scores",
    "saccade.feature_maps",
    "saccade.parallel",
    "saccade.testing",
    f"{INTEGRATIONS}.sdpa",
    f"{INTEGRATIONS}.flex_attention",
    f"{INTEGRATIONS}.flash_attn",
    f"{INTEGRATIONS}.flash_attn.rotary",
    f"{INTEGRATIONS}.flash_attn.version_3",
    f"{INTEGRATIONS}.flash_kernels",
    f"{INTEGRATIONS}.fla",
    f"{INTEGRATIONS}.fast_transformers",
    f"{INTEGRATIONS}.transformers",
    f"{INTEGRATIONS}.diffusers",
    f"{INTEGRATIONS}.vllm",
    f"{INTEGRATIONS}.xformers",
    f"{INTEGRATIONS}.xformers.attn_bias",
    f"{INTEGRATIONS}.xformers.tree_attention",
)


def public_names() -> list[tuple[str, str]]:
    """Each public name with its module; modules themselves are none."""
    return [
        (module, name)
        for module in MODULES
        for name in exported(module)
        if f"{module}.{name}" not in MODULES and not name.startswith("_")
    ]


# ---- docstrings ----------------------------------------------------------------------------------

FLEX = f"{INTEGRATIONS}.flex_attention"
# PyTorch's own, which our module has under the same names: their docstrings here.
OF_PYTORCH = {
    f"{FLEX}.AuxOutput": """What `flex_attention` gives beside the output, as `return_aux` asks.

    Examples:
        >>> from saccade.integrations import flex_attention as flex
        >>> query, key, value = torch.randn(3, 1, 2, 64, 16)
        >>> asked = flex.AuxRequest(lse=True)
        >>> output, more = flex.flex_attention(query, key, value, return_aux=asked)
        >>> isinstance(more, flex.AuxOutput), more.lse.shape
        (True, torch.Size([1, 2, 64]))
    """,
    f"{FLEX}.AuxRequest": """What `flex_attention` is to give beside the output: the lse.

    Examples:
        >>> from saccade.integrations import flex_attention as flex
        >>> flex.AuxRequest(lse=True).lse
        True
    """,
    f"{FLEX}.BlockMask": """A mask in blocks; `create_block_mask` makes one that knows its function.

    Examples:
        >>> from saccade.integrations import flex_attention as flex
        >>> made = flex.create_block_mask(lambda b, h, q, kv: q >= kv, None, None, 256, 256)
        >>> isinstance(made, flex.BlockMask)
        True
    """,
    f"{FLEX}.FlexKernelOptions": """Names of hints for PyTorch's kernels, not needed here.

    Examples:
        >>> from saccade.integrations import flex_attention as flex
        >>> "num_warps" in flex.FlexKernelOptions.__annotations__
        True
    """,
    f"{FLEX}.and_masks": """The mask function of what all of some mask functions show.

    Examples:
        >>> from saccade.integrations import flex_attention as flex
        >>> causal, near = (lambda b, h, q, kv: q >= kv), (lambda b, h, q, kv: q - kv < 16)
        >>> made = flex.create_block_mask(flex.and_masks(causal, near), None, None, 64, 64)
    """,
    f"{FLEX}.create_mask": """A mask function written out as a tensor of bools.

    Examples:
        >>> from saccade.integrations import flex_attention as flex
        >>> causal = lambda b, h, q, kv: q >= kv
        >>> flex.create_mask(causal, 1, 1, 3, 3, device="cpu")[0, 0].int().tolist()
        [[1, 0, 0], [1, 1, 0], [1, 1, 1]]
    """,
    f"{FLEX}.noop_mask": """The mask function that shows everything.

    Examples:
        >>> from saccade.integrations import flex_attention as flex
        >>> made = flex.create_block_mask(flex.noop_mask, None, None, 64, 64)
    """,
    f"{FLEX}.or_masks": """The mask function of what any of some mask functions shows.

    Examples:
        >>> from saccade.integrations import flex_attention as flex
        >>> causal, first = (lambda b, h, q, kv: q >= kv), (lambda b, h, q, kv: kv < 16)
        >>> made = flex.create_block_mask(flex.or_masks(causal, first), None, None, 64, 64)
    """,
}  # fmt: skip

# What public names give, shown on their pages.
GIVEN_BY = {
    "saccade.Engine": tuple(
        Definition("saccade.serving.request", name)
        for name in ("Completion", "Generated", "RequestStatistics", "EngineStatistics")
    ),
    "saccade.explain": (Definition("saccade.explain", "Explanation"),),
}


class Documented(NamedTuple):
    """A name and its docstring; "": it has none."""

    name: str
    text: str


def documented(module: str, name: str) -> Iterator[Documented]:
    """A public name, then its public members, and what it gives, with theirs."""
    full = f"{module}.{name}"
    if full in OF_PYTORCH:
        yield Documented(full, OF_PYTORCH[full])
        return
    yield from _documented(definition(module, name), full)
    for given in GIVEN_BY.get(full, ()):
        yield from _documented(given, ".".join(given))


def _documented(where: Definition, full: str) -> Iterator[Documented]:
    body = tree_of(where.module).body
    for number, node in enumerate(body):
        match node:
            case ast.FunctionDef(name=where.name) | ast.ClassDef(name=where.name):
                text = ast.get_docstring(node) or ""
                if not text and _is_overload(node):
                    continue
                yield Documented(full, text)
                for member in node.body if isinstance(node, ast.ClassDef) else ():
                    if isinstance(member, ast.FunctionDef) and not member.name.startswith("_"):
                        text = ast.get_docstring(member) or ""
                        yield Documented(f"{full}.{member.name}", text)
            case (
                ast.AnnAssign(target=ast.Name(id=where.name))
                | ast.Assign(targets=[ast.Name(id=where.name)])
            ):
                yield Documented(full, _text_behind(body, number))


def _is_overload(node: ast.FunctionDef | ast.ClassDef) -> bool:
    return any(ast.unparse(decorator) == "overload" for decorator in node.decorator_list)


def _text_behind(body: list[ast.stmt], number: int) -> str:
    """The docstring of an attribute, which stands behind it."""
    match body[number + 1 : number + 2]:
        case [ast.Expr(value=ast.Constant(value=str(text)))]:
            return text
    return ""


def docstring_of_module(module: str) -> str:
    """A module's docstring."""
    return ast.get_docstring(tree_of(module)) or ""


# ---- the reference -------------------------------------------------------------------------------


class Chapter(NamedTuple):
    """A stretch of the reference: names of one module that belong together."""

    title: str
    module: str
    names: tuple[str, ...]


CHAPTERS = (
    Chapter("Attention", "saccade", (
        "attention", "attention_varlen", "scaled_dot_product_attention", "merge_states", "explain",
        "KernelConfig", "ModifierModule",
    )),
    Chapter("Attention in fp8", "saccade", ("attention_fp8", "attention_fp8_varlen")),
    Chapter("Linear attention", "saccade", (
        "linear_attention", "linear_attention_varlen", "linear_attention_step", "LinearState",
    )),
    Chapter("The gated delta rule", "saccade", (
        "gated_delta_rule", "gated_delta_rule_varlen", "gated_delta_rule_step",
    )),
    Chapter("Pages", "saccade", (
        "attention_paged", "PagedCache", "OutOfPagesError", "write_kv_cache", "move_pages",
        "apply_rotary",
    )),
    Chapter("Serving", "saccade", ("Engine",)),
    Chapter("Masks", "saccade.masks", (
        "Mask", "causal", "window", "prefix", "key_lengths", "documents", "blocks", "dense",
        "function", "take", "of_positions", "tree", "tree_bits",
    )),
    Chapter("Scores", "saccade.scores", (
        "Score", "softcap", "alibi", "bias", "function", "take", "absolute", "exp", "log", "tanh",
        "minimum", "maximum", "where",
    )),
    Chapter("Feature maps", "saccade.feature_maps", (
        "softmax", "Favor", "RandomFourierFeatures", "SmoothedRandomFourierFeatures",
        "GeneralizedRandomFeatures", "RandomProjection", "ScaledMap",
    )),
    Chapter("Several GPUs", "saccade.parallel", (
        "plan", "Plan", "attention", "attention_varlen", "linear_attention",
        "linear_attention_varlen", "gated_delta_rule", "gated_delta_rule_varlen", "ShardedCache",
        "Cost", "Machine",
    )),
    *(
        Chapter(
            module.removeprefix(f"{INTEGRATIONS}."),
            module,
            tuple(name for name in exported(module) if not name.startswith("_")),
        )
        for module in MODULES
        if module.startswith(f"{INTEGRATIONS}.")
    ),
    Chapter("Testing", "saccade.testing", (
        "make_case", "Description", "Case", "oracle", "tolerances", "assert_exact",
        "make_linear_case", "LinearCase", "linear_oracle", "assert_linear_exact",
        "make_delta_case", "DeltaCase", "delta_oracle", "assert_delta_exact",
        "make_paged_case", "PagedDescription", "PagedCase", "poisoned", "checked", "problems",
    )),
)  # fmt: skip
