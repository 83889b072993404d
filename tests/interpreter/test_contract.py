"""The contract of every backend, on this folder's target."""

from tests.contract.cascade import *  # noqa: F403
from tests.contract.decode import *  # noqa: F403
from tests.contract.fuzz import *  # noqa: F403
from tests.contract.golden import *  # noqa: F403
from tests.contract.invariance import *  # noqa: F403
from tests.contract.merging import *  # noqa: F403
from tests.contract.steps import *  # noqa: F403
