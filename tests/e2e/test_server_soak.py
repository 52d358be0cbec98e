"""Mixed traffic of every API against the sanitizer builds: no report, no wrong answer.

Seconds: CALLA_SOAK_SECONDS, or a minute in the long form and ten seconds in the short one. The thread sanitizer's
build is made by `make test-long`."""
import os

import pytest

from serving import LONG, ROOT
from soak import Soak

SECONDS = float(os.environ.get("CALLA_SOAK_SECONDS", 60 if LONG else 10))


@pytest.mark.parametrize("build", ["san", "tsan"])
def test_soak(build):
    binary = os.path.join(ROOT, "build", build, "calla")
    if not os.path.exists(binary) or (build == "tsan" and not LONG):
        pytest.skip(f"build/{build}/calla is of the long form: make test-long")
    soak = Soak(binary, SECONDS)
    assert not soak.failed, "\n".join(soak.failed)
    assert soak.metrics["cache_evictions_total"] > 0 and len(soak.done) >= 6
