"""The layers, held by parsing imports; and what a bare ``import cascade_fd`` may load, in fresh processes."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2] / "cascade_fd"
# A module may import from lower layers and from its own package.
LAYERS = {
    "checks": 0, "costs": 0, "hardware": 0,
    "state": 1, "interop": 1, "kv": 1, "tiles": 1, "discovery": 1, "prefix_index": 1, "nodes": 1, "levels": 1, "sharing": 1,
    "tree": 1,
    "planning": 2, "kernels": 2,
    "backends": 3, "testing": 3,
    "ops": 4,
    "precompile": 5, "integrations": 5, "bench": 5, "demo": 6,
    "__init__": 7, "cli": 8,
}  # fmt: skip
# Within layer 1, in this order; kernels read plans.
ORDER = ["kv", "discovery", "prefix_index", "nodes", "levels", "sharing", "tree"]
SAME_LAYER = {(a, b) for i, a in enumerate(ORDER) for b in ORDER[:i]} | {
    ("hardware", "costs"), ("interop", "state"), ("kernels", "planning"),
}  # fmt: skip


def modules():
    return sorted(ROOT.rglob("*.py"))


def package(path: Path) -> str:
    return path.relative_to(ROOT).with_suffix("").parts[0]


def imported(path: Path) -> set[str]:
    """Top-level parts of cascade_fd that a file imports, anywhere in it."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            if node.module == "cascade_fd":
                names |= {f"cascade_fd.{alias.name}" for alias in node.names}
            else:
                names.add(node.module)
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    parts = {name.split(".")[1] for name in names if name.startswith("cascade_fd.")}
    return {"__init__" if part.startswith("__") else part for part in parts}


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(ROOT)))
def test_modules_import_only_from_lower_layers(path):
    mine = package(path)
    for other in imported(path) - {mine}:
        allowed = LAYERS[other] < LAYERS[mine] or (mine, other) in SAME_LAYER
        assert allowed, f"{mine} (layer {LAYERS[mine]}) imports {other} (layer {LAYERS[other]})"


def test_only_kernels_import_triton():
    for path in modules():
        tops = {
            (node.module if isinstance(node, ast.ImportFrom) else alias.name) or ""
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, (ast.Import, ast.ImportFrom))
            for alias in node.names
        }
        uses = any(top.split(".")[0] == "triton" for top in tops)
        assert not uses or package(path) == "kernels" or path.name == "measure.py", path


def test_state_algebra_lives_in_one_kernel_file():
    for path in (ROOT / "kernels").glob("*.py"):
        if path.name != "algebra.py":
            source = path.read_text()
            assert "exp2(" not in source and "log2(" not in source and 'float("-inf")' not in source, path


@pytest.mark.parametrize("statement", ["import cascade_fd", "import cascade_fd.cli", "import cascade_fd.planning.planner"])
def test_cold_imports(statement):
    heavy = ["triton", "transformers", "flashinfer", "matplotlib", "rich"]
    code = f"{statement}, sys; print([m for m in {heavy} if m in sys.modules])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def test_files_and_functions_stay_small():
    """Not a style check: past these sizes a file needs a reason in its commit message and a line here."""
    allowed = {"attend_kernel", "hopper_kernel", "merge_pair_kernel", "merge_rows_kernel", "narrow_kernel"}  # many strides
    for path in modules():
        source = path.read_text()
        assert source.count("\n") <= 300, path
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef) and node.name not in allowed:
                assert node.end_lineno - node.lineno < 60, f"{path}: {node.name}"
