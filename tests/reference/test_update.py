"""Plans that change in place: lengths that grow, room to spare, and plans of other batches copied into a captured one."""

import math
import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import cascade_fd as cf
from cascade_fd import Hardware, Level, PageTable, PrefixTree
from cascade_fd.hardware import H200
from cascade_fd.testing import inputs
from tests.contract.steps import PAGE, REQUESTS, Server, batch
from tests.contract.target import Target

TARGET = Target("reference", "cpu", torch.float32)
MODEL = TARGET.model(num_q_heads=8)
SHAPE = {"num_q_heads": 8, "num_kv_heads": 2, "head_dim": 32, "dtype": torch.float32, "device": "cpu"}
B = REQUESTS


def dense(*levels, **options):
    """A plan over rows of their own."""
    return cf.plan(PrefixTree.from_levels(levels), **SHAPE | options)


def arrays(plan):
    """Every tensor of a plan by name."""
    found = {f"items {i}": launch.items for i, launch in enumerate(plan.launches)}
    return found | {
        "indptr": plan.merge.indptr, "merged": plan.merge.rows, "rows": plan.rows, "lens": plan.lens, "floors": plan.floors,
    }  # fmt: skip


def snapshot(plan):
    """What must not change when an update is refused: contents, and everything else by identity."""
    return {name: array.clone() for name, array in arrays(plan).items()}, dict(vars(plan))


def assert_untouched(plan, before):
    contents, attributes = before
    assert arrays(plan).keys() == contents.keys()
    for name, array in arrays(plan).items():
        assert torch.equal(array, contents[name]), name
    assert vars(plan).keys() == attributes.keys()
    for name, value in vars(plan).items():
        assert value is attributes[name] or value == attributes[name], name


def test_lengths_grow_on_the_device_and_finished_requests_do_not():
    server = Server(TARGET)
    rows, lens = batch([(3, 2), (2, 0)], own=[5, 9, 1])
    plan = server.plan(rows, lens, max_new_tokens=10, split=2)
    live = np.array([*lens, 0])
    server.check(server.attend(plan), live.tolist())
    memory = plan.lens.data_ptr()
    for step in (1, 3, 0):
        plan.advance(step)
        live[:5] += step
        assert plan.lens[:B].tolist() == live.tolist()  # the sixth is a padded request
        server.check(server.attend(plan), live.tolist())
    live[[1, 3]] = 0
    plan.set_lengths(torch.from_numpy(live))
    for _ in range(2):
        plan.advance()
        live += live > 0
        assert plan.lens[:B].tolist() == live.tolist()
        server.check(server.attend(plan), live.tolist())
    live[0] = lens[0]  # shorter again: the count of steps stays
    plan.set_lengths(torch.from_numpy(live))
    plan.advance(4)
    assert plan.lens[:B].tolist() == (live + 4 * (live > 0)).tolist()
    assert (plan.grown, plan.lens.data_ptr()) == (10, memory)
    with pytest.raises(ValueError, match="at most 0 more tokens in a plan for max_new_tokens=10, of which 10 are used; got 1"):
        plan.advance()


@pytest.mark.parametrize("share", ["always", "never"])
def test_a_request_is_finished_below_its_private_tokens_whatever_is_folded(share):
    """Of 8 shared tokens: length 7 finishes a request, 8 is one without tokens of its own."""
    server = Server(TARGET)
    rows, lens = batch([(3, 2)], own=[5])
    plan = server.plan(rows, lens, max_new_tokens=10, share=share)
    assert plan.choice.folded.any() == (share == "never")
    assert plan.rows[:3, 3].tolist() == plan.floors[:3].tolist() == [8, 8, 8]
    plan.set_lengths(torch.tensor([7, 8, 13, 0, 0, 0]))
    server.check(server.attend(plan), [0, 8, 13, 0, 0, 0])
    plan.advance(2)
    assert plan.lens[:B].tolist() == [7, 10, 15, 0, 0, 0]
    server.check(server.attend(plan), [0, 10, 15, 0, 0, 0])


