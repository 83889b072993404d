"""Every Python block of README and docs runs as it is, in order, on a CPU; so does every docstring example."""

import doctest
import importlib
import inspect
import pkgutil
import re
from pathlib import Path

import pytest
import torch

import cascade_fd as cf

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
SKIP = ("cascade_fd.kernels", "cascade_fd.integrations", "cascade_fd.backends.triton")  # need Triton or other libraries
MODULES = [m.name for m in pkgutil.walk_packages(cf.__path__, "cascade_fd.", onerror=print) if not m.name.startswith(SKIP)]


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_every_block_of_a_page_runs(page):
    text = page.read_text()
    blocks = list(BLOCK.finditer(text))
    assert blocks, f"{page.name} has no python block"
    assert len(blocks) == text.count("```python"), f"{page.name}: a block is not closed, or indented"
    namespace: dict = {}
    for block in blocks:
        lines = "\n" * text[: block.start(1)].count("\n")  # so that a traceback names the page's own line
        exec(compile(lines + block[1], str(page), "exec"), namespace)


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples(name):
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:  # an optional dependency, never a module of ours
        if str(error.name).startswith("cascade_fd"):
            raise
        pytest.skip(f"{name} needs {error.name}")
    public = {public: getattr(cf, public) for public in cf.__all__}
    result = doctest.testmod(module, extraglobs={**public, "torch": torch, "cf": cf})
    assert not result.failed


def test_some_modules_have_docstring_examples():
    finder = doctest.DocTestFinder(exclude_empty=True)
    found = sum(len(finder.find(importlib.import_module(f"cascade_fd.{name}"))) for name in ("state", "tree", "interop"))
    assert found >= 3


def sections():
    """Heading of api.md -> its text."""
    parts = re.split(r"^#+ ", (ROOT / "docs" / "api.md").read_text(), flags=re.MULTILINE)
    return {part.partition("\n")[0].strip("`"): part for part in parts}


@pytest.mark.parametrize("name", cf.__all__)
def test_every_public_name_has_a_section_with_an_example(name):
    assert "```python" in sections()[name]


@pytest.mark.parametrize("name", [n for n in cf.__all__ if callable(getattr(cf, n)) and n != "Plan"])
def test_signatures_in_the_docs_name_every_parameter(name):
    text = sections()[name]
    if name == "PageTable":  # made by its class methods, never by its constructor
        functions = [cf.PageTable.from_block_table, cf.PageTable.from_csr, cf.PageTable.from_token_map]
    elif name == "PrefixTree":
        functions = [cf.PrefixTree.from_levels]
    else:
        functions = [getattr(cf, name)]
    for function in functions:
        parameters = [p for p in inspect.signature(function).parameters.values() if p.kind is not p.VAR_KEYWORD]
        missing = [p.name for p in parameters if not re.search(rf"\b{p.name}\b", text)]
        assert not missing


def test_every_part_of_a_plan_is_described():
    names = {*cf.Plan.__dataclass_fields__, *(name for name in vars(cf.Plan) if not name.startswith("_"))}
    assert not [name for name in names if not re.search(rf"\b{name}\b", sections()["Plan"])]


def test_layouts_page_lists_every_library_as_the_table_has_it():
    text = (ROOT / "docs" / "layouts.md").read_text()
    for name, library in cf.interop.LIBRARIES.items():
        assert f"| `{name}`" in text
        for layout in library.layouts:
            o, lse = (f"`[{', '.join(axes.split())}]`" for axes in (layout.o, layout.lse))
            assert re.search(rf"\| {re.escape(o)} \| {re.escape(lse)} \| {library.base} \|", text), (name, layout)


def test_links_between_pages_lead_somewhere():
    for page in PAGES:
        for target in re.findall(r"\]\((?!https?:)([^)#]*)(?:#[^)]*)?\)", page.read_text()):
            assert not target or (page.parent / target).exists(), f"{page.name}: {target}"
