"""The machine's own apt sources, read from its configuration: all we fetch from the distribution derives from them.

Both formats of sources.list(5) are read; deb822 is written. Run as a script (standard library only, before anything
is installed), `python3 -m aenv.distro.sources backports` prints the stanza that adds the backports suite to the
machine's main archive, or nothing if the machine has it already.
"""

import dataclasses
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

_APT = Path("/etc/apt")
_OS_RELEASE = Path("/etc/os-release")


@dataclass(frozen=True, slots=True)
class Stanza:
    """One source: every suite at every URI. `options` are further deb822 fields (``Signed-By``), in their order."""

    uris: tuple[str, ...]
    suites: tuple[str, ...]
    components: tuple[str, ...]
    options: tuple[tuple[str, str], ...] = ()

    def render(self) -> str:
        """As a deb822 stanza with its final newline."""
        fields = [
            ("Types", "deb"),
            ("URIs", " ".join(self.uris)),
            ("Suites", " ".join(self.suites)),
            ("Components", " ".join(self.components)),
            *self.options,
        ]
        return "".join(f"{name}: {value}\n" for name, value in fields)


@dataclass(frozen=True, slots=True)
class Release:
    """Which distribution this machine runs: os-release's ID (``debian``) and VERSION_CODENAME (``bookworm``)."""

    id: str
    codename: str


def host_release(path: Path = _OS_RELEASE) -> Release:
    """Read os-release. Raises ValueError where it is not of Debian's family."""
    pairs = (line.split("=", 1) for line in path.read_text().splitlines() if "=" in line)
    values = {key: value.strip("\"'") for key, value in pairs}
    release = Release(values.get("ID", ""), values.get("VERSION_CODENAME", ""))
    if release.id not in ("debian", "ubuntu") or not release.codename:
        name = values.get("PRETTY_NAME", "this system")
        raise ValueError(f"{name}: the guest's kernel and root file system come from Debian's or Ubuntu's packages")
    return release


def parse_deb822(text: str) -> Iterator[Stanza]:
    """The enabled ``deb`` stanzas of a .sources file."""
    for block in _blocks(text):
        fields = {name.lower(): value for name, value in block}
        if "deb" not in fields.get("types", "").split() or fields.get("enabled", "yes").lower() in ("no", "false"):
            continue
        named = ("types", "uris", "suites", "components", "enabled")
        yield Stanza(
            uris=tuple(fields.get("uris", "").split()),
            suites=tuple(fields.get("suites", "").split()),
            components=tuple(fields.get("components", "").split()),
            options=tuple((name, value) for name, value in block if name.lower() not in named),
        )


def _blocks(text: str) -> Iterator[list[tuple[str, str]]]:
    block: list[tuple[str, str]] = []
    for line in [*text.splitlines(), ""]:
        if line.startswith("#"):
            continue
        if not line.strip():
            if block:
                yield block
            block = []
        elif line[0].isspace() and block:  # a field continued, such as a key in Signed-By
            name, value = block[-1]
            block[-1] = (name, f"{value}\n{line.rstrip()}")
        else:
            name, _, value = line.partition(":")
            block.append((name.strip(), value.strip()))


def parse_one_line(text: str) -> Iterator[Stanza]:
    """The ``deb`` lines of a .list file."""
    for line in text.splitlines():
        kind, _, rest = line.partition("#")[0].strip().partition(" ")
        if kind != "deb":
            continue
        rest = rest.strip()
        options: tuple[tuple[str, str], ...] = ()
        if rest.startswith("["):
            inside, _, rest = rest[1:].partition("]")
            pairs = (option.partition("=") for option in inside.split())
            options = tuple((_deb822_name(name), value.replace(",", " ")) for name, _, value in pairs)
        words = rest.split()
        if len(words) >= 2:
            yield Stanza((words[0],), (words[1],), tuple(words[2:]), options)


def _deb822_name(option: str) -> str:
    special = {"arch": "Architectures", "lang": "Languages"}
    return special.get(option.lower(), "-".join(part.capitalize() for part in option.split("-")))


