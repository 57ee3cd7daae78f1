"""Published apps of a real pod, through `podpipe open`, as a real browser has them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.browser import test_apps
from tests.cluster.conftest import Cluster
from tests.cluster.gateways import InPod, opened

globals().update({n: test for n, test in vars(test_apps).items() if n.startswith("test_")})

pytestmark = pytest.mark.browser
tab = test_apps.tab
elsewhere = test_apps.elsewhere


@pytest.fixture(scope="module")
def place(cluster: Cluster, sandbox: str) -> Iterator[InPod]:
    with opened(cluster) as reached:
        reached.call("unexpose_port", name="down")
        yield reached
