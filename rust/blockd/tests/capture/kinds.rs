//! Every kind of page, mapping and base.

use std::io::Write;
use std::path::Path;

use blockd::capture::{capture, find_mappings, Base, CaptureError, Method, Ram, Request};

use crate::guest::{assert_same, base, file_of, layer_of, open, read, request, stack, Guest, Memory, Noise, PAGE};

const PAGES: usize = 1024;

/// Pages in turn of data, of zeroes, and of data again.
fn image() -> Vec<u8> {
    let mut bytes = vec![0; PAGES * PAGE];
    let mut noise = Noise(7);
    for page in bytes.chunks_mut(PAGE).step_by(2) {
        noise.fill(page);
    }
    bytes
}

#[test]
fn what_was_written_is_in_the_layer_and_nothing_else() {
    let dir = tempfile::tempdir().expect("dir");
    let image = image();
    let (file, bottom) = (file_of(&image), layer_of(&image));
    let mut memory = Memory::of_file(&file, 0, image.len());
    // Only read: not dirty.
    assert_same(memory.bytes(), &image);
    let mut noise = Noise(1);
    for page in [0, 1, 2, 3, 100, 101, 1023] {
        noise.fill(memory.page_mut(page));
    }
    // Zeroes over data; zeroes over zeroes; the same again; a single byte.
    memory.page_mut(10).fill(0);
    memory.page_mut(11).fill(0);
    memory.page_mut(12).copy_from_slice(&image[12 * PAGE..13 * PAGE]);
    memory.page_mut(20)[PAGE - 1] ^= 1;
    memory.page_mut(31)[5] = 1;

    let guest = Guest::fork(None);
    let mut seen = Vec::new();
    for (method, compare) in [(None, true), (Some(Method::Pagemap), true), (None, false)] {
        let output = dir.path().join(format!("{method:?}-{compare}"));
        let request = Request {
            base: base(std::slice::from_ref(&bottom)),
            compare,
            method,
            digest: true,
            durable: true,
            ..request(&guest, &[memory.at(0)], output.clone(), image.len())
        };
        let report = capture(&request).expect("captured");
        assert_same(&read(&[bottom.clone(), open(&output)]), memory.bytes());
        assert_eq!(report.dirty_pages, 12);
        assert_eq!((report.zero_pages, report.zeroed_pages), (2, 1));
        assert_eq!((report.data_pages, report.equal_pages), if compare { (9, 1) } else { (10, 0) });
        assert_eq!(report.written_bytes, report.data_pages * PAGE as u64);
        let bytes = std::fs::read(&output).expect("layer");
        assert_eq!(report.layer_bytes, bytes.len() as u64);
        let digest = overlaybd::sha256(&overlaybd::MemorySource::new(bytes)).expect("digest");
        assert_eq!(report.digest, Some(digest));
        seen.push(report.method);
    }
    // Chosen by itself on the kernels that have it, and told.
    assert_eq!(seen[1], Method::Pagemap);
    assert_eq!(seen[0] == Method::PagemapScan, kernel_has_pagemap_scan());
    assert_eq!(std::fs::read_dir(dir.path()).expect("dir").count(), 3, "nothing but the layers");
}

fn kernel_has_pagemap_scan() -> bool {
    let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").expect("release");
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map_while(|n| n.parse::<u32>().ok());
    (numbers.next(), numbers.next()) >= (Some(6), Some(7))
}

#[test]
fn without_a_known_base_zeroes_are_recorded_too() {
    let dir = tempfile::tempdir().expect("dir");
    let image = image();
    let file = file_of(&image);
    let mut memory = Memory::of_file(&file, 0, image.len());
    memory.page_mut(4).fill(0);
    memory.page_mut(5).fill(0);
    memory.page_mut(6).fill(6);
    let guest = Guest::fork(None);
    let output = dir.path().join("layer");
    let report = capture(&request(&guest, &[memory.at(0)], output.clone(), image.len())).expect("captured");
    assert_eq!((report.data_pages, report.zeroed_pages, report.extents), (1, 2, 2));
    assert_same(&read(&[layer_of(&image), open(&output)]), memory.bytes());
}