def test_floors():
    """A table of one row per request: where the private tokens start. Rows of their own: 0, or 1 where nothing is shared."""
    own_rows = [Level([0, 2, 3], [8, 0]), Level(range(4), [5, 0, 0])]
    plan = dense(*own_rows, max_new_tokens=2)
    assert plan.floors.tolist() == [0, 0, 1]
    plan.set_lengths(torch.tensor([-1, 0, 0]))
    plan.advance()
    assert plan.lens[:3].tolist() == [-1, 1, 0]  # no token yet, but eight shared ones: it grows
    whole = dense(Level(range(4), [5, 0, 1]), max_new_tokens=2)
    assert whole.floors.tolist() == [1, 1, 1]
    whole.advance(2)
    assert whole.lens.tolist() == [7, 0, 3]
    server = Server(TARGET)
    mixed = batch([(1, 3), (2, 5), (2, 1)], own=[2])
    order = [3, 1, 0, 4, 2]
    plan = server.plan([mixed[0][b] for b in order], [mixed[1][b] for b in order])
    assert plan.tree.order is not None
    assert plan.floors.tolist() == [4, 20, 1, 4, 20, 1]  # in request order


def test_nothing_grows_without_private_nodes_or_beyond_the_capacity():
    plan = dense(Level([0, 2], [5]))
    with pytest.raises(ValueError, match="num_tokens: expected a plan with private nodes, which can grow, got one without"):
        plan.advance()
    plan = dense(Level([0, 1, 2], [5, 4]), max_new_tokens=3)
    plan.advance(2)
    before = snapshot(plan)
    with pytest.raises(ValueError, match=r"num_tokens: expected at most 1 more .* max_new_tokens=3, of which 2 .* got 2"):
        plan.advance(2)
    for wrong in (-1, 1.0, True):
        with pytest.raises(ValueError, match=r"num_tokens: expected an integer of at least 0, got"):
            plan.advance(wrong)
    assert_untouched(plan, before)


@pytest.mark.parametrize("factor", [1, 1.0, 1.5, 3.0])
@pytest.mark.parametrize("split", ["balanced", "stream_k", 1, 3])
def test_room_changes_nothing_but_sizes(factor, split):
    server = Server(TARGET)
    rows, lens = batch([(4, 6), (1, 0)], own=[5, 30, 1])
    plan = server.plan(rows, lens, split=split, hardware=Hardware("five", "cpu", 5, 1 << 20, 2e10), share="always")
    roomy = plan.with_room(factor)
    for old, new in zip(plan.launches, roomy.launches, strict=True):
        assert len(new.items) == math.ceil(factor * len(old.items))
        assert new.count == old.count == len(old.items)
    assert (len(roomy.merge), len(roomy.lens)) == (B, math.ceil(factor * len(plan.lens)))
    assert roomy.num_slots == max(B, math.ceil(factor * plan.num_slots))
    assert roomy.slots_used == plan.slots_used == plan.num_slots
    assert roomy.num_items == plan.num_items
    mine, theirs = ({x.untyped_storage().data_ptr() for x in arrays(p).values()} for p in (plan, roomy))
    assert not mine & theirs  # memory of its own
    assert roomy.explain() == plan.explain()
    got, want = server.attend(roomy), server.attend(plan)
    assert torch.equal(got.o, want.o) and torch.equal(got.lse, want.lse)
    again = roomy.with_room(1.0)
    assert {n: x.shape for n, x in arrays(again).items()} == {n: x.shape for n, x in arrays(roomy).items()}


@pytest.mark.parametrize("factor", [0.99, 0, -1, math.inf, math.nan, "2", None])
def test_room_of_less_than_the_plan_is_refused(factor):
    plan = Server(TARGET).plan(*batch([(2, 1)], own=[5]))
    with pytest.raises(ValueError, match="factor: expected a number of at least 1, got"):
        plan.with_room(factor)


