//! Which ranges of which files an image has the kernel read ahead.

#![allow(clippy::expect_used)]

mod common;

use std::fs::File;
use std::io::{self, Write};
use std::os::unix::fs::FileExt;
use std::sync::{Arc, Mutex};

use common::pattern;
use overlaybd::{ByteSource, Image, Layer, LayerInfo, LayerWriter, ParentCheck, Stack};

const CHUNK: u64 = 64 << 10;
const CHUNKS: u64 = 64;

/// A file that notes what is asked of it ahead.
struct Noted {
    file: File,
    is_file: bool,
    asked: Mutex<Vec<(u64, u64)>>,
}

impl ByteSource for Noted {
    fn size(&self) -> u64 {
        self.file.metadata().expect("metadata").len()
    }

    fn read_exact_at(&self, buf: &mut [u8], offset: u64) -> io::Result<()> {
        self.file.read_exact_at(buf, offset)
    }

    fn prefetch(&self, offset: u64, len: u64) -> io::Result<()> {
        self.asked.lock().expect("lock").push((offset, len));
        Ok(())
    }

    fn as_file(&self) -> Option<&File> {
        self.is_file.then_some(&self.file)
    }
}

/// A layer of the given chunks, one after the other in its file.
fn layer(chunks: impl Iterator<Item = u64>, is_file: bool) -> (Arc<Noted>, Arc<Layer>) {
    let info = LayerInfo { virtual_size: CHUNKS * CHUNK, ..LayerInfo::default() };
    let mut writer = LayerWriter::new(Vec::new(), info).expect("header");
    for chunk in chunks {
        writer.data(chunk * CHUNK, &pattern(chunk + 1, CHUNK as usize)).expect("data");
    }
    let mut file = tempfile::tempfile().expect("file");
    file.write_all(&writer.finish().expect("finish").0).expect("write");
    let source = Arc::new(Noted { file, is_file, asked: Mutex::default() });
    let layer = Layer::open(source.clone()).expect("layer");
    (source, Arc::new(layer))
}

#[test]
fn only_where_a_layer_is_left_out_in_between() {
    let (base, lowest) = layer(0..CHUNKS, true);
    let (odd, highest) = layer((0..CHUNKS).filter(|chunk| chunk % 2 == 1), true);
    let stack = Stack::open(vec![lowest, highest], ParentCheck::Ignore).expect("stack");
    let image = Image::read_only(Arc::new(stack));
    image.read_ahead(32 * CHUNK, 8 * CHUNK);
    // Every other chunk of the lowest layer, but nothing of the other, in whose file the reader goes straight on.
    let expected: Vec<_> = (32..40).step_by(2).map(|chunk| (4096 + chunk * CHUNK, CHUNK)).collect();
    assert_eq!(*base.asked.lock().expect("lock"), expected);
    assert_eq!(*odd.asked.lock().expect("lock"), []);
    image.read_ahead(CHUNKS * CHUNK, 1);
    image.read_ahead(u64::MAX, u64::MAX);
    assert_eq!(base.asked.lock().expect("lock").len(), expected.len());
}

#[test]
fn sources_that_may_wait_are_left_alone() {
    let (base, lowest) = layer(0..CHUNKS, false);
    let image = Image::read_only(Arc::new(Stack::open(vec![lowest], ParentCheck::Ignore).expect("stack")));
    image.read_ahead(0, u64::MAX);
    assert_eq!(*base.asked.lock().expect("lock"), []);
}
