"""What a plan says of itself agrees with counts made another way."""

import re
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

import cascade_fd as cf
from cascade_fd import Level, PrefixTree
from cascade_fd.bench.cases import CASES
from cascade_fd.bench.workload import tree_of
from cascade_fd.costs import Costs, TileCost
from cascade_fd.hardware import CPU, H200, Hardware
from cascade_fd.planning.draw import items_of
from cascade_fd.planning.explain import KERNELS, MOST, abbreviate
from cascade_fd.planning.facts import facts_of
from cascade_fd.planning.worklist import NODE, NUM_ROWS, ROW0, START, STATE, STOP, TABLE_ROW

PAGE, BYTES = 16, 8 * 2 * 128 * 2  # bytes per token: 8 KV heads, K and V, D = 128, 2 bytes
MODEL = {"num_q_heads": 32, "num_kv_heads": 8, "head_dim": 128, "device": "cpu", "hardware": H200}


def pages(groups, root=0, own=(5, 9, 3)):
    """Block tables and lengths: ``groups`` are (requests, shared pages), all below ``root`` pages; ``own`` pages in turn."""
    fresh = iter(range(10**6))
    above, rows = [next(fresh) for _ in range(root)], []
    for requests, shared in groups:
        middle = [next(fresh) for _ in range(shared)]
        rows += [above + middle + [next(fresh) for _ in range(own[(len(rows) + i) % len(own)])] for i in range(requests)]
    lens = [len(row) * PAGE - 3 for row in rows]
    return [row + [0] * (max(map(len, rows)) - len(row)) for row in rows], lens


BATCHES = {
    "groups of 1, 5 and 58": pages([(1, 20), (5, 40), (58, 60)]),
    "nested": pages([(5, 40), (20, 8), (3, 1)], root=8),
    "in any order": tuple(x[::-1][1:] + x[::-1][:1] for x in pages([(2, 3), (3, 200)], root=2)),
    "many rows per node": pages([(100, 64)], own=(1,)),
    "no sharing": pages([(1, 3), (1, 5), (1, 1)]),
    "one request": pages([(1, 512)]),
}  # fmt: skip


def plan_of(name, **options):
    tables, lens = BATCHES[name]
    q_lens = options.pop("q_lens", 1)
    return cf.plan(PrefixTree.from_block_tables(tables, lens, PAGE, q_lens=q_lens), **MODEL | options)


