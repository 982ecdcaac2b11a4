//! Any bytes as the two files of an upper; the first two bytes say where the index log begins.
//!
//! `cargo +nightly fuzz run upper` in `rust/overlaybd`.

#![no_main]

#[path = "../../tests/common/exercise.rs"]
#[allow(dead_code)]
mod exercise;

use std::fs::File;
use std::io::Write;

fn file(bytes: &[u8]) -> File {
    let mut file = tempfile::tempfile().expect("temporary file");
    file.write_all(bytes).expect("temporary file");
    file
}

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| {
    if let [a, b, files @ ..] = bytes {
        let middle = usize::from(u16::from_le_bytes([*a, *b])).min(files.len());
        let (data, index) = files.split_at(middle);
        exercise::upper(file(data), Some(file(index)));
    }
});
