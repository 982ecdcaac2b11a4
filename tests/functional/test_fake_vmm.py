"""The fake driver's guests, as the control plane sees them."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from aenv.errors import DeadlineExceeded, GuestError, VmmError
from aenv.guest.envd import ENVD_PORT, GuestClient, GuestInit
from aenv.images.protocol import Disk, GuestMemory
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
    await guests.greet(ADDRESS, INIT, None, 5)
    assert host.of("sb").guest.inits[0]["generation"] == "g1"
    assert (await guests.metrics(ADDRESS, "secret"))["cpu_count"] == 2
    with pytest.raises(GuestError, match="401"):
        await guests.metrics(ADDRESS, "wrong")


async def test_it_echoes_and_checks(host: FakeHost, guests: GuestClient) -> None:
    await FakeVmm(host).boot(SPEC)
    await guests.greet(ADDRESS, INIT, None, 5)
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
    await guests.greet(ADDRESS, INIT, None, 5)
    later = replace(INIT, generation="g2", access_token="other")
    for wrong in (None, "other"):
        with pytest.raises(GuestError, match="401"):
            await guests.greet(ADDRESS, later, wrong, 5)
    await guests.greet(ADDRESS, later, "secret", 5)
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


def copy(memory: GuestMemory, path: Path) -> None:
    with Path(f"/proc/{memory.pid}/mem").open("rb") as source:
        source.seek(memory.ranges[0].address)
        path.write_bytes(source.read(memory.size))


async def saved(host: FakeHost, path: Path) -> tuple[VmSpec, bytes]:
    """What a fake guest that holds a value and runs a process leaves; its memory is in the file `path`."""
    vm = await FakeVmm(host).boot(SPEC)
    async with httpx.AsyncClient(base_url=URL) as http:
        await http.post("/values/color", content="blue")
        await http.post("/processes")
    await vm.freeze()
    memory = await vm.memory()
    copy(memory, path)
    state = await vm.save()
    await vm.kill()
    return replace(SPEC, memory=path), state


async def test_what_its_memory_holds_is_what_a_restored_guest_remembers(host: FakeHost, tmp_path: Path) -> None:
    spec, state = await saved(host, tmp_path / "memory")
    vm = await FakeVmm(host).prepare(spec)
    await vm.load(state)
    await vm.thaw()
    async with httpx.AsyncClient(base_url=URL) as http:
        assert (await http.get("/values/color")).text == "blue"
        assert (await http.get("/values/shape")).status_code == 404
        assert (await http.get("/processes")).json() == [100]
        assert (await http.post("/processes/100/stop")).status_code == 204
        assert (await http.post("/processes/100/stop")).status_code == 404
        assert (await http.post("/processes")).json() == {"pid": 101}
        assert (await http.get("/boot-id")).json()["boot_id"] == host.of("sb").guest.boot_id


async def test_a_state_goes_with_its_memory_only(host: FakeHost, tmp_path: Path) -> None:
    spec, state = await saved(host, tmp_path / "memory")
    for memory in (bytes(SPEC.memory_mb << 20), b"\xff" * (SPEC.memory_mb << 20)):
        (tmp_path / "memory").write_bytes(memory)
        vm = await FakeVmm(host).prepare(spec)
        with pytest.raises(VmmError, match="is not of a guest with this memory"):
            await vm.load(state)
        await vm.kill()


async def test_a_frozen_guest_answers_when_it_is_thawed(host: FakeHost) -> None:
    vm = await FakeVmm(host).boot(SPEC)
    await vm.freeze()
    async with httpx.AsyncClient(base_url=URL) as http:
        asking = asyncio.create_task(http.post("/values/color", content="red"))
        with pytest.raises(httpx.ReadTimeout):
            await http.get("/health", timeout=0.1)
        assert not asking.done()
        assert host.of("sb").guest.values == {}
        await vm.thaw()
        assert (await asking).status_code == 204


async def test_faults_of_saving_and_loading(host: FakeHost, tmp_path: Path) -> None:
    spec, state = await saved(host, tmp_path / "memory")
    vmm = FakeVmm(host)
    # Each is taken by the call that it fits, whatever stands before it.
    host.faults.extend(["save_fails", "thaw_fails", "freeze_hangs", "load_fails", "dies_at_load"])
    with pytest.raises(VmmError, match="told to fail"):
        await (await vmm.prepare(spec)).load(state)
    dying = await vmm.prepare(spec)
    with pytest.raises(VmmError, match="it ended"):
        await dying.load(state)
    assert (await dying.wait()).status == 1
    vm = await vmm.prepare(spec)
    await vm.load(state)
    with pytest.raises(VmmError, match="cannot thaw: told to fail"):
        await vm.thaw()
    with pytest.raises(VmmError, match="cannot save: told to fail"):
        await vm.save()
    await vm.thaw()
    freezing = asyncio.create_task(vm.freeze())
    await host.freezing.wait()
    freezing.cancel()
    await vm.freeze()
    assert not host.faults
    assert await vm.save() == state
    await vm.kill()


async def test_one_that_remembers_too_much_goes_on(host: FakeHost) -> None:
    vm = await FakeVmm(host).boot(SPEC)
    host.of("sb").guest.values["all"] = "x" * (SPEC.memory_mb << 20)
    with pytest.raises(VmmError, match="its memory holds"):
        await vm.freeze()
    async with httpx.AsyncClient(base_url=URL) as http:
        assert (await http.get("/health")).status_code == 204
