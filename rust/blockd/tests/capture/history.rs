//! Any sequence of writes and captures gives back the guest's memory, of every kind of guest.

use std::sync::Arc;

use blockd::capture::{capture, Base, Method, Request};
use overlaybd::{Layer, ParentCheck};
use proptest::prelude::*;

use crate::guest::{assert_same, file_of, layer_of, open, read, request, stack, Guest, Memory, Noise, PAGE};

const PAGES: usize = 96;

#[derive(Debug, Clone)]
enum Step {
    Noise(usize, usize),
    Zero(usize, usize),
    /// What the image had there.
    Restore(usize, usize),
    /// Given back to the host, as a balloon does: reads as it did before the first write.
    GiveBack(usize, usize),
    Read(usize, usize),
    Byte(usize),
}

fn step() -> impl Strategy<Value = Step> {
    let range = || (0..PAGES, 1..12usize).prop_map(|(start, len)| (start, (start + len).min(PAGES)));
    prop_oneof![
        range().prop_map(|(a, b)| Step::Noise(a, b)),
        range().prop_map(|(a, b)| Step::Zero(a, b)),
        range().prop_map(|(a, b)| Step::Restore(a, b)),
        range().prop_map(|(a, b)| Step::GiveBack(a, b)),
        range().prop_map(|(a, b)| Step::Read(a, b)),
        (0..PAGES * PAGE).prop_map(Step::Byte),
    ]
}

fn apply(step: &Step, memory: &mut Memory, image: &[u8], noise: &mut Noise) {
    match *step {
        Step::Noise(a, b) => noise.fill(&mut memory.bytes_mut()[a * PAGE..b * PAGE]),
        Step::Zero(a, b) => memory.bytes_mut()[a * PAGE..b * PAGE].fill(0),
        Step::Restore(a, b) => {
            memory.bytes_mut()[a * PAGE..b * PAGE].copy_from_slice(&image[a * PAGE..b * PAGE]);
        }
        Step::GiveBack(a, b) => assert!(memory.advise(a * PAGE..b * PAGE, libc::MADV_DONTNEED)),
        Step::Read(a, b) => drop(memory.bytes()[a * PAGE..b * PAGE].to_vec()),
        Step::Byte(at) => memory.bytes_mut()[at] ^= 0x40,
    }
}

#[derive(Debug, Clone)]
struct Generation {
    steps: Vec<Step>,
    words: bool,
    compare: bool,
}

fn generation() -> impl Strategy<Value = Generation> {
    let steps = proptest::collection::vec(step(), 0..12);
    (steps, any::<bool>(), any::<bool>()).prop_map(|(steps, words, compare)| Generation { steps, words, compare })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, failure_persistence: None, ..ProptestConfig::default() })]

    /// A guest on an image of two layers, captured again and again while it runs on.
    #[test]
    fn a_restored_guest(
        seed in 1..u64::MAX,
        stored in proptest::collection::vec(0..3u8, PAGES),
        generations in proptest::collection::vec(generation(), 1..4),
        mapped_layers in 1..3usize,
    ) {
        let mut noise = Noise(seed);
        let mut image = vec![0; PAGES * PAGE];
        for (page, kind) in image.chunks_mut(PAGE).zip(&stored) {
            match kind {
                0 => {}
                1 => noise.fill(page),
                _ => page[4000] = 9,
            }
        }
        let mut layers = vec![layer_of(&image)];
        let dir = tempfile::tempdir().expect("dir");
        if mapped_layers == 2 {
            // The image is itself the work of a capture.
            let file = file_of(&image);
            let mut memory = Memory::of_file(&file, 0, image.len());
            noise.fill(&mut memory.bytes_mut()[PAGE..20 * PAGE]);
            memory.bytes_mut()[20 * PAGE..40 * PAGE].fill(0);
            layers.push(take(&dir.path().join("image"), &memory, &layers, Some(1), &generations[0]));
            image = memory.bytes().to_vec();
        }
        let file = file_of(&image);
        let mut memory = Memory::of_file(&file, 0, image.len());
        for (i, generation) in generations.iter().enumerate() {
            for step in &generation.steps {
                apply(step, &mut memory, &image, &mut noise);
            }
            let layer = take(&dir.path().join(i.to_string()), &memory, &layers, Some(mapped_layers), generation);
            layers.push(layer);
            assert_same(&read(&layers), memory.bytes());
        }
    }

    /// A guest that booted cold: its memory is anonymous, and every capture is on top of the earlier ones.
    #[test]
    fn a_cold_guest(seed in 1..u64::MAX, generations in proptest::collection::vec(generation(), 1..4)) {
        let (mut noise, zeroes) = (Noise(seed), vec![0; PAGES * PAGE]);
        let mut memory = Memory::anonymous(zeroes.len());
        let mut layers = Vec::new();
        let dir = tempfile::tempdir().expect("dir");
        for (i, generation) in generations.iter().enumerate() {
            for step in &generation.steps {
                apply(step, &mut memory, &zeroes, &mut noise);
            }
            layers.push(take(&dir.path().join(i.to_string()), &memory, &layers, None, generation));
            assert_same(&read(&layers), memory.bytes());
        }
    }
}

fn take(
    output: &std::path::Path,
    memory: &Memory,
    layers: &[Arc<Layer>],
    mapped: Option<usize>,
    how: &Generation,
) -> Arc<Layer> {
    let guest = Guest::fork(None);
    let base = (!layers.is_empty()).then(|| match mapped {
        None => Base { stack: stack(layers), mapped: None },
        // As the daemon does it: on top of the stack that is open already.
        Some(n) => {
            let mapped = stack(&layers[..n]);
            let whole = mapped.extend(&layers[n..], ParentCheck::Enforce).expect("a stack");
            Base { stack: Arc::new(whole), mapped: Some(mapped) }
        }
    });
    let request = Request {
        base,
        compare: how.compare,
        method: how.words.then_some(Method::Pagemap),
        ..request(&guest, &[memory.at(0)], output.into(), memory.bytes().len())
    };
    let report = capture(&request).expect("captured");
    let sorted = report.data_pages + report.zero_pages + report.equal_pages;
    assert!(sorted >= report.dirty_pages, "{report:?}");
    open(output)
}
