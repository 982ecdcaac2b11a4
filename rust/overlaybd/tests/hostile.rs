//! Damaged and malicious files give an error, or data, but never a panic, a hang or unbounded memory.
//!
//! A deterministic relative of the fuzz targets: every good file is truncated, has each field of its headers and index
//! set to nasty values, has bytes flipped and ranges copied over others.

#![allow(clippy::expect_used)]

mod common;
#[path = "common/exercise.rs"]
mod exercise;

use std::alloc::{GlobalAlloc, Layout, System};
use std::io::Write;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::Arc;

use common::{open_rw, pattern};
use overlaybd::zfile::{Algorithm, ZFileOptions, ZFileWriter};
use overlaybd::{Image, LayerInfo, LayerWriter, Stack, Upper, Uuid};

/// The system's allocator, with a count of what is in use.
struct Counting;

static IN_USE: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);

// SAFETY: every call is passed on unchanged to the system's allocator; the counters do not touch memory.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let in_use = IN_USE.fetch_add(layout.size(), Ordering::Relaxed) + layout.size();
        PEAK.fetch_max(in_use, Ordering::Relaxed);
        // SAFETY: the caller keeps the contract of `alloc`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        IN_USE.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: `ptr` came from `alloc` above, hence from `System`, with this layout.
        unsafe { System.dealloc(ptr, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// The most that the files here, none above 200 kB, may ever cost.
const MEMORY_LIMIT: usize = 64 << 20;

const NASTY: [u64; 12] =
    [0, 1, 511, 4095, 4097, 1 << 20, 1 << 32, (1 << 50) - 1, 1 << 59, i64::MAX as u64, u64::MAX - 4095, u64::MAX];

fn layer() -> Vec<u8> {
    let info = LayerInfo {
        virtual_size: 1 << 20,
        uuid: Uuid::from_bytes([1; 16]),
        parent: Uuid::NIL,
        user_tag: b"hostile".to_vec(),
    };
    let mut writer = LayerWriter::new(Vec::new(), info).expect("header");
    for i in 0..10u64 {
        writer.data(i * 40_960, &pattern(i, 4096)).expect("data");
        writer.zero(i * 40_960 + 8192, 512).expect("zero");
    }
    writer.finish().expect("finish").0
}

fn compressed(algorithm: Algorithm) -> Vec<u8> {
    let options = ZFileOptions { algorithm, block_size: 8192, verify: algorithm == Algorithm::Lz4 };
    let mut writer = ZFileWriter::new(Vec::new(), options).expect("header");
    writer.write_all(&layer()).expect("write");
    writer.finish().expect("finish")
}

/// The data file and the index log of an upper that was written to.
fn small_upper(dir: &std::path::Path) -> (Vec<u8>, Vec<u8>) {
    let (data_path, index_path) = (dir.join("data"), dir.join("index"));
    let info = LayerInfo { virtual_size: 1 << 20, uuid: Uuid::from_bytes([1; 16]), ..LayerInfo::default() };
    let upper = Upper::create(open_rw(&data_path), open_rw(&index_path), info).expect("upper");
    let image = Image::writable(Arc::new(Stack::empty()), Arc::new(upper)).expect("image");
    for i in 0..10u64 {
        image.write_at(&pattern(i, 3000), i * 10_000).expect("write");
    }
    image.flush().expect("flush");
    (std::fs::read(&data_path).expect("data"), std::fs::read(&index_path).expect("index"))
}

/// Calls `test` with variations of `good`. `fields` are where header fields and index entries lie.
fn mutate(good: &[u8], fields: &[usize], mut test: impl FnMut(&[u8])) {
    for len in (0..good.len()).step_by(good.len() / 60 + 1).chain([511, 512, 1023, 4095, 4096, 8191, 8192]) {
        test(&good[..len.min(good.len())]);
    }
    let mut bytes = good.to_vec();
    for &at in fields.iter().filter(|at| **at + 8 <= good.len()) {
        for value in NASTY {
            bytes[at..at + 8].copy_from_slice(&value.to_le_bytes());
            test(&bytes);
        }
        for bit in (0..64).step_by(5) {
            bytes[at..at + 8].copy_from_slice(&good[at..at + 8]);
            bytes[at + bit / 8] ^= 1 << (bit % 8);
            test(&bytes);
        }
        bytes[at..at + 8].copy_from_slice(&good[at..at + 8]);
    }
    let noise = pattern(99, 3000);
    for random in noise.chunks_exact(10).take(200) {
        let number = |at: usize| u32::from_le_bytes(random[at..at + 4].try_into().expect("4")) as usize;
        let (from, to, len) = (number(0) % good.len(), number(4) % good.len(), 1 << (random[8] % 12));
        let len = len.min(good.len() - from.max(to));
        bytes.copy_from_slice(good);
        bytes.copy_within(from..from + len, to);
        bytes[from] ^= random[9];
        test(&bytes);
    }
}

fn bounded(what: &str) {
    let peak = PEAK.load(Ordering::Relaxed);
    assert!(peak < MEMORY_LIMIT, "{what}: {peak} bytes");
}

/// Offsets of a header's fields from its start, and of the first index entries from the index's.
fn lsmt_fields(good: &[u8]) -> Vec<usize> {
    let trailer = good.len() - 4096;
    let header = [0, 8, 24, 28, 32, 40, 48, 56, 130];
    let index = trailer - 4096;
    header.iter().flat_map(|at| [*at, trailer + at]).chain((0..4).map(|i| index + i * 8)).collect()
}

/// Good files for the fuzz targets to start from.
#[test]
#[ignore = "writes fuzz/corpus, which is not kept in the repository"]
fn write_corpus() {
    let dir = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("fuzz/corpus/layer");
    std::fs::create_dir_all(&dir).expect("directory");
    let (lz4, zstd) = (compressed(Algorithm::Lz4), compressed(Algorithm::Zstd));
    for (name, bytes) in [("lsmt", layer()), ("lz4", lz4), ("zstd", zstd)] {
        std::fs::write(dir.join(name), bytes).expect("corpus");
    }
    let files = tempfile::tempdir().expect("directory");
    let (data, index) = small_upper(files.path());
    let dir = dir.with_file_name("upper");
    std::fs::create_dir_all(&dir).expect("directory");
    let split = (data.len() as u16).to_le_bytes().to_vec();
    std::fs::write(dir.join("append"), [split, data, index].concat()).expect("corpus");
}

#[test]
fn damaged_layers() {
    let good = layer();
    assert!(exercise::layer(&good));
    let (mut taken, mut refused) = (0, 0);
    mutate(&good, &lsmt_fields(&good), |bytes| match exercise::layer(bytes) {
        true => taken += 1,
        false => refused += 1,
    });
    // Damage to data cannot be seen in plain LSMT; damage to what describes it must be.
    assert!(taken > 100 && refused > 250, "{taken} taken, {refused} refused");
    bounded("layers");
}

#[test]
fn damaged_compressed_layers() {
    for algorithm in [Algorithm::Lz4, Algorithm::Zstd] {
        let good = compressed(algorithm);
        assert!(exercise::layer(&good));
        let trailer = good.len() - 512;
        let header = [0, 24, 28, 32, 40, 48, 56, 64, 72, 80, 84, 88];
        let fields: Vec<usize> = header
            .iter()
            .flat_map(|at| [*at, trailer + at])
            .chain((1..6).map(|i| trailer - i * 4))
            .chain([512, 520, 4000])
            .collect();
        mutate(&good, &fields, |bytes| {
            exercise::layer(bytes);
        });
        // Again without the digests, so that what lies behind them is reached.
        let mut bare = good.clone();
        for at in [32, trailer + 32] {
            bare[at] &= !0b1_0000;
        }
        assert!(exercise::layer(&bare));
        mutate(&bare, &fields, |bytes| {
            exercise::layer(bytes);
        });
    }
    bounded("compressed layers");
}

#[test]
fn damaged_uppers() {
    // Memory, where there is such a place: thousands of flushes of a disk would only take time.
    let dir = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).expect("directory");
    let (data_path, index_path) = (dir.path().join("data"), dir.path().join("index"));
    let (data, index) = small_upper(dir.path());
    let run = |data: &[u8], index: &[u8]| {
        std::fs::write(&data_path, data).expect("data");
        std::fs::write(&index_path, index).expect("index");
        exercise::upper(open_rw(&data_path), Some(open_rw(&index_path)))
    };
    assert!(run(&data, &index));
    let header = [0, 24, 28, 32, 40, 48, 56];
    let entries = (0..6).map(|i| 4096 + i * 8);
    let fields: Vec<usize> = header.into_iter().chain(entries).collect();
    mutate(&index, &fields, |index| {
        run(&data, index);
    });
    mutate(&data, &header, |data| {
        run(data, &index);
    });
    bounded("uppers");
}

/// A source that claims to be enormous and is all zeroes but for its headers.
struct Huge {
    size: u64,
    good: Vec<u8>,
}

impl overlaybd::ByteSource for Huge {
    fn size(&self) -> u64 {
        self.size
    }

    fn read_exact_at(&self, buf: &mut [u8], offset: u64) -> std::io::Result<()> {
        let trailer = self.size - 4096;
        buf.fill(0);
        if offset == 0 {
            buf.copy_from_slice(&self.good[..buf.len()]);
        } else if offset >= trailer {
            let at = self.good.len() - 4096 + (offset - trailer) as usize;
            buf.copy_from_slice(&self.good[at..at + buf.len()]);
        }
        Ok(())
    }
}

#[test]
fn a_huge_sparse_file_costs_nothing() {
    use overlaybd::{Layer, ParentCheck};
    let mut good = layer();
    let trailer = good.len() - 4096;
    for entries in [1u64 << 20, 1 << 26, 1 << 40, u64::MAX / 16] {
        good[trailer + 32..trailer + 40].copy_from_slice(&4096u64.to_le_bytes());
        good[trailer + 40..trailer + 48].copy_from_slice(&entries.to_le_bytes());
        let source = Arc::new(Huge { size: 1 << 62, good: good.clone() });
        let layer = Layer::open(source).expect("headers are fine");
        assert!(Stack::open(vec![Arc::new(layer)], ParentCheck::Ignore).is_err());
    }
    bounded("huge");
}
