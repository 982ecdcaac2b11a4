import pytest

from aenv.api import create
from aenv.api.wire import NewSandbox, NewSandboxV2
from aenv.config import OrchestratorSettings
from aenv.errors import AenvError, BadRequest, NotYetAvailable
from aenv.network.protocol import EgressPolicy

LIMITS = OrchestratorSettings(max_timeout=7200, max_metadata_bytes=20)


def spec(default_timeout=300, model=NewSandboxV2, **fields):
    body = model.model_validate({"templateID": "base", **fields})
    return create.spec(body, default_timeout=default_timeout, limits=LIMITS)


def test_the_smallest_wish():
    wish = spec()
    assert (wish.template, wish.timeout, wish.secure) == ("base", 300, True)
    assert (wish.metadata, wish.env_vars, wish.network, wish.allow_internet_access) == ({}, {}, None, None)
    assert wish.egress == EgressPolicy()


def test_a_full_wish():
    network = {
        "allowPublicTraffic": False,
        "allowOut": ["1.1.1.1"],
        "denyOut": ["0.0.0.0/0"],
        "maskRequestHost": "h:${PORT}",
    }
    wish = spec(
        timeout=60,
        autoPause=False,
        metadata={"a": "b"},
        envVars={"C": "d"},
        allow_internet_access=True,
        network=network,
    )
    assert (wish.timeout, wish.on_timeout, wish.metadata, wish.env_vars) == (60, "kill", {"a": "b"}, {"C": "d"})
    assert wish.network == network
    assert wish.egress == EgressPolicy(allow_out=("1.1.1.1",), deny_out=("0.0.0.0/0",))


def test_unsecured_is_for_version_1():
    assert spec(model=NewSandbox, secure=False).secure is False
    assert spec(model=NewSandbox).secure is True
    assert spec(secure=False).secure is True


@pytest.mark.parametrize("timeout", [0, -1, -(10**30)])
def test_no_time_to_live(timeout):
    with pytest.raises(BadRequest) as caught:
        spec(timeout=timeout)
    assert caught.value.message == "Timeout must be greater than 0"


@pytest.mark.parametrize("timeout", [7201, 10**30])
def test_too_long_a_life(timeout):
    with pytest.raises(BadRequest) as caught:
        spec(timeout=timeout)
    assert caught.value.message == "Timeout cannot be greater than 2 hours"
    assert spec(timeout=7200).timeout == 7200


@pytest.mark.parametrize(
    ("fields", "error", "part"),
    [
        ({"autoPauseMemory": False}, BadRequest, "needs autoPause"),
        ({"autoPauseMemory": False, "autoPause": False}, BadRequest, "needs autoPause"),
        ({"autoPauseMemory": False, "autoPause": True, "autoResume": {"enabled": True}}, BadRequest, "autoResume"),
        ({"iam": {"tokens": {}}}, NotYetAvailable, "iam"),
        ({"volumeMounts": [{"name": "v", "path": "/v"}]}, NotYetAvailable, "volumes"),
        ({"envVars": {"A=B": "c"}}, BadRequest, "'A=B' is not a variable name"),
        ({"envVars": {"": "c"}}, BadRequest, "not a variable name"),
        ({"envVars": {"A\0": "c"}}, BadRequest, "not a variable name"),
        ({"envVars": {"A": "c\0"}}, BadRequest, "NUL"),
        ({"metadata": {"k": "v" * 20}}, BadRequest, "metadata has 21 bytes of keys and values; the limit is 20"),
        ({"metadata": {"k": "é" * 10}}, BadRequest, "metadata has 21 bytes"),
        ({"envVars": {"K": "v" * 20}}, BadRequest, "envVars has 21 bytes"),
    ],
)
def test_refusals(fields, error, part):
    with pytest.raises(AenvError) as caught:
        spec(**fields)
    assert type(caught.value) is error
    assert part in caught.value.message


@pytest.mark.parametrize("default", ["pause", "kill"])
def test_what_happens_at_the_timeout(default):
    limits = OrchestratorSettings(on_timeout=default)

    def wish(**fields):
        made = create.spec(NewSandboxV2(templateID="base", **fields), default_timeout=300, limits=limits)
        return made.on_timeout, made.keep_memory, made.auto_resume

    assert wish() == (default, True, False)
    assert wish(autoPause=None, autoPauseMemory=None, autoResume=None) == (default, True, False)
    assert wish(autoPause=True) == ("pause", True, False)
    assert wish(autoPause=True, autoPauseMemory=False) == ("pause", False, False)
    assert wish(autoPause=True, autoResume={"enabled": True}) == ("pause", True, True)
    assert wish(autoPause=False) == ("kill", True, False)
    assert wish(autoResume={"enabled": True}) == (default, True, True)  # pauses by hand count too


def test_what_asks_for_nothing_is_no_request_for_it():
    spec(mcp={"server": {}}, iam={}, volumeMounts=[], autoResume={"enabled": False}, autoPauseMemory=True, network=None)


def test_a_wrong_value_is_told_before_what_is_missing_here():
    with pytest.raises(BadRequest):
        spec(iam={"tokens": {}}, timeout=0)


def test_private_traffic_needs_a_token_and_so_a_secure_sandbox():
    with pytest.raises(BadRequest, match="allowPublicTraffic"):
        spec(model=NewSandbox, secure=False, network={"allowPublicTraffic": False})


@pytest.mark.parametrize("key", [None, "a", "0-9", "a" * 255])
def test_idempotency_keys(key):
    assert create.checked_idempotency_key(key) == key


@pytest.mark.parametrize("key", ["", "A", "a_b", "a" * 256, "a\n", "é"])
def test_malformed_idempotency_keys(key):
    with pytest.raises(BadRequest, match="Idempotency-Key"):
        create.checked_idempotency_key(key)
