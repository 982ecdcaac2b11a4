//! What was captured of one process is restored into another over the same base: they have the same memory.

use std::sync::Arc;

use blockd::capture::{capture, Base, Request};
use blockd::restore::restore;
use overlaybd::{Layer, ParentCheck};
use proptest::prelude::*;

use crate::guest::{self, assert_same, file_of, layer_of, open, stack, Guest, Memory, Noise, PAGE};
use crate::{memory_of, request};

const PAGES: usize = 96;

#[derive(Debug, Clone, Copy)]
enum Write {
    Noise,
    Zero,
    /// What the image has there.
    Image,
    Byte,
}

type Writes = Vec<(usize, usize, Write)>;

fn writes() -> impl Strategy<Value = Writes> {
    let kind = prop_oneof![Just(Write::Noise), Just(Write::Zero), Just(Write::Image), Just(Write::Byte)];
    let range = (0..PAGES, 1..12usize, kind);
    proptest::collection::vec(range.prop_map(|(start, len, kind)| (start, (start + len).min(PAGES), kind)), 0..10)
}

fn apply(writes: &Writes, memory: &mut Memory, image: &[u8], noise: &mut Noise) {
    for &(start, end, kind) in writes {
        let bytes = &mut memory.bytes_mut()[start * PAGE..end * PAGE];
        match kind {
            Write::Noise => noise.fill(bytes),
            Write::Zero => bytes.fill(0),
            Write::Image => bytes.copy_from_slice(&image[start * PAGE..end * PAGE]),
            Write::Byte => bytes[77] ^= 1,
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, failure_persistence: None, ..ProptestConfig::default() })]

    /// Captured again and again while it runs on, and once more from the restored guest.
    #[test]
    fn a_guest_of_an_image(
        seed in 1..u64::MAX,
        stored in proptest::collection::vec(any::<bool>(), PAGES),
        generations in proptest::collection::vec(writes(), 1..4),
    ) {
        let mut noise = Noise(seed);
        let mut image = vec![0; PAGES * PAGE];
        image.chunks_mut(PAGE).zip(&stored).filter(|(_, stored)| **stored).for_each(|(page, _)| noise.fill(page));
        let (file, base) = (file_of(&image), layer_of(&image));
        // The same memory as it is at first.
        let fresh = Memory::of_file(&file, 0, image.len());
        let mut memory = Memory::of_file(&file, 0, image.len());
        let dir = tempfile::tempdir().expect("dir");
        let mut layers = vec![base];
        for (i, writes) in generations.iter().enumerate() {
            apply(writes, &mut memory, &image, &mut noise);
            layers.push(take(&Guest::fork(None), &memory, &layers, 1, &dir.path().join(i.to_string())));
        }
        let other = Guest::fork(None);
        restore(&request(&other, &fresh, &layers[1..])).expect("restored");
        assert_same(&memory_of(&other, &[fresh.at(0)]), memory.bytes());
        assert_same(fresh.bytes(), &image);
        // The captures of both are of the same memory.
        let again = take(&other, &fresh, &layers[..1], 1, &dir.path().join("again"));
        assert_same(&guest::read(&[layers[0].clone(), again]), memory.bytes());
    }

    #[test]
    fn a_guest_that_booted_cold(seed in 1..u64::MAX, generations in proptest::collection::vec(writes(), 1..4)) {
        let (mut noise, zeroes) = (Noise(seed), vec![0; PAGES * PAGE]);
        let (fresh, mut memory) = (Memory::anonymous(zeroes.len()), Memory::anonymous(zeroes.len()));
        let dir = tempfile::tempdir().expect("dir");
        let mut layers = Vec::new();
        for (i, writes) in generations.iter().enumerate() {
            apply(writes, &mut memory, &zeroes, &mut noise);
            layers.push(take(&Guest::fork(None), &memory, &layers, 0, &dir.path().join(i.to_string())));
        }
        let other = Guest::fork(None);
        restore(&request(&other, &fresh, &layers)).expect("restored");
        assert_same(&memory_of(&other, &[fresh.at(0)]), memory.bytes());
    }
}

/// Captures memory whose guest maps the lowest `mapped` of the layers.
fn take(guest: &Guest, memory: &Memory, layers: &[Arc<Layer>], mapped: usize, output: &std::path::Path) -> Arc<Layer> {
    let base = (!layers.is_empty()).then(|| {
        let mapped = stack(&layers[..mapped]);
        let whole = mapped.extend(&layers[mapped.layers().len()..], ParentCheck::Enforce).expect("a stack");
        Base { stack: Arc::new(whole), mapped: Some(mapped) }
    });
    let request = guest::request(guest, &[memory.at(0)], output.into(), memory.bytes().len());
    capture(&Request { base, ..request }).expect("captured");
    open(output)
}
