"""Mixing log2 and natural-log states goes wrong without an error, unless each state declares its base."""

import math

import torch

import cascade_fd as cf

device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)
B, Hq, Hkv, D = 2, 8, 2, 64
q = torch.randn(B, Hq, D, device=device)
k, v = torch.randn(2, B, 512 + 4096, Hkv, D, device=device)
whole = cf.decode(q, k, v)
head = cf.decode(q, k[:, :512], v[:, :512])
tail = cf.decode(q, k[:, 512:], v[:, 512:])

# What a library with base-2 lse, FlashInfer for one, returns for the first part.
o, lse = head.o, head.lse * math.log2(math.e)

right = cf.merge(cf.interop.from_flashinfer(o, lse), tail)
wrong = cf.merge(cf.AttentionState(o, lse, base="e"), tail)
error_right = (right.o - whole.o).abs().max().item()
error_wrong = (wrong.o - whole.o).abs().max().item()
assert error_right < 1e-5
assert error_wrong > 1000 * error_right

try:
    cf.AttentionState(o, lse)
except TypeError:
    print(f"largest error: base declared {error_right:.1e}, base mistaken {error_wrong:.1e}; without a base: refused")
else:
    raise AssertionError("a state without a base must be refused")
