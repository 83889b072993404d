"""The kernel of the ablation benchmark, on this folder's target."""

from tests.contract.ablation import *  # noqa: F403