#[test]
fn ram_in_several_mappings_with_gaps() {
    let dir = tempfile::tempdir().expect("dir");
    let image = image();
    let (file, bottom) = (file_of(&image), layer_of(&image));
    let parts = [(0, 300), (300, 100), (512, 256), (1000, 24)];
    let mut memories = parts.map(|(page, pages)| Memory::of_file(&file, (page * PAGE) as u64, pages * PAGE));
    let mut noise = Noise(3);
    for memory in &mut memories {
        let last = memory.bytes().len() / PAGE - 1;
        for page in [0, 7, last] {
            noise.fill(memory.page_mut(page));
        }
    }
    let guest = Guest::fork(None);
    let mappings: Vec<_> =
        memories.iter().zip(parts).map(|(memory, (page, _))| memory.at((page * PAGE) as u64)).rev().collect();
    let output = dir.path().join("layer");
    let request = Request {
        base: base(std::slice::from_ref(&bottom)),
        ..request(&guest, &mappings, output.clone(), image.len())
    };
    assert_eq!(capture(&request).expect("captured").dirty_pages, 12);
    let mut expected = image.clone();
    for (memory, (page, _)) in memories.iter().zip(parts) {
        expected[page * PAGE..][..memory.bytes().len()].copy_from_slice(memory.bytes());
    }
    assert_same(&read(&[bottom, open(&output)]), &expected);
}

/// More than the workers take at a time, with changes across every border of what they take.
#[test]
fn many_workers_make_one_layer() {
    const LEN: usize = 50 << 20;
    let dir = tempfile::tempdir().expect("dir");
    let mut noise = Noise(17);
    let mut image = vec![0; LEN];
    noise.fill(&mut image[1 << 20..30 << 20]);
    let (file, bottom) = (file_of(&image), layer_of(&image));
    let mut memory = Memory::of_file(&file, 0, LEN);
    for border in (0..LEN).step_by(1 << 20) {
        let range = border.saturating_sub(5 * PAGE)..(border + 4 * PAGE).min(LEN);
        noise.fill(&mut memory.bytes_mut()[range]);
    }
    let take = |name: &str, base: Base, memory: &Memory| {
        let guest = Guest::fork(None);
        let output = dir.path().join(name);
        let request = Request { base: Some(base), ..request(&guest, &[memory.at(0)], output.clone(), LEN) };
        (capture(&request).expect("captured"), open(&output))
    };
    let (report, first) = take("first", base(std::slice::from_ref(&bottom)).expect("base"), &memory);
    assert_eq!(report.dirty_pages, 50 * 9 - 5);
    let layers = [bottom, first];
    assert_same(&read(&layers), memory.bytes());
    // Everything given back: what the first layer holds must be undone.
    assert!(memory.advise(0..LEN, libc::MADV_DONTNEED));
    noise.fill(memory.page_mut(4096));
    let (report, second) =
        take("second", Base { mapped: Some(stack(&layers[..1])), ..base(&layers).expect("base") }, &memory);
    assert_eq!((report.dirty_pages, report.equal_pages), (1, 0));
    let [bottom, first] = layers;
    assert_same(&read(&[bottom, first, second]), memory.bytes());
}

#[test]
fn anonymous_memory_holds_what_is_not_zero() {
    let dir = tempfile::tempdir().expect("dir");
    let mut memory = Memory::anonymous(PAGES * PAGE);
    let mut noise = Noise(5);
    for page in [0, 3, 4, 700] {
        noise.fill(memory.page_mut(page));
    }
    memory.page_mut(9).fill(0);
    // The kernel's page of zeroes.
    assert_eq!(memory.bytes()[50 * PAGE], 0);
    let guest = Guest::fork(None);
    for method in [None, Some(Method::Pagemap)] {
        let output = dir.path().join(format!("{method:?}"));
        let request = Request { method, ..request(&guest, &[memory.at(0)], output.clone(), memory.bytes().len()) };
        let report = capture(&request).expect("captured");
        assert_eq!((report.data_pages, report.zeroed_pages), (4, 0));
        assert_same(&read(&[open(&output)]), memory.bytes());
    }
}

#[test]
fn huge_pages() {
    const HUGE: usize = 2 << 20;
    let dir = tempfile::tempdir().expect("dir");
    let mut memory = Memory::anonymous(6 * HUGE);
    if !memory.advise(0..6 * HUGE, libc::MADV_HUGEPAGE) {
        eprintln!("skipped: this kernel has no transparent huge pages");
        return;
    }
    let pages = memory.bytes().len() / PAGE;
    let mut noise = Noise(11);
    for page in (0..pages).step_by(3) {
        noise.fill(memory.page_mut(page));
    }
    if memory.smaps("AnonHugePages") == 0 {
        eprintln!("skipped: the kernel gave no huge pages");
        return;
    }
    let guest = Guest::fork(None);
    for method in [None, Some(Method::Pagemap)] {
        let output = dir.path().join(format!("{method:?}"));
        let request = Request { method, ..request(&guest, &[memory.at(0)], output.clone(), memory.bytes().len()) };
        let report = capture(&request).expect("captured");
        assert_eq!(report.data_pages, pages.div_ceil(3) as u64);
        // Huge pages are dirty as wholes.
        assert!(report.dirty_pages > report.data_pages);
        assert_same(&read(&[open(&output)]), memory.bytes());
    }
}