def host_stanzas(apt: Path = _APT) -> list[Stanza]:
    """Every enabled source of the machine, in apt's order."""
    stanzas: list[Stanza] = []
    files = [apt / "sources.list", *sorted((apt / "sources.list.d").glob("*"))]
    for file in files:
        if file.suffix == ".sources" and file.is_file():
            stanzas += parse_deb822(file.read_text())
        elif file.suffix == ".list" and file.is_file():
            stanzas += parse_one_line(file.read_text())
    return stanzas


def distribution_archives(release: Release) -> frozenset[tuple[str, str]]:
    """The (URI, suite) pairs whose signed index says they are the distribution's own, as apt knows from its lists.

    Runs apt-get: not for the event loop. Raises ValueError where apt has no lists.
    """
    form = "$(ORIGIN)\t$(REPO_URI)\t$(RELEASE)"
    argv = ["apt-get", "indextargets", "--format", form, "Created-By: Packages"]
    output = subprocess.run(argv, check=True, capture_output=True, text=True, timeout=60).stdout
    rows = [line.split("\t") for line in output.splitlines()]
    archives = frozenset(
        (_normal(row[1]), row[2]) for row in rows if len(row) == 3 and row[0].lower().split()[:1] == [release.id]
    )
    if not archives:
        raise ValueError("apt knows no package lists of this distribution; run: apt-get update")
    return archives


def base_stanzas(stanzas: Iterable[Stanza], release: Release, archives: frozenset[tuple[str, str]]) -> list[Stanza]:
    """What a root file system of this release is built from: its main suite, updates and security, nothing else.

    `archives` as from `distribution_archives`. Mirror lists in local files are replaced by their first mirror, since
    the result is also the guest's own configuration.
    """
    wanted = (release.codename, f"{release.codename}-updates", f"{release.codename}-security")
    result: list[Stanza] = []
    for stanza in stanzas:
        suites = tuple(
            suite
            for suite in stanza.suites
            if suite in wanted and any((_normal(uri), suite) in archives for uri in stanza.uris)
        )
        if suites:
            uris = tuple(_first_mirror(uri) for uri in stanza.uris)
            result.append(dataclasses.replace(stanza, uris=uris, suites=suites))
    if not any(release.codename in stanza.suites for stanza in result):
        raise ValueError(f"no apt source of this machine offers {release.id} {release.codename}")
    return result


def backports_stanza(stanzas: list[Stanza], release: Release, archives: frozenset[tuple[str, str]]) -> Stanza | None:
    """The main archive's stanza with the backports suite in place of its suites; None if a source has it already."""
    suite = f"{release.codename}-backports"
    if any(suite in stanza.suites for stanza in stanzas):
        return None
    for stanza in stanzas:
        uris = tuple(uri for uri in stanza.uris if (_normal(uri), release.codename) in archives)
        if uris and release.codename in stanza.suites:
            return dataclasses.replace(stanza, uris=uris, suites=(suite,))
    raise ValueError(f"no apt source of this machine offers {release.id} {release.codename}")


def _normal(uri: str) -> str:
    """A URI as both apt's output and a configuration file can be brought to."""
    scheme, _, rest = uri.partition(":")
    return f"{scheme.lower()}:/{rest.strip('/')}"


def _first_mirror(uri: str) -> str:
    scheme, _, path = uri.partition(":")
    if scheme != "mirror+file":
        return uri
    for line in Path("/" + path.lstrip("/")).read_text().splitlines():
        if line.strip() and not line.startswith("#"):
            return line.split()[0]
    raise ValueError(f"{path} names no mirror")


def _main(arguments: list[str]) -> int:
    if arguments != ["backports"]:
        print("usage: python3 -m aenv.distro.sources backports", file=sys.stderr)  # noqa: T201
        return 2
    try:
        release = host_release()
        stanza = backports_stanza(host_stanzas(), release, distribution_archives(release))
    except ValueError as error:
        print(error, file=sys.stderr)  # noqa: T201
        return 1
    print(stanza.render() if stanza else "", end="")  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1:]))
