"""Its place makes the helper modules in this folder importable by all tests."""
