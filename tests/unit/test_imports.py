"""Imports between the parts point one way, as docs/ARCHITECTURE.md says; the client needs nothing of the server."""

import ast
import sys
from pathlib import Path

import aenv

ROOT = Path(aenv.__file__).parent

LEAVES = {"errors", "config", "home", "threads", "__init__"}
MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "threads": set(),
    "config": {"errors"},
    "home": {"errors"},
    "lifecycle": set(),
    "distro": {"errors"},
    "observability": LEAVES,
    "guest": LEAVES | {"distro"},
    "images": LEAVES | {"distro"},
    "network": LEAVES,
    "vmm": LEAVES | {"guest", "images", "network"},
    "snapshots": LEAVES | {"images"},
    "templates": LEAVES | {"guest", "images", "snapshots"},
    "orchestrator": LEAVES | {"lifecycle", "guest", "images", "network", "vmm", "templates", "snapshots"},
    "proxy": LEAVES | {"orchestrator"},
    "api": LEAVES | {"orchestrator", "templates", "network", "guest"},
    "setup": LEAVES | {"guest", "images", "templates"},
    "doctor": LEAVES | {"guest", "images", "network", "vmm", "templates"},
    "server": LEAVES
    | {"api", "proxy", "orchestrator", "templates", "images", "network", "vmm", "guest", "observability"},
    "cli": LEAVES | {"guest", "images", "snapshots", "templates", "observability", "setup", "doctor", "server"},
}
CLIENT = {"aenv", "httpx", "rich", "typer"}
"""What the base install brings: pure Python."""


def imports(path: Path, *, at_import_only: bool) -> set[str]:
    tree = ast.parse(path.read_text())
    nodes = tree.body if at_import_only else list(ast.walk(tree))
    names: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def part(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def test_imports_point_one_way() -> None:
    wrong = []
    for path in ROOT.rglob("*.py"):
        for name in imports(path, at_import_only=False):
            if name.startswith("aenv.") and (target := name.split(".")[1]) not in MAY_IMPORT.get(part(path), set()) | {
                part(path),
                "__version__",
            }:
                wrong.append(f"{path.relative_to(ROOT)} imports {target}")
    assert wrong == []


def test_there_are_no_circles() -> None:
    done: set[str] = set()

    def visit(name: str, above: tuple[str, ...]) -> None:
        assert name not in above, " -> ".join((*above, name))
        for target in sorted(MAY_IMPORT.get(name, set())):
            visit(target, (*above, name))
        done.add(name)

    for name in MAY_IMPORT:
        visit(name, ())
    assert done >= set(MAY_IMPORT)


def test_the_client_alone_loads_without_the_servers_packages() -> None:
    seen: set[Path] = set()
    foreign: set[str] = set()

    def visit(path: Path) -> None:
        if path in seen:
            return
        seen.add(path)
        for name in imports(path, at_import_only=True):
            if name.startswith("aenv"):
                pieces = name.split(".")[1:]
                for length in range(len(pieces) + 1):
                    place = ROOT.joinpath(*pieces[:length])
                    for candidate in (place.with_suffix(".py"), place / "__init__.py"):
                        if candidate.exists():
                            visit(candidate)
            elif name.split(".")[0] not in sys.stdlib_module_names:
                foreign.add(name.split(".")[0])

    visit(ROOT / "cli" / "main.py")
    assert foreign <= CLIENT
