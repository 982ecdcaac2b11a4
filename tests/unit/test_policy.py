"""Egress policies, the slot layout and the internal ranges: pure."""

import ipaddress
import json
from ipaddress import IPv4Address, IPv4Network
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aenv.config import NetworkSettings, Settings
from aenv.errors import BadRequest, ConfigError
from aenv.network import rules
from aenv.network.layout import INTERNAL, Layout, internal_ranges
from aenv.network.policy import EVERYTHING, MAX_ENTRIES, compile_policy, name_mark
from aenv.network.protocol import EgressPolicy

ALL = "0.0.0.0/0"
CIDR = IPv4Network("10.213.0.0/16")


def layout(cidr: str = str(CIDR), home: str = "/h") -> Layout:
    return Layout.of(Settings(home=Path(home), network=NetworkSettings(cidr=cidr)))


def test_the_default_policy_denies_nothing_and_resolves_everything() -> None:
    compiled = compile_policy(EgressPolicy())
    assert (compiled.allow, compiled.deny, compiled.resolve_all) == ((), (), True)


@pytest.mark.parametrize(
    "policy",
    [
        EgressPolicy(internet=False),
        EgressPolicy(deny_out=(ALL,)),
        EgressPolicy(deny_out=("0.0.0.0/1", "128.0.0.0/1")),
        EgressPolicy(deny_out=("10.1.2.3/0",)),
        EgressPolicy(internet=False, allow_out=("1.1.1.1",)),
    ],
)
def test_denying_everything_also_stops_names(policy: EgressPolicy) -> None:
    compiled = compile_policy(policy)
    assert compiled.deny == EVERYTHING
    assert not compiled.resolve_all
    assert compiled.rule_for("example.com") is None


def test_entries_are_normalised() -> None:
    compiled = compile_policy(
        EgressPolicy(
            allow_out=("8.8.8.8", "8.8.8.9/32", "1.2.3.4/24", " Example.COM. ", "*.A_b.example.org"),
            deny_out=(ALL, "::/0", "2001:db8::1"),
        )
    )
    assert compiled.allow == (IPv4Network("1.2.3.0/24"), IPv4Network("8.8.8.8/31"))
    assert compiled.names == {"example.com", "*.a_b.example.org"}


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("example.com", "example.com"),
        ("www.example.com", None),
        ("example.org", None),
        ("a.example.org", "*.example.org"),
        ("b.a.example.org", "*.example.org"),
        ("badexample.org", None),
        ("example.com.evil.net", None),
        ("", None),
    ],
)
def test_which_rule_covers_a_name(name: str, rule: str | None) -> None:
    policy = compile_policy(EgressPolicy(internet=False, allow_out=("example.com", "*.example.org")))
    assert policy.rule_for(name) == rule


def test_domains_without_deny_all_get_the_sdks_message() -> None:
    expected = (
        "When specifying allowed domains in allow out, "
        "you must include 'ALL_TRAFFIC' in deny out to block all other traffic."
    )
    for deny in ((), ("10.0.0.0/8",), ("0.0.0.0/1",)):
        with pytest.raises(BadRequest) as caught:
            compile_policy(EgressPolicy(allow_out=("example.com",), deny_out=deny))
        assert caught.value.message == expected
    compile_policy(EgressPolicy(internet=False, allow_out=("example.com",)))  # the same as denying all


@pytest.mark.parametrize(
    "entry",
    ["", "*", "*.", "a..b", "-a.com", "a-.com", "http://a.com", "a.com/x", "a.com:443", "1.2.3", "1.2.3.300",
     "1.2.3.4/33", "a." * 127 + "toolong", "x" * 64 + ".com", "mü.de", "a b.com", "*.*.com", "a.*.com", "a\n.com",
     "::1", "2001:db8::/32"],
)  # fmt: skip
def test_bad_allow_entries_are_named(entry: str) -> None:
    with pytest.raises(BadRequest, match="allowOut") as caught:
        compile_policy(EgressPolicy(internet=False, allow_out=(entry,)))
    assert repr(entry) in caught.value.message


@pytest.mark.parametrize("entry", ["example.com", "*.example.com", "", "1.2.3.4/33", "1.2.3.4-1.2.3.9"])
def test_bad_deny_entries_are_named(entry: str) -> None:
    with pytest.raises(BadRequest, match="denyOut"):
        compile_policy(EgressPolicy(deny_out=(entry,)))


def test_the_number_of_entries_is_bounded() -> None:
    entries = tuple(str(IPv4Address(0x08000000 + n)) for n in range(MAX_ENTRIES + 1))
    compile_policy(EgressPolicy(deny_out=entries[:-1]))
    with pytest.raises(BadRequest, match=str(MAX_ENTRIES)):
        compile_policy(EgressPolicy(deny_out=entries))


@given(st.text(max_size=40))
def test_any_text_is_taken_or_refused_cleanly(text: str) -> None:
    try:
        compiled = compile_policy(EgressPolicy(internet=False, allow_out=(text,)))
    except BadRequest:
        return
    assert compiled.allow or compiled.names


