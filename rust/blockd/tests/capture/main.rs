//! Captures of real processes.

// Tests say what they expect, also outside of their own functions.
#![allow(clippy::expect_used)]

mod faults;
mod guest;
mod history;
mod kinds;
mod staged;
