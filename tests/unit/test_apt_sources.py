from pathlib import Path

import pytest

from aenv.distro.packages import Package, parse_records
from aenv.distro.sources import (
    Release,
    Stanza,
    backports_stanza,
    base_stanzas,
    host_release,
    host_stanzas,
    parse_deb822,
    parse_one_line,
)

BOOKWORM = Release("debian", "bookworm")
ARCHIVES = frozenset(
    {
        ("http:/mirror.test/debian", "bookworm"),
        ("http:/mirror.test/debian", "bookworm-updates"),
        ("http:/mirror.test/security", "bookworm-security"),
        ("http:/mirror.test/debian", "bookworm-backports"),
    }
)

DEB822 = """\
# the machine's mirror
Types: deb deb-src
URIs: http://mirror.test/debian
# kept as written
Suites: bookworm bookworm-updates
Components: main contrib
Signed-By: /usr/share/keyrings/archive.gpg

Types: deb
URIs: http://mirror.test/security/
Suites: bookworm-security
Components: main
Signed-By:
 -----BEGIN PGP PUBLIC KEY BLOCK-----
 .
 mQ==
 -----END PGP PUBLIC KEY BLOCK-----

Enabled: no
Types: deb
URIs: http://off.test/
Suites: bookworm
Components: main

Types: deb-src
URIs: http://mirror.test/debian
Suites: bookworm
Components: main
"""

ONE_LINE = """\
# deb http://commented.test/ bookworm main
deb http://mirror.test/debian/ bookworm main contrib # trailing
deb-src http://mirror.test/debian bookworm main
deb [arch=amd64 signed-by=/usr/share/keyrings/a.gpg] http://mirror.test/security bookworm-security main
deb [ trusted=yes ] http://other.test/ bookworm main
"""


def test_deb822_fields_and_inline_keys_survive() -> None:
    first, second = parse_deb822(DEB822)
    assert first == Stanza(
        ("http://mirror.test/debian",),
        ("bookworm", "bookworm-updates"),
        ("main", "contrib"),
        (("Signed-By", "/usr/share/keyrings/archive.gpg"),),
    )
    assert list(parse_deb822(second.render())) == [second]
    assert " mQ==\n" in second.render()


def test_one_line_format_becomes_deb822() -> None:
    first, second, third = parse_one_line(ONE_LINE)
    assert first == Stanza(("http://mirror.test/debian/",), ("bookworm",), ("main", "contrib"))
    assert second.options == (("Architectures", "amd64"), ("Signed-By", "/usr/share/keyrings/a.gpg"))
    assert third.render() == "Types: deb\nURIs: http://other.test/\nSuites: bookworm\nComponents: main\nTrusted: yes\n"


def test_base_takes_the_distributions_own_suites_only() -> None:
    stanzas = [
        *parse_one_line(
            "deb http://thirdparty.test/ bookworm main\ndeb http://mirror.test/debian bookworm-backports main"
        ),
        *parse_deb822(DEB822),
    ]
    found = base_stanzas(stanzas, BOOKWORM, ARCHIVES)
    assert [stanza.suites for stanza in found] == [("bookworm", "bookworm-updates"), ("bookworm-security",)]
    assert all("mirror.test" in uri for stanza in found for uri in stanza.uris)


def test_base_needs_the_main_suite() -> None:
    with pytest.raises(ValueError, match="debian bookworm"):
        base_stanzas(parse_one_line("deb http://thirdparty.test/ bookworm main"), BOOKWORM, ARCHIVES)


def test_mirror_list_is_replaced_by_its_first_mirror(tmp_path: Path) -> None:
    mirrors = tmp_path / "mirrors.list"
    mirrors.write_text("# best first\nhttps://near.test/debian\tpriority:1\nhttps://far.test/debian\n")
    source = f"mirror+file:{mirrors}"
    archives = frozenset({(f"mirror+file:/{str(mirrors).strip('/')}", "bookworm")})
    (found,) = base_stanzas([Stanza((source,), ("bookworm",), ("main",))], BOOKWORM, archives)
    assert found.uris == ("https://near.test/debian",)


def test_backports_copies_the_main_archive_only() -> None:
    stanza = backports_stanza(list(parse_deb822(DEB822)), BOOKWORM, ARCHIVES)
    assert stanza == Stanza(
        ("http://mirror.test/debian",),
        ("bookworm-backports",),
        ("main", "contrib"),
        (("Signed-By", "/usr/share/keyrings/archive.gpg"),),
    )


def test_backports_that_are_there_are_not_added_again() -> None:
    there = [*parse_deb822(DEB822), Stanza(("http://mirror.test/debian",), ("bookworm-backports",), ("main",))]
    assert backports_stanza(there, BOOKWORM, ARCHIVES) is None


def test_host_sources_are_read_as_apt_reads_them(tmp_path: Path) -> None:
    (tmp_path / "sources.list").write_text("deb http://one.test/ bookworm main\n")
    directory = tmp_path / "sources.list.d"
    directory.mkdir()
    (directory / "b.sources").write_text("Types: deb\nURIs: http://three.test/\nSuites: s\nComponents: main\n")
    (directory / "a.list").write_text("deb http://two.test/ s main\n")
    (directory / "c.list.disabled").write_text("deb http://off.test/ s main\n")
    assert [stanza.uris[0] for stanza in host_stanzas(tmp_path)] == [
        "http://one.test/",
        "http://two.test/",
        "http://three.test/",
    ]


def test_other_distributions_are_named(tmp_path: Path) -> None:
    file = tmp_path / "os-release"
    file.write_text('ID=fedora\nPRETTY_NAME="Fedora 43"\n')
    with pytest.raises(ValueError, match="Fedora 43"):
        host_release(file)
    file.write_text('ID=ubuntu\nVERSION_CODENAME="noble"\n')
    assert host_release(file) == Release("ubuntu", "noble")


def test_package_records_and_their_pinned_dependencies() -> None:
    text = """\
Package: linux-image-cloud-amd64
Version: 6.12.95-1~bpo12+1
Depends: linux-image-6.12.95-cloud-amd64 (= 6.12.95-1~bpo12+1), kmod
Description: meta package
 for cloud

Package: linux-image-cloud-amd64
Version: 6.1.1-3
Depends: linux-image-6.1.0-57-cloud-amd64:any | other
"""
    newer, older = parse_records(text)
    assert str(newer) == "linux-image-cloud-amd64=6.12.95-1~bpo12+1"
    assert newer.dependencies(r"linux-image-\d.*") == [("linux-image-6.12.95-cloud-amd64", "6.12.95-1~bpo12+1")]
    assert older.dependencies(r"linux-image-\d.*") == [("linux-image-6.1.0-57-cloud-amd64", None)]
    assert Package("a", "1").dependencies(".*") == []
