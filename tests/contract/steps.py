"""From step to step and from batch to batch: what pays to share, lengths that grow, one plan that takes over another's work."""

from dataclasses import replace

import pytest
import torch

import cascade_fd as cf
from cascade_fd import PageTable, PrefixTree
from cascade_fd.costs import Costs, TileCost
from cascade_fd.testing import inputs
from tests.contract.cascade import make_plan, prefix_in_one_table, three_levels_in_one_table

PAGE, WIDTH, REQUESTS = 4, 24, 6  # tokens per page, pages per request, requests
PAGES = 400
COSTS = Costs(1.0, 0.1, 0.0, 8.0, tuple(TileCost(rows, 2, 0.1, 0.1, 0.5, 1.0) for rows in (16, 32, 64)))


class Server:
    """A pool, a block table in memory that stays, and plans of whatever batch is written into it."""

    def __init__(self, target, page=PAGE, width=WIDTH):
        self.target, self.model, self.page = target, target.model(num_q_heads=8), page
        self.pool = inputs.contexts(self.model, [PAGES * page])[0]
        k, v = (x.unflatten(0, (PAGES, page)) for x in self.pool)
        k[-1] = v[-1] = torch.nan  # where the table is padded
        self.store = target.put(cf.PagedKV(k, v))
        self.table = target.put(torch.zeros(REQUESTS, width, dtype=torch.int32))
        self.q = target.queries(self.model, REQUESTS)

    def tree(self, rows, lens):
        """``rows``: pages of each request; requests that are not there are padded ones of length 0."""
        self.rows = torch.full(self.table.shape, PAGES - 1, dtype=torch.int32)
        for b, row in enumerate(rows):
            self.rows[b, : len(row)] = torch.tensor(row, dtype=torch.int32)
        self.table.copy_(self.rows)
        lens = [*lens, *[0] * (REQUESTS - len(rows))]
        table = PageTable.from_block_table(self.table, self.page)
        return PrefixTree.from_block_tables(self.rows, lens, self.page, table=table)

    def plan(self, rows, lens, **options):
        return make_plan(self.target, self.tree(rows, lens), self.model, **options)

    def append(self, lens):
        """Give every request the pages that ``lens`` need, where its table row ends: on the device, under a plan in use."""
        fresh = iter(sorted(set(range(PAGES - 1)) - set(self.rows.flatten().tolist()), reverse=True))
        for b, n in enumerate(lens):
            for at in range(-(-n // self.page)):
                if self.rows[b, at] == PAGES - 1:
                    self.rows[b, at] = next(fresh)
                    self.table[b, at] = self.rows[b, at].item()

    def attend(self, plan):
        return cf.attend(self.q, self.store, plan, backend=self.target.backend)

    def check(self, state, lens):
        """``state`` is attention at ``lens``; what is below 1 is a request that is finished or was never there."""
        slots = self.rows.long()[:, :, None] * self.page + torch.arange(self.page)
        contexts = [tuple(x[s.flatten()[: max(n, 0)]] for x in self.pool) for s, n in zip(slots, lens, strict=True)]
        self.target.check(state, self.q, contexts)


def batch(shared, own, room=3, page=PAGE):
    """Pages and lengths: groups of (requests, shared pages), each request with ``own`` tokens and ``room`` pages more."""
    fresh = iter(range(PAGES - 1))
    rows, lens = [], []
    for requests, pages in shared:
        prefix = [next(fresh) for _ in range(pages)]
        for _ in range(requests):
            n = own[len(rows) % len(own)]
            rows.append(prefix + [next(fresh) for _ in range(-(-n // page) + room)])
            lens.append(pages * page + n)
    return rows, lens


def five_sms(target):
    """This target's device with so few SMs that small batches are cut, and with costs that fold what is short.

    Of architectures with several tiles of a size, one with a single one: so that all batches ask for the same launches.
    """
    hw = cf.hardware_of(target.device)
    arch = "sm_80" if hw.overlaps else hw.arch
    return replace(hw, arch=arch, num_sms=5, costs=COSTS)


@pytest.mark.parametrize("share", ["auto", "always", "never"])
@pytest.mark.parametrize("split", ["balanced", "stream_k"])
def test_a_declared_tree_however_it_is_shared(target, share, split):
    """Whole contexts in each request's pages: nodes that are folded are read there, from the middle of a page on or not."""
    m = target.model()
    contexts, store, tree = three_levels_in_one_table(target, m)
    q = target.queries(m, 5)
    plan = make_plan(target, tree, m, split=split, share=share, hardware=five_sms(target))
    assert plan.choice.folded.sum() == {"always": 0, "never": 3}.get(share, plan.choice.folded.sum())
    target.check(cf.attend(q, store, plan, backend=target.backend), q, contexts)


@pytest.mark.parametrize("share", ["always", "never"])
def test_several_rows_over_a_folded_prefix(target, share):
    """Draft rows are causal among themselves, and see all that was shared."""
    m = target.model()
    contexts, store, tree = prefix_in_one_table(target, m, 24, [3, 40, 9], q_lens=3)
    plan = make_plan(target, tree, m, share=share, hardware=five_sms(target))
    q = target.queries(m, 9)
    target.check(cf.attend(q, store, plan, backend=target.backend), q, contexts, q_lens=3)


@pytest.mark.parametrize("share", ["always", "never"])
def test_lengths_grow_and_finished_requests_do_not(target, share):
    server = Server(target)
    rows, lens = batch([(3, 4), (2, 0)], own=[5, 9, 1])
    plan = server.plan(rows, lens, max_new_tokens=10, split=2, share=share)
    live = torch.tensor([*lens, 0], dtype=torch.int32)
    for step in (0, 3, 1):
        plan.advance(step)
        live += step * (live > 0)
        server.check(server.attend(plan), live.tolist())
    live[[1, 3]] = 0
    plan.set_lengths(target.put(live))
    plan.advance(2)
    live += 2 * (live > 0)
    server.check(server.attend(plan), live.tolist())
    with pytest.raises(ValueError, match="num_tokens: expected at most 4 more tokens"):
        plan.advance(5)


@pytest.mark.parametrize(("split", "share"), [("balanced", "auto"), ("stream_k", "always"), (3, "auto")])
def test_a_plan_takes_over_other_batches(target, split, share):
    """As a graph that was captured once would: other groups, fewer requests, no sharing, nobody; in the memory it had."""
    server = Server(target)
    options = {"split": split, "max_new_tokens": 8, "hardware": five_sms(target)}
    plan = server.plan(*batch([(6, 8)], own=[5, 30, 1]), share="always", **options).with_room(3.0)
    memory = [x.items.data_ptr() for x in plan.launches]
    for shared, own in (([(2, 3), (3, 6)], [9, 3]), ([(1, 0)] * 6, [40, 2, 17]), ([], [1]), ([(5, 9)], [2])):
        rows, lens = batch(shared, own)
        plan.update_(server.plan(rows, lens, share=share, **options))
        plan.advance(7)
        lens = [n + 7 for n in lens] + [0] * (REQUESTS - len(lens))
        server.check(server.attend(plan), lens)
    assert [x.items.data_ptr() for x in plan.launches] == memory


def test_a_plan_takes_over_trees_with_the_tiles_it_has(target):
    """Planned anew, such batches would ask for tiles of other sizes, and for more or fewer programs on an SM."""
    server = Server(target)
    hw = replace(cf.hardware_of(target.device), num_sms=5)
    plan = server.plan(*batch([(1, 0)] * 6, own=[40, 2, 17]), max_new_tokens=4, hardware=hw).with_room(6.0)
    tiles = [launch.tile for launch in plan.launches]
    for shared, own in (([(6, 9)], [5, 30, 1]), ([(2, 3), (3, 6)], [9, 3]), ([], [1])):
        rows, lens = batch(shared, own)
        plan.update_(server.tree(rows, lens))
        plan.advance(2)
        server.check(server.attend(plan), [n + 2 for n in lens] + [0] * (REQUESTS - len(lens)))
        assert [launch.tile for launch in plan.launches] == tiles
