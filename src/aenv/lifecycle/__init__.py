"""The pure state machine of a sandbox: events in, instructions out. No I/O, no clock, no awaits."""
