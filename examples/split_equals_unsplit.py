"""Cutting the keys of a request into splits changes nothing but the last bits."""

import torch

import cascade_fd as cf

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
B, T, Hq, Hkv, D = 2, 5000, 8, 2, 64
q = torch.randn(B, Hq, D, device=device)
k, v = torch.randn(2, B, T, Hkv, D, device=device)
lens = [T, 37]  # with 16 splits, the second request leaves most of them empty

whole = cf.decode(q, k, v, seq_lens=lens, num_splits=1)
worst = 0.0
for splits in (2, 3, 16, 64):
    cut = cf.decode(q, k, v, seq_lens=lens, num_splits=splits)
    worst = max(worst, (cut.o - whole.o).abs().max().item(), (cut.lse - whole.lse).abs().max().item())
assert worst < 1e-5

# The same by hand: any ranges, merged in any order.
ranges = [(3000, 5000), (0, 1), (1, 3000)]
parts = [cf.decode(q[:1], k[:1, a:b], v[:1, a:b]) for a, b in ranges]
by_hand = cf.merge(*parts)
assert torch.allclose(by_hand.o, whole.o[:1], atol=1e-5)

print(f"splits 2, 3, 16, 64 against 1 on {device}: largest difference in o and lse {worst:.1e}")
