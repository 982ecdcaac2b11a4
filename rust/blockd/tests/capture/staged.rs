//! Captures in stages: the guest is needed from `ready` to `copied` only.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicUsize, Ordering};

use blockd::capture::{capture_staged, CaptureError, Request, Stages, HELD_LIMIT};

use crate::guest::{assert_same, base, file_of, layer_of, open, read, request, Guest, Memory, Noise, PAGE};

const LEN: usize = 20 << 20;

/// Overwrites all of a guest's memory.
fn scribble(guest: &Guest, memory: &Memory) {
    let file = File::options().write(true).open(format!("/proc/{}/mem", guest.pid())).expect("memory");
    file.write_all_at(&vec![0xee; memory.bytes().len()], memory.at(0).address).expect("written");
}

#[test]
fn what_the_guest_does_before_and_after_is_not_captured() {
    let dir = tempfile::tempdir().expect("dir");
    let mut noise = Noise(23);
    let mut image = vec![0; LEN];
    noise.fill(&mut image[..LEN / 2]);
    let (file, bottom) = (file_of(&image), layer_of(&image));
    let mut memory = Memory::of_file(&file, 0, LEN);
    noise.fill(&mut memory.bytes_mut()[LEN / 4..LEN - 3 * PAGE]);
    // All that is dirty; less; nothing.
    for hold in [HELD_LIMIT, 3 << 20, PAGE, 0] {
        let guest = Guest::fork(None);
        let output = dir.path().join(hold.to_string());
        let request = Request {
            base: base(std::slice::from_ref(&bottom)),
            digest: true,
            ..request(&guest, &[memory.at(0)], output.clone(), LEN)
        };
        let (proceeded, copied) = (AtomicUsize::new(0), AtomicUsize::new(0));
        let ready = || {
            // It ran until now, and may have written more than was expected.
            let file = File::options().write(true).open(format!("/proc/{}/mem", guest.pid())).expect("memory");
            file.write_all_at(memory.bytes(), memory.at(0).address).expect("written");
            proceeded.fetch_add(1, Ordering::SeqCst);
            Ok(())
        };
        let go_on = || {
            assert!(!output.exists());
            scribble(&guest, &memory);
            Guest::kill(guest.0);
            copied.fetch_add(1, Ordering::SeqCst);
        };
        let report = capture_staged(&request, &Stages { hold, ready: &ready, copied: &go_on }).expect("captured");
        std::mem::forget(guest);
        assert_eq!((proceeded.into_inner(), copied.into_inner()), (1, 1));
        assert_eq!(report.dirty_pages as usize, LEN / PAGE);
        assert_eq!(report.data_pages + report.equal_pages + report.zero_pages, report.dirty_pages);
        assert!(report.times.copy <= report.times.total);
        assert_same(&read(&[bottom.clone(), open(&output)]), memory.bytes());
    }
}

#[test]
fn one_that_is_given_up_leaves_nothing() {
    let dir = tempfile::tempdir().expect("dir");
    let mut memory = Memory::anonymous(LEN);
    Noise(1).fill(memory.bytes_mut());
    let guest = Guest::fork(None);
    let request = request(&guest, &[memory.at(0)], dir.path().join("layer"), LEN);
    let stages = Stages { hold: HELD_LIMIT, ready: &|| Err(CaptureError::Abandoned), copied: &|| panic!("not read") };
    let error = capture_staged(&request, &stages).expect_err("given up");
    assert!(matches!(error, CaptureError::Abandoned), "{error}");
    assert_eq!(std::fs::read_dir(dir.path()).expect("dir").count(), 0);
}

#[test]
fn a_guest_that_ends_before_it_was_copied() {
    let dir = tempfile::tempdir().expect("dir");
    let mut memory = Memory::anonymous(LEN);
    Noise(1).fill(memory.bytes_mut());
    let guest = Guest::fork(None);
    let request = request(&guest, &[memory.at(0)], dir.path().join("layer"), LEN);
    let die = || {
        Guest::kill(guest.0);
        Ok(())
    };
    let stages = Stages { hold: HELD_LIMIT, ready: &die, copied: &|| panic!("it is dead") };
    let error = capture_staged(&request, &stages).expect_err("died");
    std::mem::forget(guest);
    assert!(matches!(error, CaptureError::Died(_)), "{error}");
    assert_eq!(std::fs::read_dir(dir.path()).expect("dir").count(), 0);
}

/// Many pages that are as in the base, behind so many that are not that only samples are compared.
#[test]
fn what_is_as_in_the_base_is_noticed_again() {
    let dir = tempfile::tempdir().expect("dir");
    let mut image = vec![0; LEN];
    Noise(5).fill(&mut image);
    let (file, bottom) = (file_of(&image), layer_of(&image));
    let mut memory = Memory::of_file(&file, 0, LEN);
    let pages = LEN / PAGE;
    for page in 0..pages {
        memory.page_mut(page)[100] ^= u8::from(page < pages / 2);
    }
    let guest = Guest::fork(None);
    let output = dir.path().join("layer");
    let request =
        Request { base: base(std::slice::from_ref(&bottom)), ..request(&guest, &[memory.at(0)], output.clone(), LEN) };
    let stages = Stages { hold: HELD_LIMIT, ready: &|| Ok(()), copied: &|| {} };
    let report = capture_staged(&request, &stages).expect("captured");
    assert_same(&read(&[bottom, open(&output)]), memory.bytes());
    assert_eq!(report.dirty_pages as usize, pages);
    // All but less than a sample's distance for each worker that goes from one half to the other.
    assert!((pages / 2 - 64..=pages / 2).contains(&(report.equal_pages as usize)), "{report:?}");
}
