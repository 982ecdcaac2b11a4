import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aenv.api import egress
from aenv.api.wire import SandboxNetworkConfig
from aenv.errors import BadRequest, NotYetAvailable
from aenv.network.protocol import EgressPolicy


def policy(internet=None, **network):
    return egress.policy(SandboxNetworkConfig(**network), internet)


def test_nothing_asked_is_everything_allowed():
    assert egress.policy(None, None) == egress.policy(None, True) == policy() == EgressPolicy()


def test_no_internet_access():
    assert egress.policy(None, False) == EgressPolicy(internet=False)


def test_addresses_networks_and_domains():
    assert policy(
        allowOut=["1.1.1.1", "10.1.2.3/24", "*.Example.com.", "files.example"], denyOut=["0.0.0.0/0"]
    ) == EgressPolicy(allow_out=("1.1.1.1", "10.1.2.0/24", "*.example.com", "files.example"), deny_out=("0.0.0.0/0",))


def test_repeated_entries_count_once():
    assert policy(denyOut=["10.1.2.3/24", "10.1.2.0/24"]).deny_out == ("10.1.2.0/24",)


def test_a_domain_needs_everything_else_denied():
    with pytest.raises(BadRequest) as caught:
        policy(allowOut=["example.com"])
    assert caught.value.message == (
        "When specifying allowed domains in allow out, you must include 'ALL_TRAFFIC' in deny out to block all other "
        "traffic."
    )
    assert policy(allowOut=["example.com"], internet=False).allow_out == ("example.com",)


@pytest.mark.parametrize(
    "entry",
    [
        *["", " ", "*", "a..b", "-a.com", "a_b-.com", "*.*.com", "münchen.de", "a" * 64 + ".com", "a." * 127 + "com"],
        *["1.2.3", "1.2.3.4.5", "256.1.1.1", "1.1.1.1/33", "1.1.1.1 ", "::1", "fe80::/10"],
        *["http://a.com", "a.com/x", "a\n.com", "a.com\n"],
    ],
)
def test_entries_that_mean_nothing(entry):
    with pytest.raises(BadRequest, match="allowOut"):
        policy(allowOut=[entry], denyOut=["0.0.0.0/0"])


def test_domains_cannot_be_denied():
    with pytest.raises(BadRequest, match=r"denyOut: 'example.com' is a domain"):
        policy(denyOut=["example.com"])


def test_too_many_entries():
    with pytest.raises(BadRequest, match="1001 entries"):
        policy(denyOut=["1.1.1.1"] * 1001)


@pytest.mark.parametrize("mask", ["localhost:${PORT}", "app.example.com", "127.0.0.1:80", "[::1]:${PORT}"])
def test_hosts_that_can_be_masked_with(mask):
    policy(maskRequestHost=mask)


@pytest.mark.parametrize("mask", ["", "a b", "a\r\nX: y", "a/b", "${HOST}", "é", "a" * 300])
def test_hosts_that_would_break_the_request(mask):
    with pytest.raises(BadRequest, match="maskRequestHost"):
        policy(maskRequestHost=mask)


@pytest.mark.parametrize(
    "network",
    [
        {"dnsServers": ["1.1.1.1"]},
        {"egressProxy": {"address": "a:1"}},
        {"rules": {"a.com": []}},
        {"httpsPorts": [8443]},
    ],
)
def test_what_cannot_be_enforced_yet_is_refused(network):
    with pytest.raises(NotYetAvailable, match=next(iter(network))):
        policy(**network)


def test_empty_forms_of_it_ask_for_nothing():
    assert policy(dnsServers=[], egressProxy=None, rules={}, httpsPorts=[]) == EgressPolicy()


@settings(deadline=None)
@given(st.text())
def test_any_text_is_accepted_or_refused_by_name(entry):
    try:
        accepted = policy(allowOut=[entry], denyOut=["0.0.0.0/0"]).allow_out
    except BadRequest:
        return
    assert accepted[0].isascii()
    assert accepted[0] == accepted[0].strip().lower()
