"""A tree of three levels, one plan for many decode steps: only the lengths on the device change."""

import torch

import cascade_fd as cf

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
Hq, Hkv, D, page, steps = 8, 2, 64, 16, 20
kv = cf.PagedKV(*torch.randn(2, 40, page, Hkv, D, device=device))

# Six pages of root, then three or four pages of the branch, then the request's own; two requests under each branch.
root, branches, leaves = 96, [48, 64], [5, 17, 0, 30]
shared = [root + branches[b // 2] for b in range(4)]
first = [[*range(6), *range(6, 9)], [*range(6), *range(6, 9)], [*range(6), *range(9, 13)], [*range(6), *range(9, 13)]]
own = torch.arange(13, 33).view(4, 5).tolist()
width = max(map(len, first)) + 5
rows = [(a + b + [0] * width)[:width] for a, b in zip(first, own, strict=True)]
block_table = torch.tensor(rows, dtype=torch.int32, device=device)

tree = cf.PrefixTree.from_levels(
    [cf.Level([0, 4], [root]), cf.Level([0, 2, 4], branches), cf.Level([0, 1, 2, 3, 4], leaves)],
    table=cf.PageTable.from_block_table(block_table, page),
)
plan = cf.plan(tree, num_q_heads=Hq, num_kv_heads=Hkv, head_dim=D, dtype=torch.float32, device=device, max_new_tokens=steps)

worst = 0.0
for step in range(steps + 1):
    if step:
        plan.advance()  # every request has one token more, on the device
    lens = [s + n + step for s, n in zip(shared, leaves, strict=True)]  # the table's rows hold the shared tokens too
    q = torch.randn(4, Hq, D, device=device)
    tree_state = cf.attend(q, kv, plan)
    flat_state = cf.decode(q, kv, block_table=block_table, seq_lens=lens)
    worst = max(worst, (tree_state.o - flat_state.o).abs().max().item())
assert worst < 1e-5

print(f"{steps + 1} steps, one plan of {plan.num_items} items on {device}: largest difference to flat attention {worst:.1e}")
