"""The machine's Debian-family distribution: its package sources, its packages, its tools. A leaf: knows errors only."""
