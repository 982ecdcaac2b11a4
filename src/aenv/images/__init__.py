"""Disk images: from a template's root file system to a sandbox's own writable disk."""
