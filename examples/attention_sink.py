"""An attention sink is a state without a value: merge it once, in the last merge."""

import torch

import cascade_fd as cf

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
B, T, H, D = 2, 300, 4, 64
q = torch.randn(B, H, D, device=device)
k, v = torch.randn(2, B, T, H, D, device=device)
sink = torch.randn(H, device=device) + 5.0  # a logit per head, in natural log

# What a model with sinks computes: one more column in the softmax, dropped before the values are summed.
scores = torch.einsum("bhd,bthd->bht", q.double(), k.double()) / D**0.5
column = sink.double().expand(B, H)[..., None]
weights = torch.cat([scores, column], dim=-1).softmax(-1)[..., :T]
exact = torch.einsum("bht,bthd->bhd", weights, v.double())

a, b = cf.decode(q, k[:, :100], v[:, :100]), cf.decode(q, k[:, 100:], v[:, 100:])
once = (cf.merge(a, b, sink=sink).o - exact).abs().max().item()
twice = (cf.merge(cf.merge(a, sink=sink), b, sink=sink).o - exact).abs().max().item()
never = (cf.merge(a, b).o - exact).abs().max().item()
assert once < 1e-5
assert min(twice, never) > 100 * once

print(f"largest error: sink merged once {once:.1e}, twice {twice:.1e}, never {never:.1e}")