@given(st.lists(st.tuples(st.integers(0, 2**32 - 1), st.integers(0, 32)), max_size=30), st.integers(0, 2**32 - 1))
def test_what_is_denied_stays_denied_and_sets_never_overlap(entries: list[tuple[int, int]], probe: int) -> None:
    texts = tuple(f"{IPv4Address(address)}/{length}" for address, length in entries)
    compiled = compile_policy(EgressPolicy(deny_out=texts))
    address = IPv4Address(probe)
    assert any(address in net for net in compiled.deny) == any(
        address in ipaddress.ip_network(text, strict=False) for text in texts
    )
    # An nftables interval set refuses overlapping elements, and some versions a prefix of length 0.
    assert all(a.broadcast_address < b.network_address for a, b in zip(compiled.deny, compiled.deny[1:], strict=False))
    assert all(net.prefixlen for net in compiled.deny)


@pytest.mark.parametrize(
    "address",
    ["10.0.0.1", "172.16.0.1", "172.31.255.255", "192.168.1.1", "100.64.0.1", "169.254.169.254", "127.0.0.1", "0.0.0.0",
     "224.0.0.1", "239.255.255.255", "240.0.0.1", "255.255.255.255", "192.0.2.1", "198.18.0.1", "203.0.113.9"],
)  # fmt: skip
def test_internal_addresses(address: str) -> None:
    assert any(IPv4Address(address) in net for net in internal_ranges(CIDR, ()))


@pytest.mark.parametrize(
    "address", ["1.1.1.1", "8.8.8.8", "172.15.0.1", "172.32.0.1", "100.128.0.1", "223.255.255.255"]
)
def test_public_addresses(address: str) -> None:
    assert not any(IPv4Address(address) in net for net in internal_ranges(CIDR, ()))


@given(st.integers(0, 2**32 - 1), st.integers(1, 32), st.integers(0, 2**32 - 1))
def test_allow_internal_opens_exactly_its_range(base: int, length: int, probe: int) -> None:
    opened = IPv4Network((base, length), strict=False)
    closed = internal_ranges(CIDR, (str(opened),))
    address = IPv4Address(probe)
    never = [*(IPv4Network(n) for n in ("0.0.0.0/8", "127.0.0.0/8", "169.254.0.0/16", "224.0.0.0/3")), CIDR]
    expected = any(address in net for net in INTERNAL) and address not in opened
    assert any(address in net for net in closed) == (expected or any(address in net for net in never))


def test_a_node_with_public_slot_addresses_denies_them_too() -> None:
    assert any(IPv4Address("44.0.0.2") in net for net in internal_ranges(IPv4Network("44.0.0.0/24"), ()))


def test_bad_settings_are_named() -> None:
    for cidr in ("10.0.0.0/31", "10.0.0.0/8", "x", "10.0.0.1/16", "fd00::/64"):
        with pytest.raises(ConfigError, match=r"network\.cidr"):
            layout(cidr)
    with pytest.raises(ConfigError, match=r"network\.allow_internal"):
        internal_ranges(CIDR, ("10.0.0.1/8",))


def test_the_layout_is_reversible_and_fits_the_kernel_s_names() -> None:
    made = layout()
    last = made.size - 1
    assert made.size == 1 << 14
    assert len(made.link(last)) <= 15
    assert made.slot_address(last) == IPv4Address("10.213.255.254")
    for index in (0, 1, 255, last):
        assert made.index_of_link(made.link(index)) == index
        assert made.index_of_netns(made.netns(index).name) == index
        assert made.index_of_address(str(made.slot_address(index))) == index
        assert made.index_of_address(str(made.host_address(index))) is None
    assert made.index_of_address("10.214.0.2") is None
    assert made.index_of_link("aenv") is made.index_of_netns("aenv-zz-1") is made.index_of_link("eth0") is None
    assert layout(home="/other").tag != made.tag


def test_marks_are_stable_and_never_zero() -> None:
    assert name_mark("example.com") == name_mark("example.com") != name_mark("*.example.com")
    assert all(0 < name_mark(str(n)) < 2**32 for n in range(1000))


def test_a_policy_change_is_one_transaction_of_set_contents() -> None:
    """The rules never change, so there is no moment without them: only sets are emptied and filled."""
    policy = compile_policy(EgressPolicy(internet=False, allow_out=("1.1.1.1", "example.com")))
    commands = rules.policy_change(policy)
    assert {key for command in commands for verb in command.values() for key in verb} == {"set", "element"}
    assert json.loads(json.dumps(commands)) == commands


def test_internal_is_judged_before_anything_a_policy_says() -> None:
    commands = rules.slot_ruleset(layout(), 3, internal_ranges(CIDR, ()), compile_policy(EgressPolicy()), fresh=True)
    egress = [c["add"]["rule"]["expr"] for c in commands if c.get("add", {}).get("rule", {}).get("chain") == "egress"]
    assert egress[0][0]["match"]["right"] == "@internal"
    assert not any("flush" in command for command in commands)
