//! LSMT files put together byte by byte from `docs/formats/overlaybd.md`, not with this crate's own code.

#![allow(clippy::expect_used)]

mod common;

use std::io::{Seek, SeekFrom, Write};
use std::sync::Arc;

use common::{file_source, open_rw, pattern};
use overlaybd::{Image, Layer, LayerInfo, LayerWriter, MemorySource, OpenUpperError, ParentCheck, Stack, Upper, Uuid};

const UUID: &str = "0F1E2D3C-4B5A-4978-8796-A5B4C3D2E1F0";
const PARENT: &str = "11111111-2222-4333-8444-555555555555";
const NIL: &str = "00000000-0000-0000-0000-000000000000";
const PADDING: (u64, u64, u64, bool) = ((1 << 50) - 1, 0, 0, false);

/// Section "Header and trailer".
fn header(flags: u32, index_offset: u64, index_size: u64, virtual_size: u64, uuid: &str, parent: &str) -> Vec<u8> {
    let mut block = Vec::new();
    block.extend_from_slice(b"LSMT\x00\x01\x02\x00");
    block.extend_from_slice(&[0x65, 0x7E, 0x63, 0xD2, 0x94, 0x44, 0x08, 0x4C]);
    block.extend_from_slice(&[0xA2, 0xD2, 0xC8, 0xEC, 0x4F, 0xCF, 0xAE, 0x8A]);
    block.extend_from_slice(&390u32.to_le_bytes());
    block.extend_from_slice(&flags.to_le_bytes());
    for field in [index_offset, index_size, virtual_size] {
        block.extend_from_slice(&field.to_le_bytes());
    }
    for text in [uuid, parent] {
        block.extend_from_slice(text.as_bytes());
        block.push(0);
    }
    assert_eq!(block.len(), 130);
    block.extend_from_slice(&[0, 0, 1, 1]);
    block.resize(4096, 0);
    block
}

const DATA_HEADER: u32 = 0b00_0011;
const DATA_HEADER_SEALED: u32 = 0b00_0111;
const DATA_HEADER_SPARSE: u32 = 0b01_0011;
const TRAILER: u32 = 0b00_0110;
const INDEX_HEADER: u32 = 0b00_0001;

/// Section "Index entry": (offset, length, moffset, zeroed), in sectors.
fn entry((offset, length, moffset, zeroed): (u64, u64, u64, bool)) -> [u8; 16] {
    let word = u128::from(offset) | u128::from(length) << 50 | u128::from(moffset) << 64 | u128::from(zeroed) << 119;
    word.to_le_bytes()
}

fn index(entries: &[(u64, u64, u64, bool)]) -> Vec<u8> {
    entries.iter().flat_map(|e| entry(*e)).collect()
}

fn info(parent: &str) -> LayerInfo {
    LayerInfo {
        virtual_size: 64 * 512,
        uuid: Uuid::parse(UUID).expect("uuid"),
        parent: Uuid::parse(parent).expect("uuid"),
        user_tag: Vec::new(),
    }
}

fn read(layers: Vec<Vec<u8>>) -> Vec<u8> {
    let open = |bytes| Arc::new(Layer::open(Arc::new(MemorySource::new(bytes))).expect("layer"));
    let stack = Stack::open(layers.into_iter().map(open).collect(), ParentCheck::Enforce).expect("stack");
    let mut bytes = vec![0xEE; stack.virtual_size() as usize];
    assert_eq!(stack.read_at(&mut bytes, 0).expect("read"), bytes.len());
    bytes
}

/// What overlaybd's `commit` writes: sealed header, index padded to 4096 bytes and counted with its padding.
fn committed(data: &[u8]) -> Vec<u8> {
    let mut entries = vec![(2, 3, 8, false), (10, 4, 11, true), (20, 1, 11, false)];
    entries.resize(256, PADDING);
    [
        header(DATA_HEADER_SEALED, 0, 0, 64 * 512, UUID, NIL),
        data.to_vec(),
        index(&entries),
        header(TRAILER, 4096 + 4 * 512, 256, 64 * 512, UUID, NIL),
    ]
    .concat()
}

/// What overlaybd's `close_seal` leaves: unsealed header, garbage between writes, exact count, index filled up to
/// 512 bytes with whatever was in memory.
fn sealed_in_place(data: &[u8]) -> Vec<u8> {
    [
        header(DATA_HEADER, 0, 0, 64 * 512, PARENT, UUID),
        data.to_vec(),
        index(&[(3, 1, 9, false), (12, 1, 8, false), (20, 1, 11, true)]),
        vec![0xCC; 512 - 48],
        header(TRAILER, 4096 + 4 * 512, 3, 64 * 512, PARENT, UUID),
    ]
    .concat()
}

