//! Many threads on one image, with live snapshots and compactions in between.

#![allow(clippy::expect_used)]

mod common;

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Barrier};

use common::{pattern, Mode, Rig};
use overlaybd::{compact, ByteSource, CompactOptions, Layer, LayerInfo, MemorySource, Upper, Uuid};

const BLOCK: usize = 4096;
const BLOCKS: u64 = 256;
const WRITERS: u64 = 4;
const ROUNDS: u64 = 150;

/// A block that says which one it is and how often it was written, all over.
fn stamp(block: u64, round: u64) -> Vec<u8> {
    [block.to_le_bytes(), round.to_le_bytes()].concat().repeat(BLOCK / 16)
}

fn parse(bytes: &[u8]) -> (u64, u64) {
    let number = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("8 bytes"));
    (number(0), number(8))
}

fn run(mode: Mode) {
    let dir = tempfile::tempdir().expect("directory");
    let rig = Rig::create(dir.path(), mode, BLOCKS * BLOCK as u64);
    let image = &rig.image;
    // What each block held at least when a reader began.
    let written: Vec<AtomicU64> = (0..BLOCKS).map(|_| AtomicU64::new(0)).collect();
    let running = AtomicBool::new(true);
    std::thread::scope(|scope| {
        let writers: Vec<_> = (0..WRITERS)
            .map(|writer| {
                let written = &written;
                scope.spawn(move || {
                    for round in 1..=ROUNDS {
                        let random = u64::from_le_bytes(pattern(writer << 32 | round, 8).try_into().expect("8"));
                        let block = (random >> 8) % (BLOCKS / WRITERS) * WRITERS + writer;
                        image.write_at(&stamp(block, round), block * BLOCK as u64).expect("write");
                        written[block as usize].store(round, Ordering::Release);
                        if round % 40 == 0 {
                            image.flush().expect("flush");
                        }
                    }
                })
            })
            .collect();
        for reader in 0..2u64 {
            let (written, running) = (&written, &running);
            scope.spawn(move || {
                let mut buf = vec![0; BLOCK];
                let mut n = reader;
                while running.load(Ordering::Relaxed) {
                    n = (n * 31 + 7) % BLOCKS;
                    let least = written[n as usize].load(Ordering::Acquire);
                    image.read_at(&mut buf, n * BLOCK as u64).expect("read");
                    let (block, round) = parse(&buf);
                    assert!(round >= least, "block {n} went back from {least} to {round}");
                    // Beside a write to the same block, the rest of it may be of another round, as on any disk.
                    assert!(round == 0 || block == n, "block {n} holds {block}");
                }
            });
        }
        let sealer = scope.spawn(|| {
            for name in 1..20 {
                let parent = image.upper().expect("upper").info().uuid;
                let info = LayerInfo {
                    virtual_size: image.size(),
                    uuid: Uuid::from_bytes([name; 16]),
                    parent,
                    user_tag: vec![],
                };
                let data = common::open_rw(&dir.path().join(format!("{name}.data")));
                let next = match mode {
                    Mode::Append => {
                        Upper::create(data, common::open_rw(&dir.path().join(format!("{name}.index"))), info)
                    }
                    Mode::Sparse => Upper::create_sparse(data, info),
                };
                image.seal_and_continue(Arc::new(next.expect("upper"))).expect("seal");
                let stack = image.stack();
                if let [.., lower, upper] = stack.layers() {
                    let run = [lower.clone(), upper.clone()];
                    let options = CompactOptions { is_base: stack.layers().len() == 2, ..CompactOptions::default() };
                    let (bytes, _) = compact(&run, Vec::new(), &options).expect("compact");
                    let layer = Layer::open(Arc::new(MemorySource::new(bytes))).expect("layer");
                    image.replace_layers(&run, &Arc::new(layer)).expect("replace");
                }
            }
        });
        let results: Vec<_> = writers.into_iter().map(|writer| writer.join()).collect();
        let sealed = sealer.join();
        running.store(false, Ordering::Relaxed);
        assert!(results.iter().all(Result::is_ok) && sealed.is_ok());
    });
    let bytes = rig.read_all();
    for (block, bytes) in bytes.chunks(BLOCK).enumerate() {
        match written[block].load(Ordering::Relaxed) {
            0 => assert!(bytes.iter().all(|byte| *byte == 0)),
            round => assert!(bytes == stamp(block as u64, round)),
        }
    }
    assert_eq!(image.stack().layers().len(), 1, "every seal was followed by a compaction");
}

#[test]
fn append_only() {
    run(Mode::Append);
}

#[test]
fn sparse() {
    run(Mode::Sparse);
}

/// A source whose reads get stuck between two barriers once it is armed.
struct Slow {
    inner: MemorySource,
    entered: Barrier,
    leave: Barrier,
    armed: AtomicBool,
}

impl ByteSource for Slow {
    fn size(&self) -> u64 {
        self.inner.size()
    }

    fn read_exact_at(&self, buf: &mut [u8], offset: u64) -> std::io::Result<()> {
        if self.armed.load(Ordering::SeqCst) {
            // Passes only if all readers are in here at the same time.
            self.entered.wait();
            self.leave.wait();
        }
        self.inner.read_exact_at(buf, offset)
    }
}

#[test]
fn reads_run_in_parallel_and_never_block_writes_or_seals() {
    let info = LayerInfo { virtual_size: 1 << 20, uuid: Uuid::from_bytes([1; 16]), ..LayerInfo::default() };
    let mut writer = overlaybd::LayerWriter::new(Vec::new(), info).expect("header");
    writer.data(0, &pattern(1, 65536)).expect("data");
    let (bytes, _) = writer.finish().expect("finish");
    // Three readers and the test itself, which lets them go only after it has written and sealed.
    let slow = Arc::new(Slow {
        inner: MemorySource::new(bytes),
        entered: Barrier::new(4),
        leave: Barrier::new(4),
        armed: AtomicBool::new(false),
    });
    let layer = Arc::new(Layer::open(slow.clone()).expect("layer"));
    let stack = overlaybd::Stack::open(vec![layer], overlaybd::ParentCheck::Enforce).expect("stack");
    let new_upper = |uuid: u8, parent: u8| {
        let (uuid, parent) = (Uuid::from_bytes([uuid; 16]), Uuid::from_bytes([parent; 16]));
        let info = LayerInfo { virtual_size: 1 << 20, uuid, parent, user_tag: vec![] };
        let file = || tempfile::tempfile().expect("file");
        Arc::new(Upper::create(file(), file(), info).expect("upper"))
    };
    let image = overlaybd::Image::writable(Arc::new(stack), new_upper(2, 1)).expect("image");
    slow.armed.store(true, Ordering::SeqCst);
    std::thread::scope(|scope| {
        for reader in 0..3u64 {
            let image = &image;
            scope.spawn(move || {
                let mut buf = [0; 512];
                image.read_at(&mut buf, reader * 4096).expect("read");
                assert!(buf == pattern(1, 65536)[reader as usize * 4096..][..512]);
            });
        }
        slow.entered.wait();
        image.write_at(&[1; 4096], 0).expect("write while reads are stuck");
        image.flush().expect("flush while reads are stuck");
        image.seal_and_continue(new_upper(3, 2)).expect("seal while reads are stuck");
        image.write_at(&[2; 4096], 4096).expect("write after the seal");
        let mut buf = [0; 8192];
        image.read_at(&mut buf, 0).expect("read what is not stuck");
        assert!(buf[..4096] == [1; 4096] && buf[4096..] == [2; 4096]);
        slow.leave.wait();
    });
}
