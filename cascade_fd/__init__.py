"""cascade_fd: exact attention for batches that share context. The public names; see docs/ for what they mean."""

from cascade_fd import interop
from cascade_fd.checks import UnsupportedError
from cascade_fd.hardware import Hardware, hardware_of
from cascade_fd.kv import DenseKV, PagedKV, PageTable
from cascade_fd.levels import Level
from cascade_fd.ops.attend import attend
from cascade_fd.ops.merge import merge, merge_, merge_ragged
from cascade_fd.ops.oneshot import cascade_decode, decode, verify
from cascade_fd.planning.planner import plan
from cascade_fd.planning.worklist import Plan
from cascade_fd.prefix_index import PrefixIndex
from cascade_fd.state import AttentionState
from cascade_fd.tree import PrefixTree

__version__ = "0.1.0"
__all__ = [
    "AttentionState",
    "DenseKV",
    "Hardware",
    "Level",
    "PageTable",
    "PagedKV",
    "Plan",
    "PrefixIndex",
    "PrefixTree",
    "UnsupportedError",
    "attend",
    "cascade_decode",
    "decode",
    "hardware_of",
    "interop",
    "merge",
    "merge_",
    "merge_ragged",
    "plan",
    "verify",
]
