"""Each house rule fires on the smallest file that breaks it, and is silent on its good twin."""

from pathlib import Path

import house_rules
import pytest

PUBLIC_INIT = '"""Saccade."""\n\n__all__ = ["attention", "masks"]\n__all__ += ["merge_states"]\n'


def violations(root: Path, path: str, text: str) -> list[tuple[int, str]]:
    """The (line, rule) pairs that the rules find when the tree holds this one file."""
    init = root / "src/saccade/__init__.py"
    for file, content in ((init, PUBLIC_INIT), (root / path, text)):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content, encoding="utf-8")
    found = house_rules.check_tree(root)
    assert all(str(violation.path) == path for violation in found)
    return [(violation.line, violation.rule) for violation in found]


def function(lines: int, decorator: str = "") -> str:
    """A function whose definition takes the given number of lines."""
    return f"{decorator}\ndef work():\n" + "    pass\n" * (lines - 1)


def kernel(arguments: str = "", body: str = "pass", decorator: str = "triton.jit") -> str:
    return f"@{decorator}\ndef kernel({arguments}):\n    {body}\n"


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("src/saccade/utils.py", [(1, "file-name")]),
        ("src/saccade/gpu/common.py", [(1, "file-name")]),
        ("src/saccade/helpers/softmax.py", [(1, "file-name")]),
        ("tests/helpers.py", [(1, "file-name")]),
        ("src/saccade/gpu/common_prefix.py", []),
        ("tests/ops/attention/triton/test_forward.py", []),
    ],
)
def test_file_name(tmp_path, path, expected):
    assert violations(tmp_path, path, "") == expected


@pytest.mark.parametrize(
    ("path", "limit"),
    [
        ("src/saccade/ops/attention/triton/forward.py", 500),
        ("src/saccade/ops/attention/hopper/forward.py", 500),
        ("tests/ops/attention/triton/test_forward.py", 500),
        ("docs/chapters/01_tiles.py", 500),
        ("tools/sweep.py", 500),
    ],
)
def test_file_length(tmp_path, path, limit):
    assert violations(tmp_path, path, "#\n" * limit) == []
    assert violations(tmp_path, path, "#\n" * (limit + 1)) == [(1, "file-length")]


@pytest.mark.parametrize(
    ("decorator", "limit"),
    [
        ("", 60),
        ("@functools.cache", 60),
        ("@triton.jit", 110),
        ("@gluon.jit", 110),
        ("@triton.jit(do_not_specialize=['kv_len'])", 110),
    ],
)
def test_function_length(tmp_path, decorator, limit):
    path = "src/saccade/ops/attention/triton/forward.py"
    assert violations(tmp_path, path, function(limit, decorator)) == []
    assert violations(tmp_path, path, function(limit + 1, decorator)) == [(2, "function-length")]


def test_function_length_counts_methods_and_nested_functions(tmp_path):
    text = "class Pool:\n    def grow(self):\n" + "        pass\n" * 60
    assert violations(tmp_path, "src/saccade/kv_cache/pool.py", text) == [(2, "function-length")]


@pytest.mark.parametrize("decorator", ["triton.jit", "gluon.jit"])
def test_kernel_arguments(tmp_path, decorator):
    path = "src/saccade/ops/attention/triton/forward.py"
    views = ", ".join(f"view_{index}" for index in range(18))
    sizes = "QUERY_TILE: tl.constexpr, KV_TILE: 'gl.constexpr'"
    good = kernel(f"{views}, {sizes}", decorator=decorator)
    bad = kernel(f"{views}, *data, {sizes}", decorator=decorator)
    assert violations(tmp_path, path, good) == []
    assert violations(tmp_path, path, bad) == [(2, "kernel-arguments")]
    host_function = f"def launch({views}, *data, more, and_more): pass\n"
    assert violations(tmp_path, path, host_function) == []


FEW_BOOLEANS = """
class SweepMeta(NamedTuple):
    CAUSAL: bool
    STARTED: bool
    TILES: int

@triton.jit
def sweep(view, meant, META: tl.constexpr, CHAINED: tl.constexpr, last=0):
    if CHAINED and META.CAUSAL and META.TILES:
        fold(view, meant + 1)
"""
MANY_BOOLEANS = {
    "a field of META": FEW_BOOLEANS.replace("TILES: int", "TILES: bool"),
    "a default": FEW_BOOLEANS.replace("last=0", "last=False"),
    "a condition": FEW_BOOLEANS.replace("meant + 1", "1 if view else 2"),
    "a number that is counted with": FEW_BOOLEANS.replace("meant + 1", "1 if meant else meant + 1"),
    "what a callee tests": FEW_BOOLEANS.replace("meant + 1", "meant")
    + "@triton.jit\ndef fold(view, STORE):\n    if not STORE:\n        pass\n",
    "what a role of warps is given": FEW_BOOLEANS
    + "@gluon.jit\ndef start(a, b, c, d):\n    warps([(role, (a, b, c, d))])\n"
    + "@gluon.jit\ndef role(a, b, c, d):\n    return role(True, False, True, False)\n",
}