/// Swap space in a file, for as long as it lives.
struct Swap(std::ffi::CString);

impl Swap {
    fn on(path: &Path) -> std::io::Result<Self> {
        // The header of mkswap(8): version, last page, and the signature at the end of the first page.
        let pages = 1024u32;
        let mut header = vec![0u8; PAGE];
        header[1024..1028].copy_from_slice(&1u32.to_ne_bytes());
        header[1028..1032].copy_from_slice(&(pages - 1).to_ne_bytes());
        header[PAGE - 10..].copy_from_slice(b"SWAPSPACE2");
        let mut file = std::fs::File::create(path)?;
        file.write_all(&header)?;
        file.write_all(&vec![0; (pages as usize - 1) * PAGE])?;
        file.sync_all()?;
        let path = std::ffi::CString::new(path.as_os_str().as_encoded_bytes())?;
        // SAFETY: a file of our own, with no holes.
        match unsafe { libc::swapon(path.as_ptr(), 0) } {
            0 => Ok(Self(path)),
            _ => Err(std::io::Error::last_os_error()),
        }
    }
}

impl Drop for Swap {
    fn drop(&mut self) {
        // SAFETY: what was switched on here.
        unsafe { libc::swapoff(self.0.as_ptr()) };
    }
}

#[test]
fn swapped_pages_are_dirty() {
    let dir = tempfile::Builder::new().tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("dir");
    let _swap = match Swap::on(&dir.path().join("swap")) {
        Ok(swap) => swap,
        Err(e) => {
            eprintln!("skipped: no swap can be had here: {e}");
            return;
        }
    };
    let image = image();
    let (file, bottom) = (file_of(&image), layer_of(&image));
    let mut memory = Memory::of_file(&file, 0, image.len());
    let mut noise = Noise(13);
    for page in 100..200 {
        noise.fill(memory.page_mut(page));
    }
    let expected = memory.bytes().to_vec();
    for method in [Method::PagemapScan, Method::Pagemap] {
        memory.advise(0..image.len(), libc::MADV_PAGEOUT);
        if memory.smaps("Swap") < 100 {
            eprintln!("skipped: the kernel swapped out only {} KiB", memory.smaps("Swap"));
            return;
        }
        let guest = Guest::fork(None);
        let output = dir.path().join(format!("{method:?}"));
        let request = Request {
            base: base(std::slice::from_ref(&bottom)),
            method: Some(method),
            ..request(&guest, &[memory.at(0)], output.clone(), image.len())
        };
        let report = capture(&request).expect("captured");
        assert_eq!((report.dirty_pages, report.data_pages), (100, 100));
        assert_same(&read(&[bottom.clone(), open(&output)]), &expected);
    }
}

#[test]
fn guest_ram_is_found() {
    let dir = tempfile::tempdir().expect("dir");
    let path = dir.path().join("an image\nwith a strange name");
    std::fs::write(&path, image()).expect("image");
    let file = std::fs::File::open(&path).expect("image");
    let first = Memory::of_file(&file, 0, 16 * PAGE);
    let second = Memory::of_file(&file, 32 * PAGE as u64, 16 * PAGE);
    let odd = 7919 * PAGE;
    let mut block = Memory::anonymous(odd);
    block.page_mut(3).fill(3);
    // Makes it differ from its neighbours, and splits it in two, for the kernel.
    assert!(block.advise(0..odd, libc::MADV_DONTDUMP) && block.advise(0..64 * PAGE, libc::MADV_SEQUENTIAL));
    let guest = Guest::fork(None);

    let mut found = find_mappings(guest.pid(), Ram::File(&path)).expect("mapped");
    found.sort_by_key(|mapping| mapping.offset);
    assert_eq!(found, [first.at(0), second.at(32 * PAGE as u64)]);
    assert_eq!(find_mappings(guest.pid(), Ram::Anonymous(odd as u64)).expect("one"), [block.at(0)]);
    for ram in [Ram::File(dir.path()), Ram::Anonymous(1 << 50)] {
        let error = find_mappings(guest.pid(), ram).expect_err("none");
        assert!(matches!(error, CaptureError::Mapping(_)), "{error}");
    }
}