SMALL = Hardware("five", "cpu", 5, 1 << 20, 2e10)
BATCHES = {
    "shared by many": batch([(6, 8)], own=[5, 30, 1]),
    "two groups": batch([(2, 3), (4, 6)], own=[9, 3]),
    "nothing shared": batch([(1, 0)] * 6, own=[40, 2, 17]),
    "few requests": batch([(3, 5)], own=[8]),
    "one long request": batch([(1, 12)], own=[30]),
    "nobody": batch([], own=[1]),
}


def roomiest(server, factor=3.0, **options):
    """A plan with a launch of every tile and, by default, room for any of the batches."""
    return server.plan(*BATCHES["shared by many"], share="always", **options).with_room(factor)


def fits(plan, new):
    """Whether there is room for ``new``, which has no other tiles."""
    room = {launch.tile: len(launch.items) for launch in plan.launches}
    slots, lens = new.slots_used <= plan.num_slots, len(new.lens) <= len(plan.lens)
    return slots and lens and all(len(launch.items) <= room[launch.tile] for launch in new.launches)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.sampled_from(list(BATCHES)), min_size=1, max_size=3),
    st.sampled_from([1.0, 1.3, 3.0]),
    st.sampled_from(["balanced", "wave", "stream_k", "fixed", 3]),
    st.sampled_from(["auto", "always", "never"]),
    st.integers(0, 5),
)
def test_an_updated_plan_is_the_other_plan(names, factor, split, share, steps):
    """Or it is refused for want of room, which 3.0 times as much never is."""
    server = Server(TARGET)
    options = {"split": split, "max_new_tokens": 8, "hardware": SMALL}
    plan = roomiest(server, factor, **options)
    assert len(plan.launches) == 2
    memory = {name: array.data_ptr() for name, array in arrays(plan).items()}
    for name in names:
        rows, lens = BATCHES[name]
        new = server.plan(rows, lens, share=share, **options)
        new.advance(steps)
        if not fits(plan, new):
            assert factor < 3
            before = snapshot(plan)
            with pytest.raises(ValueError, match=r"makes room"):
                plan.update_(new)
            assert_untouched(plan, before)
            continue
        plan.update_(new)
        live = [n + steps for n in lens] + [0] * (B - len(lens))
        assert {name: array.data_ptr() for name, array in arrays(plan).items()} == memory
        got, want = server.attend(plan), server.attend(new)
        assert torch.equal(got.o, want.o) and torch.equal(got.lse, want.lse)
        server.check(server.attend(plan), live)
        assert (plan.num_items, plan.slots_used, plan.grown) == (new.num_items, new.slots_used, steps)
        assert (plan.merge.indptr.diff() >= 0).all() and plan.merge.indptr[-1] == plan.slots_used
        for some in (plan, new):
            some.advance(8 - steps)
        assert torch.equal(plan.lens[:B], new.lens[:B])
        server.check(server.attend(plan), [n + 8 - steps if n else 0 for n in live])
        with pytest.raises(ValueError, match="of which 8 are used"):
            plan.advance()


@pytest.mark.parametrize("name", BATCHES)
def test_an_updated_plan_explains_the_new_batch(name, tmp_path):
    server = Server(TARGET)
    plan, new = roomiest(server), server.plan(*BATCHES[name], share="always", max_new_tokens=3)
    plan.update_(new)
    mine, other = (p.explain().splitlines() for p in (plan, new))
    idle = len(plan.launches) - len(new.launches)
    kept = [line for line in mine if not re.match(r" {10,}\d+ +0 +none +0 ", line)]
    assert len(mine) - len(kept) == idle
    if not idle:
        assert mine == other
    same = re.compile(r"(Launches|Predicted| +launch| +\d+  )")  # numbers of launches, widths of columns
    assert [line for line in kept if not same.match(line)] == [line for line in other if not same.match(line)]
    assert plan.tree is new.tree and plan.choice is new.choice and plan.cuts is new.cuts and plan.nodes is new.nodes
    assert [x.count for x in plan.launches if x.count] == [x.count for x in new.launches]
    pytest.importorskip("matplotlib")
    plan.draw(tmp_path / "plan.svg")
    new.draw(tmp_path / "new.svg")