@pytest.mark.parametrize("case", MANY_BOOLEANS)
def test_kernel_booleans(tmp_path, case):
    path = "src/saccade/ops/linear_attention/triton/chunk_scan.py"
    assert violations(tmp_path, path, FEW_BOOLEANS) == []
    found = [rule for _, rule in violations(tmp_path, path, MANY_BOOLEANS[case])]
    expected = {"a number that is counted with": 0, "what a role of warps is given": 2}
    assert found == ["kernel-booleans"] * expected.get(case, 1)


@pytest.mark.parametrize(
    "text",
    [
        "qk = 1",
        "def scale_scores(sm_scale): pass",
        "def split(*, block_table=None): pass",
        "for start_n in range(3): pass",
        "rows = [offs_m for offs_m in range(3)]",
        "if (m_i := 3): pass",
        "first, l_i = 1, 2",
        "self.N_CTX = 3",
        "BLOCK_M: int = 64",
        "def launch(seqlen_q, stride_qz): pass",
    ],
)
def test_banned_name(tmp_path, text):
    found = violations(tmp_path, "src/saccade/ops/attention/triton/forward.py", text)
    assert set(found) == {(1, "banned-name")}


@pytest.mark.parametrize(
    "text",
    [
        "scores = 1",
        "output = peer(query, sm_scale=scale, block_table=page_table)",  # the callee's names
        "length = peer.seqlen_q + qk",  # read, not introduced
        "def attention_varlen(query, cu_seqlens_q, max_seqlen_q=None): pass",
        "def stride_of(row_stride): pass",
        "alpha, T, H = 0.5, float, 8",  # banned in kernels only
    ],
)
def test_good_name(tmp_path, text):
    assert violations(tmp_path, "src/saccade/ops/attention/triton/forward.py", text) == []


@pytest.mark.parametrize("name", ["acc", "alpha", "T", "p"])
def test_banned_kernel_name(tmp_path, name):
    path = "src/saccade/ops/attention/triton/forward.py"
    assert violations(tmp_path, path, kernel(body=f"{name} = 1")) == [(3, "banned-name")]
    assert violations(tmp_path, path, kernel(arguments=name)) == [(2, "banned-name")]
    assert violations(tmp_path, path, f"def launch({name}): pass") == []


def test_banned_name_is_reported_once_in_a_kernel(tmp_path):
    path = "src/saccade/ops/attention/triton/forward.py"
    assert violations(tmp_path, path, kernel(body="qk = 1")) == [(3, "banned-name")]


def test_integrations_keep_the_arguments_of_their_peers(tmp_path):
    path = "src/saccade/integrations/flash_attn.py"
    assert violations(tmp_path, path, "def flash_attn(query, block_table): pass") == []
    assert violations(tmp_path, path, "block_table = 1") == [(1, "banned-name")]


@pytest.mark.parametrize(
    ("path", "statement"),
    [
        ("ops/attention/reference.py", "from saccade.ops.attention.api import attention"),
        ("ops/attention/reference.py", "from .api import attention"),
        ("ops/attention/cpu/host.py", "from saccade.ops.attention.reference import softmax"),
        ("ops/attention/cpu/host.py", "from .. import reference"),
        ("ops/attention/cpu/host.py", "from ..triton import forward"),
        ("ops/paged_attention/cpu.py", "from saccade.ops.attention import autograd"),
        ("gpu/online_softmax.py", "from ..ops.attention.reference import softmax"),
        ("gpu/hopper/pipeline.py", "import saccade.ops.paged_attention.triton.decode"),
        ("ops/attention/triton/forward.py", "import saccade.integrations.sdpa as sdpa"),
        ("ops/attention/triton/forward.py", "from ....bench import timing"),
        ("ops/attention/triton/forward.py", "from saccade.ops.attention.hopper import forward"),
        ("ops/attention/triton/host.py", "def run():\n    from ..hopper import forward"),
        ("ops/attention/hopper/host.py", "from ....demo import main"),
        ("ops/attention/hopper/host.py", "from ...linear_attention.cpu import forward"),
        ("ops/attention/triton/host.py", "from ....kernel_check import catalogue"),
        ("runtime/spec.py", "import saccade.kernel_check.calls"),
        ("runtime/spec.py", "from saccade.ops.attention import custom_op"),
        ("modifiers/trace.py", "from ..runtime import spec"),
    ],
)
def test_import_direction(tmp_path, path, statement):
    [(_, rule)] = violations(tmp_path, f"src/saccade/{path}", statement)
    assert rule == "import-direction"


