"""A prefix that all requests share is read once: same result, fewer bytes."""

import torch

import cascade_fd as cf

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
B, P, S, Hq, Hkv, D = 8, 2048, 64, 8, 2, 64
q = torch.randn(B, Hq, D, device=device)
prefix_k, prefix_v = torch.randn(2, P, Hkv, D, device=device)
k, v = torch.randn(2, B, S, Hkv, D, device=device)


def planned(levels):
    tree = cf.PrefixTree.from_levels(levels)
    return cf.plan(tree, num_q_heads=Hq, num_kv_heads=Hkv, head_dim=D, dtype=q.dtype, device=device)


def bytes_read(plan):
    """K and V that the work items load: columns 3 and 4 of an item are its first key and one past its last."""
    keys = sum(int((launch.items[:, 4] - launch.items[:, 3]).sum()) for launch in plan.launches)
    return keys * Hkv * 2 * D * q.element_size()


private = cf.Level(range(B + 1), [S] * B)
cascade_plan = planned([cf.Level([0, B], [P]), private])
cascade = cf.attend(q, [cf.DenseKV(prefix_k, prefix_v), cf.DenseKV(k, v)], cascade_plan)

flat_plan = planned([cf.Level(range(B + 1), [P + S] * B)])
joined = [torch.cat([a.expand(B, -1, -1, -1), b], dim=1) for a, b in ((prefix_k, k), (prefix_v, v))]
flat = cf.attend(q, cf.DenseKV(*joined), flat_plan)

difference = (cascade.o - flat.o).abs().max().item()
flat_bytes, cascade_bytes = bytes_read(flat_plan), bytes_read(cascade_plan)
assert difference < 1e-5
assert flat_bytes == B * (P + S) * Hkv * 2 * D * 4
assert cascade_bytes == (P + B * S) * Hkv * 2 * D * 4

print(f"flat reads {flat_bytes / 1e6:.1f} MB, cascade {cascade_bytes / 1e6:.1f} MB; largest difference {difference:.1e}")