def plan_case(name, **options):
    """A benchmark case over one table of a row per request, where nodes may be folded."""
    case = CASES[name]
    pages = sum(-(-n // case.page_size) for _, n in case.levels) + 10  # room to grow
    ids = torch.zeros(case.requests, pages, dtype=torch.int32)
    return cf.plan(tree_of(case, ids), **MODEL | options)


def number(pattern, text):
    """The number, with its decimal prefix, that stands where ``pattern`` has a #."""
    found = re.search(re.escape(pattern).replace(r"\#", r"([\d.,]+) ?([kMGT]?)"), text)
    assert found, f"{pattern!r} is not in\n{text}"
    return float(found[1].replace(",", "")) * {"": 1, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}[found[2]]


def table(text, head):
    """Rows of the table whose head starts with ``head``, as lists of cells."""
    lines = text.splitlines()
    at = next(i for i, line in enumerate(lines) if line.split()[:1] == [head])
    rows = [re.split(r"  +", line.strip()) for line in lines[at + 1 :]]
    return rows[: next(i for i, row in enumerate(rows) if not row[0].isdigit())]


def digits(value):
    return pytest.approx(value, rel=6e-3)  # three digits


@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("split", ["wave", "balanced", "fixed", "stream_k", 3])
@pytest.mark.parametrize("share", ["auto", "always", "never"])
def test_bytes_agree_with_page_ids_and_items(name, split, share):
    tables, lens = BATCHES[name]
    made = plan_of(name, split=split, share=share)
    text = made.explain(H200)
    unique = {
        p: min(PAGE, n - i * PAGE) for row, n in zip(tables, lens, strict=True) for i, p in enumerate(row) if n > i * PAGE
    }
    once, flat = sum(unique.values()), sum(lens)
    ranges = [tuple(item) for x in made.launches for item in x.items[:, [TABLE_ROW, START, STOP]].tolist()]
    planned, by_items = (sum(stop - start for _, start, stop in some) for some in (set(ranges), ranges))
    assert number("whole context: #B", text) == digits(flat * BYTES)
    assert number("every node once: #B", text) == digits(planned * BYTES)
    assert planned == {"always": once, "never": flat}.get(share, planned)
    if planned > once:
        assert number("every token once: #B", text) == digits(once * BYTES)
    else:
        assert "every token once:" not in text
    if by_items > planned:
        assert number("once per row tile: #B", text) == digits(by_items * BYTES)
        assert f"up to {facts_of(made).row_tiles.max()} times (node " in text
    else:
        assert "row tile:" not in text
    if flat > planned:
        assert number(", # times less", text) == digits(flat / planned)
    else:
        assert ", the same" in text


@pytest.mark.parametrize("name", BATCHES)
def test_launches_and_merge_agree_with_the_arrays(name):
    made = plan_of(name)
    text = made.explain(H200)
    rows = table(text, "launch")
    assert len(rows) == len(made.launches)
    for row, launch in zip(rows, made.launches, strict=True):
        items = launch.items.numpy()
        starts = {n: len(set(items[items[:, NODE] == n, START].tolist())) for n in items[:, NODE].tolist()}
        low, high = min(starts.values()), max(starts.values())
        slots = 132 * launch.tile.per_sm
        counts = (len(starts), f"{low}" if low == high else f"{low} to {high}", len(items), len(items) * 8, slots)
        assert row[1:6] == [f"{n:,}" if isinstance(n, int) else n for n in counts]
        assert float(row[6]) == pytest.approx(len(items) * 8 / slots, abs=0.005)
        assert row[7] == f"{(items[:, STOP] - items[:, START]).max():,} tokens"
        assert row[8] == f"{launch.tile.block_m} rows x {launch.tile.block_n} keys{KERNELS[launch.tile.kernel]}"
    direct = {
        r // 4 for x in made.launches for i in x.items.tolist() if i[STATE] < 0 for r in range(i[ROW0], i[ROW0] + i[NUM_ROWS])
    }
    assert number("# written directly", text.replace(" rows written", " written").replace(" row written", " written")) == len(
        direct
    )
    assert number("merged from # workspace", text) == int(made.merge.indptr[-1])
    assert number(f"workspace slot{'' if made.num_slots == 1 else 's'} (#B)", text) == digits(made.num_slots * 32 * 129 * 4)


@pytest.mark.parametrize(
    ("name", "groups"),
    [
        ("groups of 1, 5 and 58", [("0", "5", "640", "1-5"), ("0", "58", "960", "6-63")]),
        (
            "nested",
            [("0", "28", "128", "0-27"), ("1", "5", "640", "0-4"), ("1", "20", "128", "5-24"), ("1", "3", "16", "25-27")],
        ),
        ("in any order", [("0", "5", "32", "0-4"), ("1", "3", "3,200", "0-1, 4"), ("1", "2", "48", "2-3")]),
        ("many rows per node", [("0", "100", "1,024", "0-99")]),
    ],
)
def test_groups(name, groups):
    text = plan_of(name, share="always").explain(H200)
    rows = table(text, "node")
    assert sorted((row[1], row[2], row[3], row[7]) for row in rows) == sorted(groups)
    assert {row[6] for row in rows} == {'share="always"'}
    assert f"Shared    {len(groups)} node" in text
    assert "Folded" not in text

    text = plan_of(name, share="never").explain(H200)
    rows = table(text, "node")
    assert sorted((*row[1:3], row[4]) for row in rows) == sorted((readers, n, which) for _, readers, n, which in groups)
    assert {row[3] for row in rows} == {'share="never"'}
    assert f"Folded    {len(groups)} node" in text
    assert "Shared    nothing: " in text


def test_nothing_shared():
    text = plan_of("no sharing", split=1).explain(H200)
    assert "Shared    nothing" in text
    assert "Private   3 nodes of 61 to 221 tokens, 407 in all; row tiles 1, splits 1; why: one reader" in text


def test_an_empty_batch_says_so():
    made = cf.plan(PrefixTree.from_levels([Level([0], [])]), **MODEL)
    text = made.explain()
    for line in ("0 requests, 0 query rows, 0 nodes", "Shared    nothing", "Private   nothing", "KV read   nothing", "none"):
        assert line in text
    assert "Floor     nothing" in text
    assert "NVIDIA H200: 132 SMs" in text  # what the plan was made for, unless hardware is named
    assert "CPU: 1 SM" in made.explain(CPU)


def test_padded_requests_and_rows_of_none_do_not_count():
    tree = PrefixTree.from_levels([Level([0, 3], [64]), Level([0, 1, 2, 3], [10, 0, 7])], q_lens=[1, 1, 0])
    text = cf.plan(tree, **MODEL).explain(H200)
    assert number("whole context: #B", text) == digits((2 * 64 + 10) * BYTES)
    assert number("every node once: #B", text) == digits((64 + 10) * BYTES)
    assert table(text, "node")[0][2:] == ["2", "64", "1", "1", "its tokens lie apart from its readers'", "0-1"]


@pytest.mark.parametrize(("name", "bound"), [("d1", "reading"), ("d3", "reading"), ("c4", "reading"), ("c5", "multiplying")])
def test_floor_is_the_benchmark_model_of_traffic(name, bound):
    text = plan_case(name).explain(H200)
    assert number("Floor     # us", text) == digits(CASES[name].floor_us)
    assert f"bound by {bound}; a lower bound with cold caches, not a prediction" in text


def test_rates_nobody_knows_bound_nothing():
    text = plan_case("c5").explain(Hardware("new", "sm_99", 10, 1 << 16, 1e12))
    assert "bound by reading" in text and "at a rate not known" in text and "FLOP/s" not in text


def test_flops_leave_out_what_causal_rows_do_not_see():
    tree = PrefixTree.from_levels([Level([0, 2], [10]), Level([0, 1, 2], [7, 3])], q_lens=[4, 2])
    seen = sum(10 + n - q + 1 + row for n, q in ((7, 4), (3, 2)) for row in range(q))
    assert facts_of(cf.plan(tree, **MODEL)).flops == seen * 32 * 4 * 128


@pytest.mark.parametrize("growth", [0, 1, 100])
def test_capacity(growth):
    tree = PrefixTree.from_levels([Level([0, 2], [500]), Level([0, 1, 2], [5, 90])])
    text = cf.plan(tree, **MODEL, max_new_tokens=growth).explain(H200)
    if growth:
        assert (
            f"{growth} more token{'s' * (growth > 1)} per request; the longest table row may go from 90 to {90 + growth}"
            in text
        )
    else:
        assert "Capacity  the present lengths" in text
    assert number("every node once: #B", text) == digits(595 * BYTES)  # of now, not of the capacity


def test_capacity_that_is_used_up():
    tree = PrefixTree.from_levels([Level([0, 1, 2], [5, 90])])
    made = cf.plan(tree, **MODEL, max_new_tokens=7)
    made.advance(3)
    assert "7 more tokens per request, 3 of them used; the longest table row may go from 90 to 97" in made.explain()


def test_predicted_time_is_that_of_the_hardware():
    """More launches, slower blocks, dearer states: each shows, and what most of the time goes to is named."""
    costs = Costs(1.0, 10.0, 3.0, 0.0, (TileCost(128, 4, 0.0, 0.0, 0.0, 0.0),), "made up")
    for name, launches, us in (("no sharing", 1, 1), ("groups of 1, 5 and 58", 3, 1 + 2 * 10 + 3)):
        made = plan_of(name, split=1, share="always")
        assert (len(made.launches), len(made.merge) > 0) == (launches, launches > 1)
        text = made.explain(replace(H200, costs=costs))
        assert f"Predicted {us} us, most of it launches; constants: made up" in text
    blocks = replace(costs, tiles=(TileCost(128, 4, 0.0, 0.0, 66.0, 132.0),))
    lens = BATCHES["no sharing"][1]
    made = plan_of("no sharing", split=1)
    assert number("Predicted # us", made.explain(replace(H200, costs=blocks))) == digits(1 + 8 * sum(lens) / 64)
    assert "most of it reading and multiplying" in made.explain(replace(H200, costs=blocks))
    made = plan_of("many rows per node", split=1, share="never")
    flat = sum(BATCHES["many rows per node"][1])
    once = flat - 99 * 1024  # 100 requests share 1,024 tokens: all but the first find them in the cache, at half the price
    many = replace(H200, costs=blocks, num_sms=1320)  # ten times as many: all programs at once
    assert number("Predicted # us", made.explain(many)) == digits(1 + 0.8 * (once + flat) / 2 / 64)
    made = plan_of("no sharing", split=1)
    steps = replace(costs, tiles=(TileCost(128, 4, 5.0, 0.0, 0.0, 0.0),))
    assert number("Predicted # us", made.explain(replace(H200, costs=steps))) == digits(1 + 5 * max(lens) / 64)
    assert "most of it the longest item" in made.explain(replace(H200, costs=steps))
    one_after_the_other = replace(H200, arch="sm_80", costs=replace(costs, launch=7.0, follow=0.0))
    assert not one_after_the_other.overlaps
    assert "Predicted 24 us" in plan_of("groups of 1, 5 and 58", split=1, share="always").explain(one_after_the_other)


def test_capacity_where_a_shared_node_reaches_beyond_the_private_one_of_its_launch():
    """Of 32 rows: a node that five requests share, up to token 752, and six rows of a request of 10 tokens."""
    tables = [[*range(1, 48), 90 + i] for i in range(5)] + [[99] + [0] * 47]
    tree = PrefixTree.from_block_tables(tables, [753] * 5 + [10], PAGE, q_lens=[1] * 5 + [6])
    made = cf.plan(tree, **MODEL, max_new_tokens=6, share="always")
    assert [x.max_stop for x in made.launches] == [752, 759]
    assert facts_of(made).growth == 6


def test_nothing_grows_without_private_nodes():
    text = cf.plan(PrefixTree.from_levels([Level([0, 2], [500])]), **MODEL).explain(H200)
    assert "Capacity  nothing can grow" in text and "Private   nothing" in text


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"split": "wave"},
        {"split": "stream_k"},
        {"split": 2},
        {"batch_invariant": True},
        {"max_new_tokens": 40},
        {"share": "never", "max_new_tokens": 40},
    ],
)
@pytest.mark.parametrize("name", ["d4", "c2", "c6", "s1", "t1", "v2"])
def test_nothing_is_read_from_the_device(name, options):
    """Arrays on the meta device have no contents at all."""
    host, device = plan_case(name, **options), plan_case(name, **options, device="meta")
    assert device.explain(H200) == host.explain(H200)
    facts = facts_of(host)
    for i, launch in enumerate(host.launches):
        private_first = np.roll(facts.launch, host.num_private)  # as lengths are numbered
        assert (private_first[launch.items[:, NODE].numpy()] == i).all()
        node, tokens = items_of(host, facts, i)
        guess, even = items_of(device, facts, i)
        assert sorted(guess.tolist()) == sorted(node.tolist())
        both = [np.bincount(n, t, len(facts.tokens)).tolist() for n, t in ((node, tokens), (guess, even))]
        assert both[0] == both[1]  # keys of each node
        assert (even > 0).all()


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ([], ""),
        ([3], "3"),
        ([0, 1, 2, 7, 9, 10], "0-2, 7, 9-10"),
        ([0, 2, 4, 6, 8], "0, 2, 4, 6, 8"),
        ([0, 2, 4, 6, 8, 10], "0, 2, 4, 6, 8, ..."),
    ],
)
def test_abbreviated_lists(numbers, text):
    assert abbreviate(numbers) == text


def test_long_plans_stay_short():
    tables, lens = pages([(2 + i, 1 + i % 2) for i in range(12)])
    text = cf.plan(PrefixTree.from_block_tables(tables, lens, PAGE), **MODEL, share="always").explain(H200)
    shown = table(text, "node")
    assert len(shown) == MOST and "Shared    12 nodes" in text
    assert {int(row[2]) for row in shown} == {*range(7, 14), 5}  # those whose sharing saves most; 5 and 6 save 128 and 80
    assert "and 4 more of 2 to 6 requests and 16 to 32 tokens" in text

    levels = [Level([0, 2], [16]) for _ in range(11)] + [Level([0, 1, 2], [16, 16])]
    text = cf.plan(PrefixTree.from_levels(levels), **MODEL).explain(H200)
    assert "Launches  12," in text and "and 4 more\n" in text
    assert len(text.splitlines()) <= 40 and max(map(len, text.splitlines())) <= 140


def test_importing_them_loads_neither_matplotlib_nor_triton():
    code = "import sys, cascade_fd.planning.explain, cascade_fd.planning.draw, cascade_fd.planning.from_file\n"
    code += "print([m for m in ('matplotlib', 'rich', 'triton') if m in sys.modules])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
