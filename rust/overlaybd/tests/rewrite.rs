//! Where an append-only upper puts what is written again.

#![allow(clippy::expect_used)]

mod common;

use std::os::unix::fs::FileExt;

use common::{open_rw, pattern, Mode, Rig};
use overlaybd::UpperStats;

const SIZE: u64 = 32 << 20;
const MIB: u64 = 1 << 20;

fn stats(rig: &Rig) -> UpperStats {
    rig.image.upper().expect("upper").stats()
}

fn read(rig: &Rig, offset: u64, len: u64) -> Vec<u8> {
    let mut bytes = vec![0xEE; len as usize];
    rig.image.read_at(&mut bytes, offset).expect("read");
    bytes
}

#[test]
fn what_lies_in_one_piece_is_replaced_there() {
    let dir = tempfile::tempdir().expect("directory");
    let rig = Rig::create(dir.path(), Mode::Append, SIZE);
    let mut model = pattern(1, SIZE as usize);
    model.chunks(MIB as usize).zip(0..).for_each(|(part, i)| rig.image.write_at(part, i * MIB).expect("write"));
    let before = stats(&rig);
    // A sector, a part that crosses entries (of at most 8 MiB less a sector), and an unaligned one.
    for (seed, offset, len) in [(2, 4096, 512), (3, 7 * MIB, 2 * MIB), (4, 100, 5000)] {
        let bytes = pattern(seed, len as usize);
        rig.image.write_at(&bytes, offset).expect("write");
        model[offset as usize..][..len as usize].copy_from_slice(&bytes);
    }
    assert_eq!(stats(&rig), before);
    assert!(read(&rig, 0, SIZE) == model);
    rig.image.flush().expect("flush");
    drop(rig);
    assert!(read(&Rig::reopen(dir.path(), Mode::Append, SIZE), 0, SIZE) == model);
}

#[test]
fn pieces_zeroes_and_holes_are_appended() {
    let dir = tempfile::tempdir().expect("directory");
    let rig = Rig::create(dir.path(), Mode::Append, SIZE);
    rig.image.write_at(&[1; 4096], 4096).expect("write");
    rig.image.write_at(&[2; 4096], 0).expect("write");
    rig.image.write_at(&[3; 4096], 16384).expect("write");
    rig.image.zero_at(8192, 4096).expect("zero");
    let mut stored = stats(&rig).stored;
    for (offset, len) in [(0, 8192), (8192, 512), (4096, 8192), (12288, 8192)] {
        rig.image.write_at(&vec![4; len], offset).expect("write");
        stored += len as u64;
        assert_eq!(stats(&rig).stored, stored, "{len} bytes at {offset}");
    }
    assert!(read(&rig, 0, 20480) == [4; 20480]);
}

/// Entries of another writer may share sectors, and the bytes of a seal that did not happen may follow the data.
#[test]
fn nothing_older_than_the_opening_is_written_over() {
    let dir = tempfile::tempdir().expect("directory");
    let rig = Rig::create(dir.path(), Mode::Append, SIZE);
    rig.image.write_at(&[1; 4096], 0).expect("write");
    rig.image.flush().expect("flush");
    drop(rig);
    // The same place again, 1 MiB further.
    let log = open_rw(&dir.path().join("0.index"));
    let mut entry = [0; 16];
    log.read_exact_at(&mut entry, 4096).expect("entry");
    let logical = u64::from_le_bytes(entry[..8].try_into().expect("8 bytes"));
    entry[..8].copy_from_slice(&(logical + MIB / 512).to_le_bytes());
    log.write_all_at(&entry, 4096 + 16).expect("entry");
    let rig = Rig::reopen(dir.path(), Mode::Append, SIZE);
    rig.image.write_at(&[2; 4096], 0).expect("write");
    assert!(read(&rig, 0, 4096) == [2; 4096] && read(&rig, MIB, 4096) == [1; 4096]);
    let stored = stats(&rig).stored;
    rig.image.write_at(&[3; 4096], 0).expect("write");
    assert!(read(&rig, 0, 4096) == [3; 4096] && stats(&rig).stored == stored);
}