#[test]
fn layers_as_overlaybd_writes_them_are_read() {
    let (lower, upper) = (pattern(1, 4 * 512), pattern(2, 4 * 512));
    let mut expected = vec![0u8; 64 * 512];
    expected[2 * 512..5 * 512].copy_from_slice(&lower[..3 * 512]);
    expected[20 * 512..21 * 512].copy_from_slice(&lower[3 * 512..]);
    assert!(read(vec![committed(&lower)]) == expected);

    expected[3 * 512..4 * 512].copy_from_slice(&upper[512..1024]);
    expected[12 * 512..13 * 512].copy_from_slice(&upper[..512]);
    expected[20 * 512..21 * 512].fill(0);
    assert!(read(vec![committed(&lower), sealed_in_place(&upper)]) == expected);
}

#[test]
fn a_streamed_layer_is_what_overlaybd_would_commit() {
    let data = pattern(1, 4 * 512);
    let mut writer = LayerWriter::new(Vec::new(), info(NIL)).expect("header");
    // Contiguous pieces become one entry.
    writer.data(2 * 512, &data[..1024]).expect("data");
    writer.data(4 * 512, &data[1024..1536]).expect("data");
    writer.zero(10 * 512, 4 * 512).expect("zero");
    writer.data(20 * 512, &data[1536..]).expect("data");
    let (bytes, summary) = writer.finish().expect("finish");
    assert!(bytes == committed(&data));
    assert_eq!((summary.size, summary.data, summary.extents), (bytes.len() as u64, 4 * 512, 3));
}

#[test]
fn an_uppers_files_are_what_overlaybd_would_write() {
    let dir = tempfile::tempdir().expect("directory");
    let (data, log) = (dir.path().join("data"), dir.path().join("index"));
    let upper = Arc::new(Upper::create(open_rw(&data), open_rw(&log), info(PARENT)).expect("upper"));
    let image = Image::writable(Arc::new(Stack::empty()), upper.clone()).expect("image");
    let bytes = pattern(3, 5 * 512);
    image.write_at(&bytes[..1024], 30 * 512).expect("write");
    image.write_at(&bytes[1024..2048], 31 * 512).expect("write");
    image.zero_at(30 * 512, 512).expect("zero");
    image.write_at(&bytes[2048..], 5 * 512).expect("write");
    image.flush().expect("flush");

    let mut expected = [header(DATA_HEADER, 0, 0, 64 * 512, UUID, PARENT), bytes.clone()].concat();
    assert!(std::fs::read(&data).expect("data") == expected);
    let log_entries = index(&[(30, 2, 8, false), (31, 2, 10, false), (30, 1, 8, true), (5, 1, 12, false)]);
    let expected_log = [header(INDEX_HEADER, 4096, 0, 64 * 512, UUID, PARENT), log_entries].concat();
    assert!(std::fs::read(&log).expect("log") == expected_log);

    let layer = image.seal().expect("seal");
    let mut entries = vec![(5, 1, 12, false), (30, 1, 8, true), (31, 2, 10, false)];
    entries.resize(32, PADDING);
    expected.extend(index(&entries));
    expected.extend(header(TRAILER, 4096 + 5 * 512, 3, 64 * 512, UUID, PARENT));
    assert!(std::fs::read(&data).expect("data") == expected);
    assert_eq!(layer.info(), &info(PARENT));
}

#[test]
fn an_upper_as_overlaybd_writes_it_is_opened() {
    let dir = tempfile::tempdir().expect("directory");
    let (data, log) = (dir.path().join("data"), dir.path().join("index"));
    let bytes = pattern(4, 6 * 512);
    let mut expected = vec![0u8; 64 * 512];
    std::fs::write(&data, [header(DATA_HEADER, 0, 0, 64 * 512, UUID, NIL), bytes.clone()].concat()).expect("data");
    // Overwrites, a discard, and a group commit's padding in the middle.
    let entries = [(0, 4, 8, false), PADDING, PADDING, (2, 1, 12, false), (3, 1, 13, true), (50, 1, 13, false)];
    let log_bytes = [header(INDEX_HEADER, 4096, 0, 64 * 512, UUID, NIL), index(&entries)].concat();
    std::fs::write(&log, &log_bytes).expect("log");
    expected[..1024].copy_from_slice(&bytes[..1024]);
    expected[1024..1536].copy_from_slice(&bytes[4 * 512..5 * 512]);
    expected[50 * 512..51 * 512].copy_from_slice(&bytes[5 * 512..]);

    let upper = Upper::open(open_rw(&data), Some(open_rw(&log))).expect("upper");
    let image = Image::writable(Arc::new(Stack::empty()), Arc::new(upper)).expect("image");
    let mut got = vec![0xEE; 64 * 512];
    image.read_at(&mut got, 0).expect("read");
    assert!(got == expected);
    assert!(matches!(Upper::open(open_rw(&data), None), Err(OpenUpperError::NoLog)));
}

