"""Speculative verify: several draft rows per request in one call, each seeing the drafts up to itself."""

import torch

import cascade_fd as cf

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
B, drafts, Hq, Hkv, D, P = 3, 4, 8, 2, 64, 500
q = torch.randn(B, drafts, Hq, D, device=device)
k, v = torch.randn(2, B, 200, Hkv, D, device=device)
prefix = torch.randn(P, Hkv, D, device=device), torch.randn(P, Hkv, D, device=device)
lens = [200, 33, 4]  # keys of each request, its 4 drafts included

state = cf.verify(q, k, v, seq_lens=lens, prefix=prefix)
assert state.num_rows == B * drafts

worst = 0.0
for i in range(drafts):  # one draft at a time, as decode would have done it
    seen = [n - drafts + 1 + i for n in lens]
    alone = cf.cascade_decode(q[:, i].contiguous(), prefix=prefix, suffix=(k, v), suffix_lens=seen)
    together = state[range(i, B * drafts, drafts)]
    worst = max(worst, (together.o - alone.o).abs().max().item())
assert worst < 1e-5

print(f"{drafts} drafts of {B} requests in one call on {device}: largest difference to {drafts} decode calls {worst:.1e}")