@pytest.mark.parametrize(
    ("path", "statement"),
    [
        ("ops/linear_attention/reference.py", "from .feature_scaling import scaled"),
        ("ops/attention/cpu/host.py", "from ....runtime.spec import Problem"),
        ("gpu/launcher.py", "from . import online_softmax"),
        ("ops/attention/triton/forward.py", "from ....gpu.online_softmax import softmax_step"),
        ("ops/attention/hopper/host.py", "from ..triton.kind import kind_of"),
        (
            "ops/linear_attention/hopper/host.py",
            "from saccade.ops.attention.triton import call_spec",
        ),
        ("ops/attention/api.py", "from .reference import forward"),
        ("kernel_check/worker.py", "from ..ops.attention.triton import configs"),
        ("kernel_check/worker.py", "from . import catalogue"),
        ("ops/attention/cpu/host.py", "import torch.utils, bench, attention"),
    ],
)
def test_good_import_direction(tmp_path, path, statement):
    assert violations(tmp_path, f"src/saccade/{path}", statement) == []


@pytest.mark.parametrize(
    ("path", "statement"),
    [
        ("demo/run.py", "from saccade.runtime.spec import Problem"),
        ("demo/run.py", "from ..kv_cache import pool"),
        ("bench/cases.py", "from saccade import dispatch"),
        ("integrations/sdpa/call.py", "import saccade.runtime.spec"),
    ],
)
def test_private_name(tmp_path, path, statement):
    found = violations(tmp_path, f"src/saccade/{path}", statement)
    assert found == [(1, "public-names-only")]


@pytest.mark.parametrize(
    ("path", "statement"),
    [
        ("demo/run.py", "import saccade"),
        ("demo/run.py", "from saccade import attention, masks, merge_states, __version__"),
        ("demo/run.py", "from .. import masks"),
        ("demo/run.py", "from ..bench.results import versions"),
        ("bench/cases.py", "from .timing import measure\nfrom saccade.bench import report"),
        ("runtime/backends.py", "from .problem import Problem"),
    ],
)
def test_public_name(tmp_path, path, statement):
    assert violations(tmp_path, f"src/saccade/{path}", statement) == []


@pytest.mark.parametrize("start", ["The same for keys.", "As `forward`, for pages."])
def test_a_docstring_says_what_a_thing_is(tmp_path, start):
    path = "src/saccade/gpu/view.py"
    assert violations(tmp_path, path, f'def rows():\n    """{start}"""') == [(2, "docstring-start")]
    assert violations(tmp_path, path, 'def rows():\n    """Rows of keys."""') == []


def test_a_rule_is_broken_in_the_open_with_a_reason(tmp_path):
    path = "src/saccade/ops/attention/triton/forward.py"
    assert violations(tmp_path, path, "qk = 1  # breaks banned-name: a peer reads it") == []
    for comment in ("# breaks banned-name:", "# breaks file-length: a peer reads it"):
        assert violations(tmp_path, path, f"qk = 1  {comment}") == [(1, "banned-name")]


def test_a_file_that_does_not_parse_is_reported(tmp_path):
    assert violations(tmp_path, "tools/sweep.py", "\ndef (") == [(2, "syntax")]


def test_main_prints_a_line_for_each_violation(tmp_path, capsys):
    violations(tmp_path, "src/saccade/utils.py", "qk = 1")
    assert house_rules.main([str(tmp_path)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "src/saccade/utils.py:1: banned-name: `qk` is called `scores` here"
    assert lines[1].startswith("src/saccade/utils.py:1: file-name: ")
    assert lines[2:] == ["house rules: 2 violations"]


def test_main_is_content_with_a_good_tree(tmp_path, capsys):
    violations(tmp_path, "src/saccade/runtime/spec.py", "")
    assert house_rules.main([str(tmp_path)]) == 0
    assert capsys.readouterr().out == "house rules: all kept\n"


def test_main_warns_of_a_long_file_and_is_content(tmp_path, capsys):
    assert violations(tmp_path, "src/saccade/long.py", "#\n" * 501) == [(1, "file-length")]
    assert house_rules.main([str(tmp_path)]) == 0
    assert "src/saccade/long.py:1: file-length: 501 lines" in capsys.readouterr().out


@pytest.mark.parametrize(
    "text", ["def find_walk(): pass", "class Ticket: pass", "JUDGED = 1", "def f(is_spoilt): pass"]
)
def test_banned_word(tmp_path, text):
    assert violations(tmp_path, "src/saccade/gpu/rows.py", text) == [(1, "banned-word")]
    good = "def find_tile_range(): os.walk('.')"  # what others named
    assert violations(tmp_path, "src/saccade/gpu/rows.py", good) == []
    assert violations(tmp_path, "tests/gpu/test_rows.py", text) == []
