"""The FlashAttention-3 build in vLLM's wheel, by the operator that vLLM calls: sequences of rows are always packed."""

from __future__ import annotations

import importlib
import os
from functools import partial
from typing import Any

import torch

from benchmarks.peers.fa3 import Call, Setting, offers, splits_of
from benchmarks.peers.parts import Part
from benchmarks.peers.provider import Provider, SkipError
from cascade_fd.bench.workload import Workload

NAME = "vllm fa3"
LIBRARY = "VLLM_FA3_LIBRARY"

# What else the schemas of its two operators ask for.
FWD: dict[str, Any] = {"softcap": 0.0, "is_rotary_interleaved": True, "cp_world_size": 1, "cp_rank": 0}
FWD |= dict.fromkeys(("k_new", "v_new", "q_v", "out", "cu_seqlens_k", "cu_seqlens_k_new", "seqused_q", "kv_batch_idx"))
FWD |= dict.fromkeys(("leftpad_k", "rotary_cos", "rotary_sin", "seqlens_rotary", "q_descale", "k_descale", "v_descale"))
FWD |= dict.fromkeys(("s_aux", "cp_tot_seqused_k"))
METADATA: dict[str, Any] = {"max_seqlen_k_new": 0, "has_softcap": False}
METADATA |= dict.fromkeys(("cu_seqlens_k", "cu_seqlens_k_new", "seqused_q", "leftpad_k"))

FLAT: tuple[Setting, ...] = (
    Setting(),
    Setting(ahead=True),
    Setting(num_splits=None, ahead=True),
    Setting(num_splits=None, fill=2, ahead=True),
)
LEVELS: tuple[Setting, ...] = (
    Setting(by_level=True, ahead=True),
    Setting(by_level=True, num_splits=None, ahead=True),
    Setting(by_level=True, ahead=True, streams=True),
    Setting(by_level=True, num_splits=None, ahead=True, streams=True),
)


def providers(load: Workload) -> list[Provider]:
    """Its settings for a case."""
    _ops()
    return offers(NAME, _call, LEVELS if len(load.case.levels) > 1 else FLAT, load)


def _ops() -> Any:
    """The operators, from the library that ``VLLM_FA3_LIBRARY`` names, else from an installed vLLM."""
    try:
        if LIBRARY in os.environ:
            torch.ops.load_library(os.environ[LIBRARY])
        else:
            importlib.import_module("vllm.vllm_flash_attn")
    except (ImportError, OSError) as error:
        raise SkipError(f"neither {LIBRARY} names a library that loads nor is vllm installed ({error})") from None
    return torch.ops._vllm_fa3_C


def _call(setting: Setting, load: Workload, part: Part, want_lse: bool) -> Call:
    """Its results are ``o [T, Hq, D]``, or that and ``lse [Hq, T]``; it computes both anyway."""
    ops, case, device = _ops(), load.case, load.q.device
    cu_q = torch.arange(0, (part.nodes + 1) * part.rows, part.rows, dtype=torch.int32, device=device)
    lens = torch.from_numpy(part.lens).to(device, torch.int32)
    shape = {
        "cu_seqlens_q": cu_q,
        "seqused_k": lens,
        "max_seqlen_q": part.rows,
        "max_seqlen_k": int(part.lens.max()),
        "is_causal": part.causal,
        "window_size_left": -1,
        "window_size_right": -1,
        "num_splits": splits_of(setting, load, part),
        "pack_gqa": setting.pack_gqa,
        "sm_margin": 0,
    }
    schedule = _schedule(ops, load, part, shape) if setting.ahead else None
    scale = case.head_dim**-0.5
    call = partial(ops.fwd, **shape, **FWD, page_table=part.table, softmax_scale=scale, scheduler_metadata=schedule)

    def run(load: Workload) -> Any:
        o, lse, *_ = call(q=load.q, k=load.kv.k, v=load.kv.v)
        return (o, lse) if want_lse else o

    return run


def _schedule(ops: Any, load: Workload, part: Part, shape: dict[str, Any]) -> torch.Tensor:
    case = load.case
    return ops.get_scheduler_metadata(
        batch_size=part.nodes,
        num_heads=case.num_q_heads,
        num_heads_k=case.num_kv_heads,
        headdim=case.head_dim,
        headdim_v=case.head_dim,
        qkv_dtype=load.q.dtype,
        page_size=case.page_size,
        **shape,
        **METADATA,
    )
