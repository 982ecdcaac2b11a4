//! Any layers, over any memory: what they hold is there, and nothing else has changed.

use std::os::unix::fs::FileExt;
use std::sync::Arc;

use blockd::capture::Mapping;
use blockd::restore::{restore, Request};
use overlaybd::{FileSource, Layer, LayerInfo, LayerWriter, Uuid, SECTOR};
use proptest::prelude::*;

use crate::guest::{assert_same, file_of, stack, Guest, Memory, Noise, PAGE};
use crate::{memory_of, request};

const PAGES: usize = 64;
const SECTORS: usize = PAGES * PAGE / SECTOR as usize;

/// A range of sectors, and whether it is data.
type Range = (usize, usize, bool);

/// Makes a layer of ranges, of which a later one hides an earlier one, and does to `bytes` what it says.
pub fn layer(ranges: &[Range], bytes: &mut [u8], noise: &mut Noise) -> Arc<Layer> {
    let info =
        LayerInfo { virtual_size: bytes.len() as u64, uuid: Uuid::random().expect("uuid"), ..LayerInfo::default() };
    let mut writer = LayerWriter::new(tempfile::tempfile().expect("file"), info).expect("header");
    for &(start, len, data) in ranges {
        let at = start * SECTOR as usize..(start + len) * SECTOR as usize;
        let part = &mut bytes[at.clone()];
        match data {
            true => {
                noise.fill(part);
                writer.data(at.start as u64, part).expect("data");
            }
            false => {
                part.fill(0);
                writer.zero(at.start as u64, part.len() as u64).expect("zeroes");
            }
        }
    }
    let (file, _) = writer.finish().expect("layer");
    Arc::new(Layer::open(Arc::new(FileSource::new(file).expect("file"))).expect("layer"))
}

fn ranges() -> impl Strategy<Value = Vec<Range>> {
    let range = (0..SECTORS, 1..40usize, any::<bool>());
    proptest::collection::vec(range.prop_map(|(start, len, data)| (start, len.min(SECTORS - start), data)), 0..12)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 128, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_layers(seed in 1..u64::MAX, layers in proptest::collection::vec(ranges(), 1..5), anonymous: bool) {
        let mut noise = Noise(seed);
        let mut image = vec![0; PAGES * PAGE];
        noise.fill(&mut image);
        let file = file_of(&image);
        let memory = match anonymous {
            true => {
                let mut memory = Memory::anonymous(image.len());
                memory.bytes_mut().copy_from_slice(&image);
                memory
            }
            false => Memory::of_file(&file, 0, image.len()),
        };
        let mut wanted = image.clone();
        let layers: Vec<_> = layers.iter().map(|ranges| layer(ranges, &mut wanted, &mut noise)).collect();
        let guest = Guest::fork(None);
        restore(&request(&guest, &memory, &layers)).expect("restored");
        assert_same(&memory_of(&guest, &[memory.at(0)]), &wanted);
        // Nobody else sees anything of it.
        assert_same(memory.bytes(), &image);
        let mut stored = vec![0; image.len()];
        file.read_exact_at(&mut stored, 0).expect("the image");
        assert_same(&stored, &image);
    }
}

#[test]
fn many_scattered_pages_of_several_layers_in_several_mappings() {
    const SIZE: usize = 96 << 20;
    let mut noise = Noise(5);
    let mut image = vec![7; SIZE];
    let file = file_of(&image);
    // In another order than in the image, as VMMs do around the hole below 4 GiB.
    let (third, two) = (SIZE / 3, SIZE / 3 * 2);
    let (low, high) = (Memory::of_file(&file, 0, third), Memory::of_file(&file, third as u64, two));
    let mappings = vec![high.at(third as u64), low.at(0)];
    let per_page = PAGE / SECTOR as usize;
    let scattered = |every: usize, data: bool| -> Vec<Range> {
        (0..SIZE / PAGE / every).map(|i| (i * every * per_page, per_page, data)).collect()
    };
    let layers = [(9, true), (14, false), (35, true)]
        .map(|(every, data)| layer(&scattered(every, data), &mut image, &mut noise));
    let guest = Guest::fork(None);
    let request = Request { mappings: mappings.clone(), ..request_of(&guest, &layers, SIZE) };
    let report = restore(&request).expect("restored");
    let pages = (0..SIZE / PAGE)
        .filter(|page| [9, 14, 35].iter().any(|every| page % every == 0 && page / every < SIZE / PAGE / every));
    assert_eq!(report.written_bytes, (pages.count() * PAGE) as u64);
    let restored = memory_of(&guest, &mappings);
    assert_same(&restored[two..], &image[..third]);
    assert_same(&restored[..two], &image[third..]);
}

fn request_of(guest: &Guest, layers: &[Arc<Layer>], size: usize) -> Request {
    Request { pid: guest.pid(), start_time: None, mappings: Vec::new(), stack: stack(layers), size: size as u64 }
}

#[test]
fn a_part_of_the_image_has_no_mapping_and_no_layer_holds_it() {
    let mut wanted = vec![0; PAGES * PAGE];
    let layers = [layer(&[(0, 8, true)], &mut wanted, &mut Noise(1))];
    let memory = Memory::anonymous(PAGES * PAGE);
    let guest = Guest::fork(None);
    let first = Mapping { length: PAGE as u64, ..memory.at(0) };
    let request = Request { mappings: vec![first], ..request(&guest, &memory, &layers) };
    assert_eq!(restore(&request).expect("restored").written_bytes, PAGE as u64);
    assert_same(&memory_of(&guest, &[memory.at(0)]), &wanted);
}

#[test]
fn no_layers_are_nothing_to_write() {
    let mut memory = Memory::anonymous(PAGES * PAGE);
    Noise(1).fill(memory.bytes_mut());
    let guest = Guest::fork(None);
    assert_eq!(restore(&request(&guest, &memory, &[])).expect("nothing").written_bytes, 0);
    assert_same(&memory_of(&guest, &[memory.at(0)]), memory.bytes());
}
