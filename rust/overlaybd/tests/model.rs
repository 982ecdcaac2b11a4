//! Random operations on an image give what the same operations give on a plain vector of bytes.

#![allow(clippy::expect_used)]

mod common;

use common::{pattern, Mode, Rig};
use overlaybd::CompactOptions;
use proptest::prelude::*;

const SIZE: u64 = 192 * 1024;

#[derive(Debug, Clone)]
enum Op {
    Write { offset: u64, len: u64 },
    Zero { offset: u64, len: u64 },
    Discard { offset: u64, len: u64 },
    Read { offset: u64, len: u64 },
    Flush,
    Seal { sync: bool },
    Compact { from: usize, len: usize, detect_zeroes: bool },
    Reopen,
}

fn range() -> impl Strategy<Value = (u64, u64)> {
    // Sectors, blocks, and whatever.
    prop_oneof![
        (0..SIZE / 512, 1..24u64).prop_map(|(offset, len)| (offset * 512, len * 512)),
        (0..SIZE / 4096, 1..8u64).prop_map(|(offset, len)| (offset * 4096, len * 4096)),
        (0..SIZE, 1..20_000u64),
    ]
    .prop_map(|(offset, len)| (offset, len.min(SIZE - offset)))
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        12 => range().prop_map(|(offset, len)| Op::Write { offset, len }),
        3 => range().prop_map(|(offset, len)| Op::Zero { offset, len }),
        2 => range().prop_map(|(offset, len)| Op::Discard { offset, len }),
        3 => range().prop_map(|(offset, len)| Op::Read { offset, len }),
        1 => Just(Op::Flush),
        2 => any::<bool>().prop_map(|sync| Op::Seal { sync }),
        1 => (0..4usize, 1..5usize, any::<bool>())
            .prop_map(|(from, len, detect_zeroes)| Op::Compact { from, len, detect_zeroes }),
        2 => Just(Op::Reopen),
    ]
}

fn run(mode: Mode, ops: &[Op]) {
    let dir = tempfile::tempdir().expect("directory");
    let mut rig = Rig::create(dir.path(), mode, SIZE);
    let mut model = vec![0u8; SIZE as usize];
    for (i, op) in ops.iter().enumerate() {
        match *op {
            Op::Write { offset, len } => {
                let bytes = pattern(i as u64 + 1, len as usize);
                rig.image.write_at(&bytes, offset).expect("write");
                model[offset as usize..][..len as usize].copy_from_slice(&bytes);
            }
            Op::Zero { offset, len } => {
                rig.image.zero_at(offset, len).expect("zero");
                model[offset as usize..][..len as usize].fill(0);
            }
            Op::Discard { offset, len } => {
                rig.image.discard_at(offset, len).expect("discard");
                let granule = rig.granule();
                let (start, end) = (offset.next_multiple_of(granule), (offset + len) / granule * granule);
                if start < end {
                    model[start as usize..end as usize].fill(0);
                }
            }
            Op::Read { offset, len } => {
                let mut bytes = vec![0xEE; len as usize];
                assert_eq!(rig.image.read_at(&mut bytes, offset).expect("read"), len as usize);
                assert_eq!(bytes, &model[offset as usize..][..len as usize], "{i}: {op:?}");
            }
            Op::Flush => rig.image.flush().expect("flush"),
            Op::Seal { sync } => rig.seal_and_continue(sync),
            Op::Compact { from, len, detect_zeroes } => {
                let layers = rig.names.len() - 1;
                if from < layers {
                    let options = CompactOptions { is_base: from == 0, detect_zeroes, uuid: None };
                    rig.compact(from, (from + len).min(layers), &options);
                }
            }
            Op::Reopen => {
                rig.image.flush().expect("flush");
                let size = rig.size;
                drop(rig);
                rig = Rig::reopen(dir.path(), mode, size);
            }
        }
        assert!(rig.read_all() == model, "differs after {i}: {op:?}");
    }
    rig.image.flush().expect("flush");
    drop(rig);
    assert!(Rig::reopen(dir.path(), mode, SIZE).read_all() == model, "differs after the end");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn append_only_upper(ops in prop::collection::vec(op(), 1..60)) {
        run(Mode::Append, &ops);
    }

    #[test]
    fn sparse_upper(ops in prop::collection::vec(op(), 1..60)) {
        run(Mode::Sparse, &ops);
    }
}

#[test]
fn out_of_range_and_read_only_are_refused() {
    use overlaybd::{Image, WriteError};
    let dir = tempfile::tempdir().expect("directory");
    let rig = Rig::create(dir.path(), Mode::Append, SIZE);
    for (offset, len) in [(SIZE, 1), (SIZE - 1, 2), (u64::MAX, 1), (u64::MAX - 1, 2)] {
        let bytes = vec![1; len as usize];
        assert!(matches!(rig.image.write_at(&bytes, offset), Err(WriteError::OutOfRange { .. })));
        assert!(matches!(rig.image.zero_at(offset, len), Err(WriteError::OutOfRange { .. })));
        assert!(matches!(rig.image.discard_at(offset, len), Err(WriteError::OutOfRange { .. })));
    }
    let mut buf = [1u8; 8];
    assert_eq!(rig.image.read_at(&mut buf, SIZE).expect("read"), 0);
    assert_eq!(rig.image.read_at(&mut buf, u64::MAX).expect("read"), 0);
    assert_eq!(rig.image.read_at(&mut buf, SIZE - 3).expect("read"), 3);
    rig.image.seal().expect("seal");
    assert!(matches!(rig.image.write_at(&buf, 0), Err(WriteError::ReadOnly)));
    assert!(rig.image.seal().is_err());
    let stack = rig.image.stack();
    assert!(matches!(Image::read_only(stack).zero_at(0, 1), Err(WriteError::ReadOnly)));
}
