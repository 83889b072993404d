"""What is compared, as data: how each strategy makes its plan, in which kernel it runs, and for which cases."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from benchmarks.ablation.experiment import Experiment, Switches
from benchmarks.ablation.rewrite import in_sequence, replanned, with_rows
from cascade_fd.bench.cases import CASES, Case
from cascade_fd.bench.workload import Workload
from cascade_fd.ops.attend import attend
from cascade_fd.planning.worklist import Plan

# Beside the cases of the benchmark: v1 with other numbers of query rows.
ALL = CASES | {f"v1q{n}": replace(CASES["v1"], name=f"v1q{n}", q_len=n) for n in (2, 8)}
SPLITS = tuple(1 << i for i in range(11))
FAR = -200.0  # a maximum that no score of random inputs is near: every item is computed again


@dataclass(frozen=True)
class Strategy:
    """One way to compute a case.

    Attributes:
        name: what a result file's ``setting`` says; up to ":" the family.
        plan: from an input set's own plan, the one to run.
        switches: of the kernel of the experiments; None: the library's.
    """

    name: str
    plan: Callable[[Plan], Plan]
    switches: Switches | None = None

    @property
    def family(self) -> str:
        return self.name.split(":")[0]

    def prepare(self, loads: Sequence[Workload], backend: str | None = None) -> list[Callable[[], object]]:
        """What computes each of a case's input sets into its output whenever it is called. All that is done here is not timed.

        The sets share one plan, and one strategy's calls share what it makes of that. ``backend``: of the library's kernels.
        """
        made = replace(self.plan(loads[0].plan), device=loads[0].q.device)  # a compiled set has its plan on the host
        if self.switches is not None:
            first = Experiment(loads[0], made, self.switches)
            return [first.over(load) for load in loads]
        kept = partial(attend, plan=made, backend=backend)
        return [partial(kept, load.q, load.kv, out=load.out.o, lse_out=load.out.lse) for load in loads]


DEFAULT = Strategy("default", lambda plan: plan)


def strategies(case: Case) -> list[Strategy]:
    """The default, and what is compared with it on ``case``."""
    families = (family(case) for name, family in FAMILIES.items() if case.name in CASES_OF[name])
    return [DEFAULT, *(strategy for some in families for strategy in some)]


def _merge(case: Case) -> Iterator[Strategy]:
    yield Strategy("merge: launches in sequence", in_sequence)
    yield Strategy("merge: by the last arriver", _same, Switches(fused=True))


def _maximum(case: Case) -> Iterator[Strategy]:
    yield Strategy("maximum: running, in the kernel of the experiments", _same, Switches())
    yield Strategy("maximum: fixed", _same, Switches("fixed"))
    yield Strategy("maximum: fixed, far off, all computed again", _same, Switches("fixed", FAR))
    yield Strategy("maximum: the first tile's", _same, Switches("first tile"))


def _split(case: Case) -> Iterator[Strategy]:
    """FlashAttention-2's rule, multi-block attention's fixed sizes, LeanAttention's stream-K."""
    yield Strategy("split: wave", partial(replanned, split="wave"))
    if len(case.levels) == 1 and case.lens is None:  # splits of a number of tokens are a number of splits
        for tokens in (128, 256):
            yield Strategy(f"split: {tokens} tokens", partial(replanned, split=-(-case.levels[0][1] // tokens)))
    yield Strategy("split: 512 tokens", partial(replanned, split="fixed"))
    stream_k = partial(replanned, split="stream_k")
    yield Strategy("split: stream_k", stream_k)
    yield Strategy("split: stream_k, a program per slot", stream_k, Switches(walks=True))
    yield Strategy("split: stream_k, a program per slot, last arriver", stream_k, Switches(walks=True, fused=True))


def _num_splits(case: Case) -> Iterator[Strategy]:
    for n in SPLITS:
        if case.levels[-1][1] // n >= case.page_size:
            yield Strategy(f"num_splits: {n}", partial(replanned, split=n))


def _heads(case: Case) -> Iterator[Strategy]:
    """Every query head on its own: G times the programs, as long as before, or as many, G times as long."""
    group = case.num_q_heads // case.num_kv_heads
    yield Strategy("heads: one per program, same splits", partial(with_rows, most=1))
    yield Strategy("heads: one per program, G times longer splits", partial(_longer_with_rows, most=1, factor=group))


def _rows(case: Case) -> Iterator[Strategy]:
    """Fewer query rows of a request per program than it has."""
    group, n = case.num_q_heads // case.num_kv_heads, 1
    while n < case.q_len:
        yield Strategy(f"rows: {n} per program, same splits", partial(with_rows, most=n * group))
        longer = partial(_longer_with_rows, most=n * group, factor=case.q_len // n)
        yield Strategy(f"rows: {n} per program, longer splits", longer)
        n *= 2


def _same(plan: Plan) -> Plan:
    return plan


def _longer_with_rows(plan: Plan, most: int, factor: int) -> Plan:
    """So that about as many programs run as before."""
    return with_rows(replanned(plan, max(1, int(plan.splits.max()) // factor)), most)


FAMILIES: dict[str, Callable[[Case], Iterator[Strategy]]] = {
    "merge": _merge,
    "maximum": _maximum,
    "split": _split,
    "num_splits": _num_splits,
    "heads": _heads,
    "rows": _rows,
}
# Batch 1 and long (d1, d7: many states a row), one wave of equal items (d3), no split (d6), unequal lengths (d5), a tall tile
# over shared keys (c1, c2: short; c3: of 128 rows; c4: bound by products), three levels (t1), several rows per request (v).
CASES_OF = {
    "merge": ("d1", "d3", "d7", "v2", "c1", "c2", "t1"),
    "maximum": ("d1", "d3", "v2", "c1", "c3", "c4"),
    "split": ("d1", "d3", "d5", "d6", "d7", "v2", "c1", "t1"),
    "num_splits": ("d1", "d3", "d7"),
    "heads": ("d1", "d3", "d6", "d7"),
    "rows": ("v1q2", "v1", "v1q8", "v2"),
}
