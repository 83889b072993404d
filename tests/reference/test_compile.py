"""Ahead-of-time compilation without a GPU: one case per target here, all of them in ``make compile``."""

import json
import os
import subprocess
import sys

import pytest

from cascade_fd.hardware import PRESETS
from cascade_fd.precompile import ARCHS, CASES, plans
from cascade_fd.tiles import NARROW, tile_rows

CODE = """
import json, sys
from cascade_fd.precompile import CASES, compile_case, problems
case = CASES[int(sys.argv[2])]
variants = compile_case(case, sys.argv[1])
print(json.dumps([[v.name, v.num_warps, v.shared, v.registers, problems(v, sys.argv[1])] for v in variants]))
"""


@pytest.mark.parametrize("arch", ARCHS)
def test_every_size_of_tile_is_compiled(arch):
    """Whatever the cost model would choose."""
    case, hw = CASES[0], PRESETS[arch]
    launched = {launch.tile.block_m for made in plans(case, hw) for launch in made.launches}
    narrow = {NARROW.block_m} if hw.costs.knows(NARROW.kernel) else set()
    assert launched == {*tile_rows(hw, case.dtype, (case.head_dim, case.head_dim)), *narrow}


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHS)
def test_one_case_per_target(arch):
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", CODE, arch, str(ARCHS.index(arch) % len(CASES))]
    run = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    assert run.returncode == 0, run.stderr[-3000:]
    variants = json.loads(run.stdout.splitlines()[-1])
    names = {"attend_kernel", "merge_rows_kernel", "merge_pair_kernel"}
    assert {name for name, *_ in variants} - {"hopper_kernel", "narrow_kernel"} == names
    for name, _, _, registers, found in variants:
        assert not found, (name, found)
        assert registers
