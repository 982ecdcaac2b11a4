"""Templates: names for what sandboxes start from."""
