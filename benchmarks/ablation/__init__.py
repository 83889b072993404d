"""Strategies of the literature against the library's own, in one run: ``python -m benchmarks.ablation``.

The experiments' kernel is the portable one, so a run sets CASCADE_FD_HOPPER=0 for the time it takes: no launch uses the Hopper
kernel, whatever its tile, and portable is compared with portable.
"""
