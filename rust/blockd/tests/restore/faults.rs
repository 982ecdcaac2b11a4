//! What cannot be restored says why, and touches nothing it should not.

use std::io;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::Arc;

use blockd::capture::Mapping;
use blockd::error::{Code, Error};
use blockd::restore::{restore, Request, RestoreError};
use overlaybd::{ByteSource, Layer};

use crate::guest::{assert_same, file_of, layer_of, stack, Guest, Memory, Noise, PAGE};
use crate::layers::layer;
use crate::{memory_of, request};

const SIZE: usize = 4 << 20;

fn noise(seed: u64) -> Vec<u8> {
    let mut bytes = vec![0; SIZE];
    Noise(seed).fill(&mut bytes);
    bytes
}

#[test]
fn requests_that_do_not_fit_write_nothing() {
    let image = noise(1);
    let file = file_of(&image);
    let (private, shared) = (Memory::of_file(&file, 0, SIZE), Memory::shared(&file, SIZE));
    let gone = Memory::anonymous(SIZE).at(0);
    let layers = [layer_of(&noise(2))];
    let guest = Guest::fork(None);
    let good = request(&guest, &private, &layers);
    let at = |mapping: Mapping| Request { mappings: vec![mapping], ..good.clone() };
    let half = Mapping { length: SIZE as u64 / 2, ..private.at(0) };
    let (small, large) = (layer_of(&noise(3)[..SIZE / 2]), layer_of(&[noise(4), noise(5)].concat()));
    for (request, why) in [
        (at(gone), "is not there"),
        (at(shared.at(0)), "is shared"),
        (at(half), "at 2097152 of the image, where guest RAM has no mapping"),
        (at(Mapping { offset: SIZE as u64 / 2, ..half }), "at 0 of the image, where guest RAM has no mapping"),
        (at(Mapping { address: 0, ..private.at(0) }), "is not there"),
        (Request { mappings: Vec::new(), ..good.clone() }, "1 to 4096 mappings"),
        (Request { mappings: vec![private.at(0); 2], ..good.clone() }, "both have the address"),
        (Request { stack: stack(std::slice::from_ref(&small)), ..good.clone() }, "an image of 2097152 bytes"),
        // Beneath a layer of the right size, one that reaches farther.
        (Request { stack: stack(&[large, layers[0].clone()]), ..good.clone() }, "beyond their image of 4194304 bytes"),
        (Request { pid: std::process::id(), ..good.clone() }, "this daemon"),
        (Request { pid: u32::MAX, ..good.clone() }, "no process"),
        (Request { start_time: Some(1), ..good.clone() }, "another process"),
    ] {
        let error = Error::from(restore(&request).expect_err(why));
        assert!(error.message.contains(why), "{} for {why}", error.message);
        assert!(matches!(error.code, Code::Invalid | Code::NotFound), "{error:?}");
        assert_same(&memory_of(&guest, &[private.at(0)]), &image);
    }
    restore(&good).expect("this one does");
    assert_same(&memory_of(&guest, &[private.at(0)]), &noise(2));
    assert_same(shared.bytes(), &image);
}

#[test]
fn memory_that_cannot_be_written_is_named() {
    let image = noise(1);
    let file = file_of(&image);
    let memory = Memory::of_file(&file, 0, SIZE);
    let layers = [layer_of(&noise(2))];
    // SAFETY: a part of the mapping, which nobody writes here.
    unsafe {
        let page = memory.bytes()[5 * PAGE..].as_ptr().cast_mut();
        assert_eq!(libc::mprotect(page.cast(), PAGE, libc::PROT_READ), 0);
    }
    let guest = Guest::fork(None);
    let error = restore(&request(&guest, &memory, &layers)).expect_err("read-only");
    let wanted = memory.at(0).address + 5 * PAGE as u64;
    assert!(matches!(error, RestoreError::Unwritable { address, .. } if address == wanted), "{error}");
    assert_eq!(Error::from(error).code, Code::Io);

    // An image that cannot be read any more is a bus error for who touches it.
    let file = file_of(&image);
    let memory = Memory::of_file(&file, 0, SIZE);
    let guest = Guest::fork(None);
    file.set_len(SIZE as u64 / 2).expect("cut");
    let error = restore(&request(&guest, &memory, &layers)).expect_err("a hole");
    let wanted = memory.at(0).address + SIZE as u64 / 2;
    assert!(matches!(error, RestoreError::Unwritable { address, .. } if address >= wanted), "{error}");
}

/// A layer that does something when its data is read.
struct Trapped<F> {
    layer: Arc<Layer>,
    trap: F,
}

impl<F: Fn(u64) -> io::Result<()> + Send + Sync> ByteSource for Trapped<F> {
    fn size(&self) -> u64 {
        self.layer.source().size()
    }

