//! Any bytes as a layer: plain, compressed or in a tar archive.
//!
//! `cargo +nightly fuzz run layer` in `rust/overlaybd`.

#![no_main]

#[path = "../../tests/common/exercise.rs"]
#[allow(dead_code)]
mod exercise;

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    exercise::layer(bytes);
});
