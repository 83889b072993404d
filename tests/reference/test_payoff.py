"""Which shared nodes are computed once and which are folded: clear cases either way, and what may not decide."""

from dataclasses import replace

import numpy as np
import pytest

import cascade_fd as cf
from cascade_fd import Hardware, Level, PageTable, PrefixTree
from cascade_fd.costs import Costs, TileCost
from cascade_fd.hardware import A100, CPU, H200
from cascade_fd.planning.cost import ALONE, BESIDE_OVERLAP, BOUND_OVERLAP, IDLE, MEMORY, NARROW_OVERLAP, Load, hidden, predict

SHAPE = {"num_q_heads": 32, "num_kv_heads": 8, "head_dim": 128, "device": "cpu", "hardware": H200}
TILES = tuple(TileCost(rows, 4, 0.001, 0.0, 1.0, 1.0) for rows in (16, 32, 64, 128))
DEAR = replace(H200, costs=Costs(1.0, 1e4, 1e4, 1e4, TILES))  # any plan that merges is dear
FREE = replace(H200, costs=Costs(1.0, 0.0, 0.0, 0.0, TILES))  # only what is read counts


def tree_of(*levels, q_lens=1, page=16):
    """Levels of (nodes, tokens each), root first, over one table of a row per request."""
    B = levels[-1][0]
    ids = np.zeros((B, -(-sum(n for _, n in levels) // page) + 2), np.int32)
    parts = [Level(np.arange(n + 1) * (B // n), np.full(n, tokens)) for n, tokens in levels]
    return PrefixTree.from_levels(parts, q_lens=q_lens, table=PageTable.from_block_table(ids, page))


def folded(plan):
    """Per level, whether its shared nodes are folded; they must be all alike."""
    tree, found = plan.tree, []
    for level in range(len(tree.tables) - 1):
        mine = plan.choice.folded[: tree.num_shared][tree.nodes.level[: tree.num_shared] == level]
        assert mine.all() or not mine.any()
        found.append(bool(mine[0]))
    return found


@pytest.mark.parametrize(
    ("levels", "want"),
    [
        (((1, 16), (64, 256)), [True]),  # a page for 64: not worth a launch and a merge
        (((1, 64), (64, 256)), [True]),
        (((1, 16), (256, 64)), [True]),
        (((1, 4096), (64, 256)), [False]),
        (((1, 1024), (256, 64)), [False]),
        (((1, 8192), (2, 256)), [False]),
        (((1, 8192), (128, 16), (256, 64)), [False, True]),  # pairs below a long root
        (((1, 16), (4, 8192), (256, 64)), [True, False]),  # groups below a short one
    ],
)
def test_short_prefixes_are_folded_and_long_ones_shared(levels, want):
    plan = cf.plan(tree_of(*levels), **SHAPE)
    assert folded(plan) == want
    compared = dict(plan.choice.compared)
    best = min(compared, key=compared.__getitem__)
    assert best == {(True,): "nothing shared", (False,): "everything shared"}.get(tuple(want), "node by node")
    if all(want):
        assert (len(plan.launches), plan.num_items) == (1, len(plan.tree.q_lens))
    text = plan.explain()
    assert ("Folded" in text, "Shared    nothing" in text) == (any(want), all(want))


def test_a_folded_node_is_empty_and_its_children_start_where_it_did():
    tree = tree_of((1, 16), (4, 8192), (256, 64))
    plan = cf.plan(tree, **SHAPE, max_new_tokens=10)
    nodes = plan.nodes
    assert (nodes.start[0], nodes.stop[0], plan.splits[0], plan.launch_of[0]) == (0, 0, 0, -1)
    assert (nodes.start[1:5] == 0).all() and (nodes.stop[1:5] == 16 + 8192).all()
    assert (nodes.start[5:] == 8208).all()
    assert plan.tree is tree and tree.nodes.stop[0] == 16  # what the caller gave stays
    for name in ("parent", "first", "last", "level", "row", "room"):
        assert getattr(nodes, name) is getattr(tree.nodes, name)
    assert (plan.rows[:, 3] == 8208).all() and (plan.floors == 8208).all()
    chain = cf.plan(tree, **SHAPE, share="never")
    assert (chain.nodes.start[5:] == 0).all() and (chain.nodes.stop[5:] == 8272).all()
    assert (chain.rows[:, 3] == 8208).all()  # a length below it still says finished


def test_explain_says_why_and_what_was_weighed():
    plan = cf.plan(tree_of((1, 8192), (128, 16), (256, 64)), **SHAPE)
    text, choice = plan.explain(), plan.choice
    for node in (0, 1):
        assert f"once {choice.once[node]:.3g} us, with each child {choice.each[node]:.3g} us" in text
    assert choice.once[0] < choice.each[0] and choice.once[1] > choice.each[1]
    weighed = ", ".join(f"{name} {us:.3g} us" for name, us in choice.compared)
    assert f"          {weighed}, before splitting" in text
    assert [name for name, _ in choice.compared] == ["everything shared", "nothing shared", "node by node"]
    assert "Shared    1 node; each is read once for all its requests" in text
    assert "Folded    128 nodes; each is read with each of its children" in text
    assert "and 120 more of 2 requests and 16 tokens" in text
    assert f"constants: {H200.costs.source}" in text


@pytest.mark.parametrize(("share", "why"), [("always", 'share="always"'), ("never", 'share="never"')])
def test_what_the_caller_decides_is_not_weighed(share, why):
    for levels in (((1, 16), (64, 256)), ((1, 8192), (64, 256))):
        plan = cf.plan(tree_of(*levels), **SHAPE, share=share)
        assert folded(plan) == [share == "never"]
        assert (plan.choice.rule, plan.choice.once, plan.choice.compared) == (why, None, ())
        assert why in plan.explain() and "before splitting" not in plan.explain()


def own_rows():
    """A root whose tokens are in a table of its own, over private rows."""
    ids = np.arange(100, dtype=np.int32).reshape(5, 20)
    return [
        Level([0, 4], [16], PageTable.from_block_table(ids[:1], 16)),
        Level(range(5), [100] * 4, PageTable.from_block_table(ids[1:], 16)),
    ]


def beside_a_table():
    """The root is in a store of its own, branches and leaves in one table of a row per request, after the root's tokens."""
    table = PageTable.from_block_table(np.zeros((4, 20), np.int32), 16)
    return PrefixTree.from_levels(
        [Level([0, 4], [16], own_rows()[0].table), Level([0, 2, 4], [16] * 2), Level(range(5), [99] * 4)], table=table
    )


def one_table_for_two_levels():
    """Level 1 reads the rows that level 0 reads, again from their first token."""
    table = PageTable.from_block_table(np.arange(4, dtype=np.int32).reshape(2, 2), 16)
    return [Level([0, 2, 4], [16, 16], table), Level([0, 2, 4], [7, 7], table), Level(range(5), [5] * 4)]


STUCK = {
    "a table per level": PrefixTree.from_levels(own_rows()),
    "dense stores": PrefixTree.from_levels([Level([0, 4], [16]), Level(range(5), [100] * 4)]),
    "rows that do not adjoin": PrefixTree.from_levels(one_table_for_two_levels()),
    "leaves": PrefixTree.from_levels([Level([0, 4], [16])], table=PageTable.from_block_table(np.zeros((4, 9), np.int32), 16)),
}


@pytest.mark.parametrize("name", STUCK)
def test_tokens_that_lie_elsewhere_are_not_folded(name):
    plan = cf.plan(STUCK[name], **SHAPE | {"hardware": DEAR})
    assert not plan.choice.folded.any()
    assert plan.choice.stuck.all()
    assert "its tokens lie apart from its readers'" in plan.explain()
    with pytest.raises(ValueError, match="share: expected a tree whose shared tokens are also in the table rows of those who"):
        cf.plan(STUCK[name], **SHAPE, share="never")


def test_a_tree_of_which_a_part_can_be_folded():
    tree = beside_a_table()
    plan = cf.plan(tree, **SHAPE | {"hardware": DEAR})
    assert plan.choice.stuck.tolist() == [True, False, False]
    assert folded(plan) == [False, True]
    assert (plan.nodes.start[3:] == 16).all()  # where the branches started: the root's tokens are before them
    with pytest.raises(ValueError, match="share: expected a tree whose"):
        cf.plan(tree, **SHAPE, share="never")


@pytest.mark.parametrize(
    "levels", [[Level([0, 2], [0]), Level([0, 1, 2], [5, 9])], [Level([0, 1, 2], [5, 9])], [Level([0], [])]]
)
def test_never_is_fine_where_nothing_is_shared(levels):
    plan = cf.plan(PrefixTree.from_levels(levels), **SHAPE, share="never")
    assert plan.num_items == cf.plan(PrefixTree.from_levels(levels), **SHAPE, share="always").num_items


def test_what_nobody_reads_does_not_count():
    """A root of requests without query rows is stuck, but has nothing to compute."""
    tree = PrefixTree.from_levels([Level([0, 2], [16]), Level([0, 1, 2], [5, 9])], q_lens=0)
    assert cf.plan(tree, **SHAPE, share="never").num_items == 0
    assert cf.plan(tree, **SHAPE).num_items == 0


def test_batch_invariant_plans_fold_nothing():
    """Whether a neighbour shares the prefix must not decide how mine is computed."""
    for levels in (((1, 16), (64, 256)), ((1, 16), (2, 256))):
        plan = cf.plan(tree_of(*levels), **SHAPE | {"hardware": DEAR}, batch_invariant=True)
        assert not plan.choice.folded.any()
        assert "batch_invariant: only what was declared decides" in plan.explain()
    with pytest.raises(ValueError, match=r"share: expected 'always' .* with batch_invariant, got 'never'"):
        cf.plan(tree_of((1, 16), (2, 256)), **SHAPE, batch_invariant=True, share="never")
    assert not cf.plan(tree_of((1, 16), (2, 256)), **SHAPE, batch_invariant=True, share="always").choice.folded.any()


@pytest.mark.parametrize("hw", [H200, DEAR, FREE, A100], ids=["h200", "dear", "free", "a100"])
def test_decisions_do_not_depend_on_the_order_of_requests(hw):
    rng = np.random.default_rng(0)
    fresh = iter(range(10**6))
    rows = []
    for requests, pages in ((40, 1), (3, 300), (9, 2), (1, 70), (12, 40)):
        shared = [next(fresh) for _ in range(pages)]
        rows += [shared[: max(1, pages - i % 2)] + [next(fresh) for _ in range(rng.integers(1, 20))] for i in range(requests)]
    names, found = np.arange(len(rows)), []
    for _ in range(4):
        mine = [rows[b] for b in names]
        table = np.array([row + [0] * (max(map(len, rows)) - len(row)) for row in mine], np.int32)
        plan = cf.plan(PrefixTree.from_block_tables(table, [16 * len(row) - 5 for row in mine], 16), **SHAPE | {"hardware": hw})
        found.append((decisions(plan, names), [us for _, us in plan.choice.compared]))
        names = rng.permutation(names)
    for groups, compared in found[1:]:
        assert groups == found[0][0]
        np.testing.assert_allclose(compared, found[0][1])
    assert len(found[0][0]) > 5
    assert set(found[0][0].values()) == {DEAR: {True}, FREE: {False}}.get(hw, set(found[0][0].values()))


def decisions(plan, names):
    """Sets of requests with the tokens that they share, and whether these are folded."""
    tree = plan.tree
    order = np.arange(tree.num_requests) if tree.order is None else tree.order
    found = {}
    for i in range(tree.num_shared):
        who = names[order[tree.nodes.first[i] : tree.nodes.last[i]]].tolist()
        found[frozenset(who), int(tree.nodes.stop[i] - tree.nodes.start[i])] = bool(plan.choice.folded[i])
    return found


def test_costs_decide():
    """One tree, three devices."""
    tree = tree_of((1, 128), (64, 256))
    assert folded(cf.plan(tree, **SHAPE | {"hardware": DEAR})) == [True]
    assert folded(cf.plan(tree, **SHAPE | {"hardware": FREE})) == [False]
    assert folded(cf.plan(tree, **SHAPE | {"hardware": CPU})) == [False]  # whatever is shared pays there


def made_up(overlap=True, **costs):
    base = {"launch": 1.0, "follow": 10.0, "merge": 3.0, "state": 2.0, "tiles": (TileCost(16, 2, 1.0, 4.0, 0.5, 2.0),)}
    return Hardware("made up", "sm_90" if overlap else "sm_80", 10, 1 << 16, 1e12, costs=Costs(**base | costs))


def test_predictions_by_hand():
    """20 programs, of 30 blocks read once and 10 that 3 programs read; 4 MB of states."""
    load = Load(16, 2, 20, [(30, 1), (10, 3)], 5, 1.0)
    busy = (30 * 2.0 + 10 * (2.0 + 2 * 0.5) + 20 * 4.0) / 10
    assert load.busy(made_up().costs, 10) == pytest.approx(busy)
    assert load.chain(made_up().costs) == 5.0
    one = predict([load], 4e6, made_up())
    assert one.us == pytest.approx(1 + 3 + 2 * 4 + busy * (1 + (5 / busy) ** 6) ** (1 / 6))
    assert one.bound == "reading and multiplying"
    assert predict([load], 0, made_up()).us == pytest.approx(one.us - 3 - 8)  # nothing is merged
    two = predict([load, load], 0, made_up())
    alone = one.us - 1 - 3 - 8
    assert two.us == pytest.approx(1 + 10 + 1.5 * alone)  # half of the shorter is hidden
    waves = replace(load, programs=30)  # on 20 slots: the next launch enters when the second wave has begun
    longer = predict([waves], 0, made_up()).us - 1
    assert predict([waves, load], 0, made_up()).us == pytest.approx(1 + 10 + longer + 0.75 * alone)
    bound = made_up(tiles=(TileCost(16, 2, 1.0, 0.0, 1.9, 2.0),))
    apart = 2 * (predict([load], 0, bound).us - 1)
    assert predict([load, load], 0, bound).us == pytest.approx(1 + 10 + max(0.75 * apart, MEMORY * 2 * 40 * 2.0 / 10))
    whole = replace(load, whole=True, longest=50)
    assert whole.chain(made_up().costs) == 50.0 + ALONE * 4.0
    by_itself = predict([whole], 0, made_up()).us - 1
    assert predict([whole, load], 0, made_up()).us == pytest.approx(1 + 10 + by_itself + alone)  # hides nothing
    few = replace(load, whole=True, programs=4, reads=[(10, 10)])  # of 10 SMs: others have the rest
    by_itself = predict([few], 0, made_up()).us - 1
    assert predict([few, load], 0, made_up()).us == pytest.approx(1 + 10 + alone + by_itself * (1 - IDLE * 0.6))
    long = replace(few, longest=100)
    by_itself = predict([long], 0, made_up()).us - 1
    assert predict([long, load], 0, made_up()).us == pytest.approx(1 + 10 + by_itself)  # hides all of the other
    reading = replace(few, reads=[(100, 1)])
    assert predict([reading, load], 0, made_up()).us == pytest.approx(1 + 10 + MEMORY * 140 * 2.0 / 10)
    sequence = predict([load, load], 0, made_up(overlap=False))
    assert sequence.us == pytest.approx(2 * predict([load], 0, made_up(overlap=False)).us)
    assert predict([replace(load, longest=200)], 0, made_up()).bound == "the longest item"
    assert predict([load], 0, made_up(launch=90.0)).bound == "launches"
    assert predict([], 0, made_up()).us == 3.0
    half = replace(load, size=0.5)
    assert half.busy(made_up().costs, 10) == pytest.approx((busy * 10 - 80) / 2 / 10 + 8)
    other = made_up(tiles=(TileCost(16, 2, 1.0, 0.0, 0.0, 1.0),))
    assert predict([load], 0, made_up(), other.costs).us == predict([load], 0, other).us


def test_what_runs_beside_the_wide_tile_by_hand():
    """Reading is cheap here; then the wide launch hides a share of the shorter one, by which tile runs beside it."""
    tiles = (
        TileCost(16, 2, 1.0, 4.0, 0.5, 0.5),
        TileCost(128, 1, 1.0, 4.0, 0.5, 0.5, "beside"),
        TileCost(8, 4, 1.0, 4.0, 0.5, 0.5, "narrow"),
    )
    hw = made_up(follow=0.0, launch=0.0, tiles=tiles)
    wide = Load(128, 1, 10, [(200, 1)], 20, 1.0, "beside")
    small, narrow = Load(16, 2, 20, [(40, 1)], 1), Load(8, 4, 20, [(40, 1)], 1, 1.0, "narrow")

    def alone(load):
        return predict([load], 0, hw).us

    for load, share in ((small, BESIDE_OVERLAP), (narrow, BOUND_OVERLAP)):
        assert alone(load) < alone(wide)
        assert predict([wide, load], 0, hw).us == pytest.approx(alone(wide) + (1 - share) * alone(load))
    small_heads = replace(wide, dim=64)
    assert predict([small_heads, narrow], 0, hw).us == pytest.approx(alone(wide) + (1 - NARROW_OVERLAP) * alone(narrow))
    many = replace(narrow, programs=200)
    assert predict([wide, many], 0, hw).us == pytest.approx((1 - NARROW_OVERLAP) * alone(wide) + alone(many))
    large = replace(small, rows=32)  # finds no room
    assert predict([wide, large], 0, hw).us == pytest.approx(alone(wide) + alone(large))
    cold = replace(hw, costs=replace(hw.costs, tiles=tuple(replace(t, cold=5.0) for t in tiles)))
    apart = sum(predict([load], 0, cold).us for load in (wide, narrow))
    assert predict([wide, narrow], 0, cold).us == pytest.approx(apart)  # reading hides no reading
    assert apart < MEMORY * 240 * 5.0 / 10
    assert hidden([wide, small], hw)[0] == 1


def test_items_that_others_hide_may_be_longer():
    """Beside much other work; never where launches run one after the other, or alone."""
    little, much = Load(16, 2, 4, [(4, 1)], 1), Load(16, 2, 4000, [(4000, 1)], 1)
    assert hidden([little], made_up()) == [1]
    assert hidden([little, much], made_up(overlap=False)) == [1, 1]
    first, later = hidden([little, much], made_up()), hidden([much, little], made_up())
    assert first[0] > later[1] > 1  # what starts later has less time
    assert min(hidden([little, little], made_up())) >= 1


def test_a_launch_that_leaves_room_for_others_may_take_longer():
    """10 programs of 100 blocks on 10 whole SMs (100 us) beside 200 us of others may take 300; alone, as long as a block."""
    costs = (TileCost(16, 2, 1.0, 0.0, 2.0, 2.0), TileCost(64, 1, 1.0, 0.0, 2.0, 2.0, "single"))
    hw = made_up(tiles=costs)
    whole, others = Load(16, 2, 10, [(1000, 1)], 1, whole=True), Load(16, 2, 1000, [(1000, 1)], 1)
    assert hidden([whole], hw) == [1]
    assert hidden([whole, others], hw) == [300, 1]
    single = Load(64, 1, 10, [(1000, 1)], 1, kernel="single")
    assert hidden([single, others], hw)[0] == 200  # others fit beside it, too
    assert hidden([whole, others], made_up(overlap=False)) == [1, 1]
