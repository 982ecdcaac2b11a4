"""What several test files of this tier begin with."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from blockd_harness import Blockd

from aenv.config import load
from aenv.errors import ProvisionError
from aenv.images.store import find_blockd


@pytest.fixture
def blockd(tmp_path: Path) -> Iterator[Blockd]:
    try:
        find_blockd(load())
    except ProvisionError as error:
        pytest.skip(error.message)
    daemon = Blockd(tmp_path)
    yield daemon
    daemon.close()
