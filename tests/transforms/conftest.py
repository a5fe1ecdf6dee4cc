from __future__ import annotations

import pytest

from tests.transforms.world import ACTORS


@pytest.fixture(params=sorted(ACTORS))
def kind(request):
    return request.param