#[test]
fn a_sparse_upper_is_laid_out_as_overlaybd_does() {
    let dir = tempfile::tempdir().expect("directory");
    let path = dir.path().join("data");
    let size = 64 * 4096;
    let bytes = pattern(5, 2 * 4096);
    let mut file = open_rw(&path);
    file.write_all(&header(DATA_HEADER_SPARSE, 0, 0, size, UUID, NIL)).expect("header");
    file.seek(SeekFrom::Start(4096 + 7 * 4096)).expect("seek");
    file.write_all(&bytes).expect("data");
    file.set_len(4096 + size).expect("length");

    let upper = Arc::new(Upper::open(file, None).expect("upper"));
    assert!(upper.is_sparse());
    let image = Image::writable(Arc::new(Stack::empty()), upper).expect("image");
    let mut expected = vec![0u8; size as usize];
    expected[7 * 4096..9 * 4096].copy_from_slice(&bytes);
    let mut got = vec![0xEE; size as usize];
    image.read_at(&mut got, 0).expect("read");
    assert!(got == expected);

    image.write_at(&bytes[..4096], 20 * 4096).expect("write");
    let layer = image.seal().expect("seal");
    layer.sync().expect("sync");
    let file = std::fs::read(&path).expect("file");
    assert!(file[..4096] == header(DATA_HEADER, 0, 0, size, UUID, NIL), "a sealed layer is no longer a sparse upper");
    assert!(file[4096 + 20 * 4096..][..4096] == bytes[..4096]);
    let tail = &file[4096 + size as usize..];
    let mut entries = vec![(56, 16, 64, false), (160, 8, 168, false)];
    entries.resize(32, PADDING);
    assert!(tail[..512] == index(&entries));
    assert!(tail[512..] == header(TRAILER, 4096 + size, 2, size, UUID, NIL));
    assert!(matches!(Upper::open(open_rw(&path), None), Err(OpenUpperError::Sealed)));
    assert!(Layer::open(file_source(&path)).is_ok());
}

#[test]
fn parents_are_checked() {
    let layers = |bytes: Vec<Vec<u8>>| -> Vec<Arc<Layer>> {
        bytes.into_iter().map(|b| Arc::new(Layer::open(Arc::new(MemorySource::new(b))).expect("layer"))).collect()
    };
    let (lower, upper) = (committed(&[1; 2048]), sealed_in_place(&[2; 2048]));
    assert!(Stack::open(layers(vec![lower.clone(), upper.clone()]), ParentCheck::Enforce).is_ok());
    // A layer whose parent is itself, and layers in the wrong order: no cycle can be stacked.
    assert!(Stack::open(layers(vec![upper.clone(), upper.clone()]), ParentCheck::Enforce).is_err());
    assert!(Stack::open(layers(vec![upper.clone(), lower.clone(), upper.clone()]), ParentCheck::Enforce).is_ok());
    let lowest = Stack::open(layers(vec![lower]), ParentCheck::Enforce).expect("one");
    assert!(lowest.extend(&layers(vec![upper.clone()]), ParentCheck::Enforce).is_ok());
    assert!(lowest.extend(&layers(vec![upper.clone(), upper.clone()]), ParentCheck::Enforce).is_err());
    assert!(Stack::open(layers(vec![upper.clone(), upper]), ParentCheck::Ignore).is_ok());
}

#[test]
fn at_most_255_layers() {
    let layer = Arc::new(Layer::open(Arc::new(MemorySource::new(committed(&[9; 2048])))).expect("layer"));
    let stack = Stack::open(vec![layer.clone(); 255], ParentCheck::Ignore).expect("255");
    let mut buf = [0; 512];
    stack.read_at(&mut buf, 1024).expect("read");
    assert_eq!(buf, [9; 512]);
    assert!(stack.extend(std::slice::from_ref(&layer), ParentCheck::Ignore).is_err());
    assert!(Stack::open(vec![layer; 256], ParentCheck::Ignore).is_err());
}
