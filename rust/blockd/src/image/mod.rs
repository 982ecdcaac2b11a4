//! Attached images and what can be done with them.
