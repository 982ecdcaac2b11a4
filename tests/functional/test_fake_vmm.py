"""The fake driver's guests, as the control plane sees them."""

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from aenv.errors import DeadlineExceeded, GuestError, VmmError
from aenv.guest.envd import ENVD_PORT, GuestClient, GuestInit
from aenv.images.protocol import Disk
from aenv.vmm.fake import FakeHost, FakeVmm
from aenv.vmm.protocol import VmSpec

ADDRESS = "127.88.2.1"
URL = f"http://{ADDRESS}:{ENVD_PORT}"
NONE = Path("/nonexistent")
SPEC = VmSpec(
    sandbox_id="sb",
    directory=NONE,
    uid=1,
    vcpus=1,
    memory_mb=1,
    kernel=NONE,
    initramfs=NONE,
    hostname="sb",
    disk=Disk(path=NONE, size=1),
    netns=NONE,
    tap="",
    mac="",
    address=ADDRESS,
)
INIT = GuestInit(
    sandbox_id="sb",
    template_id="base",
    generation="g1",
    hostname="sb",
    access_token="secret",
    env_vars={"A": "b"},
    default_user="user",
    default_workdir="/home/user",
)


@pytest.fixture
async def host() -> AsyncIterator[FakeHost]:
    made = FakeHost()
    yield made
    await made.aclose()


@pytest.fixture
async def guests() -> AsyncIterator[GuestClient]:
    client = GuestClient()
    yield client
    await client.aclose()


async def test_the_client_of_envd_gets_along_with_it(host: FakeHost, guests: GuestClient) -> None:
    await FakeVmm(host).boot(SPEC)
    await guests.wait_ready(ADDRESS, 5)
    await guests.init(ADDRESS, INIT)
    assert host.of("sb").guest.inits[0]["generation"] == "g1"
    assert (await guests.metrics(ADDRESS, "secret"))["cpu_count"] == 2
    with pytest.raises(GuestError, match="401"):
        await guests.metrics(ADDRESS, "wrong")


async def test_it_echoes_and_checks(host: FakeHost, guests: GuestClient) -> None:
    await FakeVmm(host).boot(SPEC)
    await guests.init(ADDRESS, INIT)
    async with httpx.AsyncClient(base_url=URL) as http:
        echo = (await http.post("/some/path?q=1", content="hi", headers={"X-Odd": "1"})).json()
        assert (echo["method"], echo["path"], echo["body"], echo["headers"]["x-odd"]) == (
            "POST",
            "/some/path?q=1",
            "hi",
            "1",
        )
        assert (await http.get("/envs")).status_code == 401
        assert (await http.get("/envs", headers={"X-Access-Token": "secret"})).json() == {"A": "b"}
        for bad in ("{", "[]", '{"accessToken": 1}', '{"envVars": {"A": 1}}'):
            assert (await http.post("/init", content=bad, headers={"X-Access-Token": "secret"})).status_code == 400


async def test_init_wants_the_token_there_is(host: FakeHost, guests: GuestClient) -> None:
    await FakeVmm(host).boot(SPEC)
    await guests.init(ADDRESS, INIT)
    later = replace(INIT, generation="g2", access_token="other")
    for wrong in (None, "other"):
        with pytest.raises(GuestError, match="401"):
            await guests.init(ADDRESS, later, wrong)
    await guests.init(ADDRESS, later, "secret")
    assert host.of("sb").guest.access_token == "other"


async def test_a_dead_vmm_does_not_answer(host: FakeHost, guests: GuestClient) -> None:
    await FakeVmm(host).boot(SPEC)
    await host.crash("sb")
    with pytest.raises(GuestError):
        await guests.metrics(ADDRESS, None)
    with pytest.raises(KeyError):
        host.of("sb")


async def test_faults_are_taken_one_each(host: FakeHost, guests: GuestClient) -> None:
    vmm = FakeVmm(host)
    host.faults.extend(["boot_fails", "never_ready", "dies_at_boot"])
    with pytest.raises(VmmError, match="told to fail"):
        await vmm.boot(SPEC)
    silent = await vmm.boot(SPEC)
    with pytest.raises(DeadlineExceeded):
        await guests.wait_ready(ADDRESS, 0.05)
    await silent.kill()
    assert (await (await vmm.boot(SPEC)).wait()).status == 1
    await (await vmm.boot(SPEC)).kill()