def test_a_launch_that_is_not_used_asks_nothing_of_the_store():
    """A dense store of a level that the new batch has no tokens in may be shorter than the captured batch's."""
    levels = [Level([0, 5], [40]), Level(range(6), [3] * 5)]
    plan = dense(*levels).with_room()
    q = inputs.queries(MODEL, 5)
    stores = [cf.DenseKV(*torch.randn(2, 1, 40, 2, 32)), cf.DenseKV(*torch.randn(2, 5, 3, 2, 32))]
    cf.attend(q, stores, plan)
    plan.update_(dense(Level([0, 5], [0]), levels[1]))
    short = cf.DenseKV(*torch.randn(2, 1, 1, 2, 32))
    state = cf.attend(q, [short, stores[1]], plan)
    want = cf.decode(q, stores[1])
    torch.testing.assert_close(state.o, want.o, rtol=1e-5, atol=1e-6)


def no_room(**options):
    return lambda server: server.plan(*BATCHES["nothing shared"], **options)


OWN = Level(range(7), [1] * 6)
REFUSED = {
    "no plan": (
        lambda server: roomiest(server),
        lambda server: "plan",
        TypeError,
        "other: expected a Plan or a PrefixTree, got str",
    ),
    "shape": (
        roomiest,
        lambda server: server.plan(*BATCHES["nobody"], num_q_heads=2),
        ValueError,
        r"other: expected a plan of the same shape \(Shape\(num_q_heads=8, .*got Shape\(num_q_heads=2",
    ),
    "device": (
        roomiest,
        lambda server: server.plan(*BATCHES["nobody"], device="meta"),
        ValueError,
        r"other: expected a plan of the same device \(cpu\), got meta",
    ),
    "overlap": (
        roomiest,
        lambda server: server.plan(*BATCHES["nobody"], hardware=H200),
        ValueError,
        r"other: expected a plan of the same chained \(False\), got True",
    ),
    "rows": (
        lambda server: dense(OWN).with_room(),
        lambda server: dense(Level(range(6), [1] * 5)),
        ValueError,
        r"same num_rows \(6\), got 5; fill a smaller batch up with requests of length 0",
    ),
    "private nodes": (
        lambda server: dense(OWN).with_room(),
        lambda server: dense(Level([0, 6], [5])),
        ValueError,
        r"same num_private \(6\), got 0",
    ),
    "workspace": (
        lambda server: no_room(split=1)(server).with_room(1.0),
        no_room(split=5),
        ValueError,
        r"other: expected at most 6 workspace slots, got \d+; with_room\(\) makes room",
    ),
    "merged rows": (
        lambda server: dense(OWN),
        lambda server: dense(Level(range(7), [1] * 5 + [0])),
        ValueError,
        r"other: expected at most 0 merged rows, got 1; with_room\(\) makes room",
    ),
    "lengths": (
        lambda server: no_room(split=5)(server).with_room(1.0),
        lambda server: server.plan(*BATCHES["two groups"], split=1, share="always"),
        ValueError,
        r"other: expected at most 6 lengths, got 8; with_room\(\) makes room",
    ),
    "tile": (
        lambda server: no_room(split=5)(server).with_room(2.0),
        lambda server: server.plan(*BATCHES["shared by many"], share="always"),
        ValueError,
        r"expected launches that the plan has too, got one of 64-row tiles \(levels \[0\]\) whose tile, page table or store",
    ),
    "page table": (
        roomiest,
        lambda server: Server(TARGET).plan(*BATCHES["shared by many"]),
        ValueError,
        "whose tile, page table or store it has not; page ids must be in the same memory",
    ),
    "page size": (
        lambda server: dense(Level(range(7), [1] * 6, PageTable.from_block_table(server.table, 4))).with_room(),
        lambda server: dense(Level(range(7), [1] * 6, PageTable.from_block_table(server.table, 2))),
        ValueError,
        "whose tile, page table or store it has not",
    ),
    "level": (
        lambda server: dense(Level([0, 6], [0]), OWN).with_room(),
        lambda server: dense(Level([0, 6], [1]), Level(range(7), [0] * 6)),
        ValueError,
        r"got one of 64-row tiles \(levels \[0\]\) whose tile, page table or store it has not",
    ),
    "items": (
        lambda server: server.plan(*batch([(1, 0)] * 6, own=[1])).with_room(1.0),
        lambda server: server.plan(*batch([(1, 0)] * 6, own=[64, 1, 1, 1, 1, 1]), split=2),
        ValueError,
        r"other: expected at most 6 items of 16 rows, got 7; with_room\(\) makes room",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused_and_leaves_the_plan_as_it_was(name):
    before, after, error, text = REFUSED[name]
    server = Server(TARGET)
    plan = before(server)
    kept = snapshot(plan)
    with pytest.raises(error, match=text):
        plan.update_(after(server))
    assert_untouched(plan, kept)


def test_only_the_size_of_a_batch_is_filled_up():
    """Advice that does not help is not given."""
    server = Server(TARGET)
    with pytest.raises(ValueError) as error:
        roomiest(server).update_(server.plan(*BATCHES["nobody"], device="meta"))
    assert "fill" not in str(error.value)


def two_tables(shared, own, table):
    """Four requests and two levels that read one page table, each by rows of its own; 0 tokens of a level make no launch."""
    rows = [PageTable.from_block_table(table, PAGE, rows=some) for some in ([0], range(1, 5))]
    return dense(Level([0, 4], [shared], rows[0]), Level(range(5), [own] * 4, rows[1]))


def test_a_launch_takes_the_place_of_one_that_reads_the_same_store():
    """``attend`` may be given a store per level, so the page table alone does not say which."""
    table = torch.arange(5 * 4, dtype=torch.int32).view(5, 4)
    plan = two_tables(9, 5, table).with_room()
    assert [x.tile for x in plan.launches] == [plan.launches[0].tile] * 2  # tiles do not tell them apart
    stores = [cf.PagedKV(*torch.randn(2, 20, PAGE, 2, 32)) for _ in range(2)]
    q = inputs.queries(MODEL, 4)
    for shared, own in ((0, 5), (9, 0), (9, 5)):
        new = two_tables(shared, own, table)
        plan.update_(new)
        assert [x.levels for x in plan.launches if x.count] == [x.levels for x in new.launches]
        assert [x.levels for x in plan.launches] == [(0,), (1,)]
        assert torch.equal(cf.attend(q, stores, plan).o, cf.attend(q, stores, new).o)
    with pytest.raises(ValueError, match=r"got one of 16-row tiles .* whose tile, page table or store it has not"):
        two_tables(9, 0, table).with_room(9.0).update_(two_tables(0, 5, table))


def test_an_idle_launch_needs_its_level():
    """It is launched all the same, so the stores that ``attend`` is given must still have its own."""
    table = torch.arange(5 * 4, dtype=torch.int32).view(5, 4)
    one = PageTable.from_block_table(table[1:], PAGE)
    plan = two_tables(9, 5, table).with_room(3.0)
    kept = snapshot(plan)
    for levels in ([Level([0, 4], [0]), Level(range(5), [0] * 4)], [Level(range(5), [0] * 4, one)]):
        with pytest.raises(ValueError, match=r"other: expected pages of 4 \(0: a dense store\) at level . too, which the plan"):
            plan.update_(dense(*levels))
        assert_untouched(plan, kept)


def test_a_plan_may_be_updated_from_itself_and_from_one_with_room():
    server = Server(TARGET)
    plan, other = roomiest(server), server.plan(*BATCHES["two groups"], share="always")
    want = server.attend(other)
    plan.update_(other.with_room(1.5))
    assert torch.equal(server.attend(plan).o, want.o)
    plan.update_(plan)
    assert torch.equal(server.attend(plan).o, want.o)
    assert plan.slots_used == other.slots_used
