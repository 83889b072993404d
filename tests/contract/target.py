"""Where a contract test runs: a backend, a device and a dtype, with helpers to bring inputs there and judge results."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

import cascade_fd as cf
from cascade_fd.kv import KVStore
from cascade_fd.testing import inputs, numerics, oracle
from cascade_fd.testing.inputs import Model


@dataclass(frozen=True)
class Target:
    backend: str
    device: str
    dtype: torch.dtype

    def model(self, **changes) -> Model:
        return replace(Model(dtype=self.dtype), **changes)

    def put(self, x):
        """A tensor, a pair of tensors or a store, on this target's device."""
        if isinstance(x, KVStore):
            moved = object.__new__(type(x))
            KVStore.__init__(moved, self.put(x.k), self.put(x.v), x.page_size)
            return moved
        if isinstance(x, tuple):
            return tuple(self.put(y) for y in x)
        return x.to(self.device)

    def queries(self, model: Model, rows: int, **kwargs) -> torch.Tensor:
        return self.put(inputs.queries(model, rows, **kwargs))

    def check(self, state: cf.AttentionState, q: torch.Tensor, contexts, **kwargs) -> None:
        """``state`` is attention of ``q`` over ``contexts``, within the error budget."""
        q = q.cpu()
        numerics.assert_state(state, oracle.attention(q, contexts, **kwargs), numerics.torch_attention(q, contexts, **kwargs))

    def state(self, rows: int, heads: int, dim: int, seed: int = 0, base: str = "e") -> cf.AttentionState:
        g = inputs.generator(seed)
        o = torch.randn(rows, heads, dim, generator=g).to(self.dtype)
        lse = torch.randn(rows, heads, generator=g) * 3
        return cf.AttentionState(self.put(o), self.put(lse), base)

    def check_merge(self, got: cf.AttentionState, states, sink=None) -> None:
        """``got`` is the merge of ``states``: within 2 roundings of its dtype in o, of float32 in lse."""
        o, lse = oracle.merge(states, sink)
        size = torch.stack([torch.where(s.lse[..., None] == -torch.inf, 0.0, s.o.double()).abs().cpu() for s in states]).amax(0)
        assert not got.o.isnan().any()
        slack = 2 * torch.finfo(got.dtype).eps * size + 8 * torch.finfo(torch.float32).eps * size.amax()
        assert ((got.o.double().cpu() - o).abs() <= slack).all()
        assert numerics.max_error(got.to_base("e").lse, lse) <= 4 * numerics.rounding(torch.float32, lse) + 1e-6