    fn read_exact_at(&self, buf: &mut [u8], offset: u64) -> io::Result<()> {
        (self.trap)(offset)?;
        self.layer.source().read_exact_at(buf, offset)
    }
}

fn trapped(layer: Arc<Layer>, trap: impl Fn(u64) -> io::Result<()> + Send + Sync + 'static) -> Arc<Layer> {
    Arc::new(Layer::open(Arc::new(Trapped { layer, trap })).expect("a layer"))
}

#[test]
fn a_process_that_dies_in_the_middle() {
    let memory = Memory::anonymous(SIZE);
    let victim = Arc::new(AtomicI32::new(0));
    let shot = victim.clone();
    let deadly = trapped(layer_of(&noise(1)), move |offset| {
        // Not at the first batch.
        if offset > 1 << 20 {
            let victim = shot.swap(0, Ordering::SeqCst);
            if victim > 0 {
                Guest::kill(victim);
            }
        }
        Ok(())
    });
    let guest = Guest::fork(None);
    let request = request(&guest, &memory, &[deadly]);
    victim.store(guest.0, Ordering::SeqCst);
    let error = restore(&request).expect_err("died");
    std::mem::forget(guest);
    assert!(matches!(error, RestoreError::Died(_)), "{error}");
    assert_eq!(Error::from(error).code, Code::Io);
    // Nothing of the kind has happened to this process.
    assert_same(memory.bytes(), &vec![0; SIZE]);
}

#[test]
fn a_layer_that_cannot_be_read() {
    for (kind, code) in [(io::ErrorKind::TimedOut, Code::Io), (io::ErrorKind::InvalidData, Code::Corrupt)] {
        let memory = Memory::anonymous(SIZE);
        let broken = trapped(layer_of(&noise(1)), move |offset| match (1 << 20..2 << 20).contains(&offset) {
            true => Err(kind.into()),
            false => Ok(()),
        });
        let guest = Guest::fork(None);
        let error = restore(&request(&guest, &memory, &[broken])).expect_err("unreadable");
        assert!(matches!(error, RestoreError::Layer(_)), "{error}");
        assert_eq!(Error::from(error).code, code);
    }
}

/// Bytes of a layer file are changed at random: it is refused, or what it says is written, all of it inside of guest RAM.
#[test]
fn damaged_layers() {
    let mut model = noise(1);
    let ranges: Vec<_> = (0..200).map(|i| (i * 40, 8, i % 3 != 0)).collect();
    let sound = layer(&ranges, &mut model, &mut Noise(2));
    let mut sound_bytes = vec![0; sound.source().size() as usize];
    sound.source().read_exact_at(&mut sound_bytes, 0).expect("its bytes");
    // Guest RAM is the middle of three equal blocks of a single mapping.
    let memory = Memory::anonymous(3 * SIZE);
    let mapping = Mapping { address: memory.at(0).address + SIZE as u64, length: SIZE as u64, offset: 0 };
    let guest = Guest::fork(None);
    let (mut noise, mut written) = (Noise(3), 0);
    for _ in 0..400 {
        let mut bytes = sound_bytes.clone();
        // Mostly the index, which lies at the end.
        let tail = bytes.len().min(16 << 10);
        let at = bytes.len() - 1 - noise.next() as usize % tail;
        bytes[at] = noise.next() as u8;
        let Ok(layer) = Layer::open(Arc::new(overlaybd::MemorySource::new(bytes))) else { continue };
        let Ok(stack) = overlaybd::Stack::open(vec![Arc::new(layer)], overlaybd::ParentCheck::Ignore) else { continue };
        let request = Request {
            pid: guest.pid(),
            start_time: None,
            mappings: vec![mapping],
            stack: Arc::new(stack),
            size: SIZE as u64,
        };
        written += u32::from(restore(&request).is_ok());
    }
    assert!(written > 0);
    let after = memory_of(&guest, &[memory.at(0)]);
    assert_same(&after[..SIZE], &vec![0; SIZE]);
    assert_same(&after[2 * SIZE..], &vec![0; SIZE]);
}

#[test]
fn the_image_beneath_stays_as_it_is() {
    let image = noise(1);
    let file = file_of(&image);
    let memory = Memory::of_file(&file, 0, SIZE);
    let (guest, other) = (Guest::fork(None), Guest::fork(None));
    restore(&request(&guest, &memory, &[layer_of(&noise(2))])).expect("restored");
    let mut stored = vec![0; SIZE];
    file.read_exact_at(&mut stored, 0).expect("the image");
    assert_same(&stored, &image);
    assert_same(&memory_of(&other, &[memory.at(0)]), &image);
    assert_same(memory.bytes(), &image);
}
