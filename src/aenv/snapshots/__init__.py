"""States of sandboxes at rest: checkpoints and what they are made of."""
