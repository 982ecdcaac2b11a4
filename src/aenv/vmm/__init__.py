"""Virtual machine monitors: one Protocol, a driver per VMM, and a complete in-memory fake."""
