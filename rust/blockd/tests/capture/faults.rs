//! What cannot be captured says why and leaves nothing behind.

use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::Arc;

use blockd::capture::{capture, capture_staged, Base, CaptureError, Mapping, Request, Stages, HELD_LIMIT};
use blockd::error::{Code, Error};
use overlaybd::{ByteSource, Layer, ParentCheck, Stack};
use rustix::thread::{CapabilitySet, CapabilitySets};

use crate::guest::{
    alone, assert_same, base, file_of, layer_of, open, read, request, stack, Guest, Memory, Noise, PAGE,
};

const SIZE: usize = 4 << 20;

fn noise() -> Vec<u8> {
    let mut bytes = vec![0; SIZE];
    Noise(1).fill(&mut bytes);
    bytes
}

fn assert_empty(dir: &Path) {
    let left: Vec<_> = std::fs::read_dir(dir).expect("dir").collect();
    assert!(left.is_empty(), "{left:?}");
}

#[test]
fn requests_that_do_not_fit_the_process() {
    let dir = tempfile::tempdir().expect("dir");
    let output = dir.path().join("layer");
    let image = noise();
    let file = file_of(&image);
    let (private, shared) = (Memory::of_file(&file, 0, SIZE), Memory::shared(&file, SIZE));
    let (anonymous, gone) = (Memory::anonymous(SIZE), Memory::anonymous(SIZE).at(0));
    let guest = Guest::fork(None);
    let at = |mapping: Mapping| request(&guest, &[mapping], output.clone(), SIZE);
    let half = |memory: &Memory| Mapping { length: SIZE as u64 / 2, ..memory.at(0) };
    let small = layer_of(&image[..SIZE / 2]);
    let whole = layer_of(&image);
    let mapped = |layer| {
        Some(Base {
            mapped: Some(stack(std::slice::from_ref(layer))),
            ..base(std::slice::from_ref(&whole)).expect("base")
        })
    };
    for (request, why) in [
        (at(gone), "is not there"),
        (at(shared.at(0)), "is shared"),
        (at(Mapping { offset: SIZE as u64 / 2, ..half(&private) }), "another part of its file"),
        (at(Mapping { length: 1 << 40, ..private.at(0) }), "beyond the image"),
        (at(Mapping { address: 0, ..private.at(0) }), "is not there"),
        (Request { base: base(&[small]), ..at(private.at(0)) }, "an image of 2097152 bytes"),
        (Request { base: mapped(&layer_of(&image)), ..at(private.at(0)) }, "are not the lowest"),
        (Request { base: mapped(&whole), ..at(anonymous.at(0)) }, "is anonymous"),
        (Request { output: "/".into(), ..at(private.at(0)) }, "not the path of a file"),
        (Request { pid: std::process::id(), ..at(private.at(0)) }, "this daemon"),
        (Request { pid: u32::MAX, ..at(private.at(0)) }, "no process"),
        (Request { start_time: Some(1), ..at(private.at(0)) }, "another process"),
        (Request { output: dir.path().join("missing/layer"), ..at(private.at(0)) }, "No such file"),
    ] {
        let error = Error::from(capture(&request).expect_err(why));
        assert!(error.message.contains(why), "{} for {why}", error.message);
        assert!(matches!(error.code, Code::Invalid | Code::NotFound), "{error:?}");
    }
    assert_empty(dir.path());
    std::fs::write(&output, b"precious").expect("there");
    let error = Error::from(capture(&at(private.at(0))).expect_err("there already"));
    assert_eq!(error.code, Code::Exists);
    assert_eq!(std::fs::read(&output).expect("still there"), b"precious");
}

#[test]
fn a_guarded_page_is_named() {
    /// Since Linux 6.13 (`asm-generic/mman-common.h`).
    const MADV_GUARD_INSTALL: i32 = 102;
    let dir = tempfile::tempdir().expect("dir");
    let mut memory = Memory::anonymous(SIZE);
    memory.bytes_mut().fill(1);
    if !memory.advise(5 * PAGE..6 * PAGE, MADV_GUARD_INSTALL) {
        eprintln!("skipped: this kernel has no guard pages");
        return;
    }
    let guest = Guest::fork(None);
    let request = request(&guest, &[memory.at(0)], dir.path().join("layer"), SIZE);
    let error = capture(&request).expect_err("unreadable");
    let page = memory.at(0).address + 5 * PAGE as u64;
    assert!(matches!(error, CaptureError::Unreadable { address, .. } if address == page), "{error}");
    assert_empty(dir.path());
}

/// A layer whose reading kills a process (once the index has been read).
struct Deadly {
    layer: Arc<Layer>,
    victim: Arc<AtomicI32>,
}

impl ByteSource for Deadly {
    fn size(&self) -> u64 {
        self.layer.source().size()
    }

    fn read_exact_at(&self, buf: &mut [u8], offset: u64) -> io::Result<()> {
        let victim = self.victim.swap(0, Ordering::SeqCst);
        if victim > 0 {
            Guest::kill(victim);
        }
        self.layer.source().read_exact_at(buf, offset)
    }
}

#[test]
fn a_source_that_dies_in_the_middle() {
    let dir = tempfile::tempdir().expect("dir");
    let image = noise();
    let file = file_of(&image);
    let mut memory = Memory::of_file(&file, 0, SIZE);
    for page in 0..SIZE / PAGE {
        memory.page_mut(page)[0] ^= 1;
    }
    let victim = Arc::new(AtomicI32::new(0));
    let deadly = Deadly { layer: layer_of(&image), victim: victim.clone() };
    let layer = Arc::new(Layer::open(Arc::new(deadly)).expect("layer"));
    let stack = Arc::new(Stack::open(vec![layer], ParentCheck::Ignore).expect("stack"));
    let guest = Guest::fork(None);
    let request = Request {
        base: Some(Base { stack, mapped: None }),
        digest: true,
        ..request(&guest, &[memory.at(0)], dir.path().join("layer"), SIZE)
    };
    victim.store(guest.0, Ordering::SeqCst);
    let error = capture(&request).expect_err("died");
    std::mem::forget(guest);
    assert!(matches!(error, CaptureError::Died(_)), "{error}");
    assert_empty(dir.path());
}

#[test]
fn a_base_that_cannot_be_read() {
    struct Broken(Arc<Layer>);
    impl ByteSource for Broken {
        fn size(&self) -> u64 {
            self.0.source().size()
        }
        fn read_exact_at(&self, buf: &mut [u8], offset: u64) -> io::Result<()> {
            // The header, the index and the trailer are fine.
            match (1 << 20..2 << 20).contains(&offset) {
                true => Err(io::ErrorKind::TimedOut.into()),
                false => self.0.source().read_exact_at(buf, offset),
            }
        }
    }
    let dir = tempfile::tempdir().expect("dir");
    let image = noise();
    let file = file_of(&image);
    let mut memory = Memory::of_file(&file, 0, SIZE);
    memory.bytes_mut().fill(1);
    let layer = Arc::new(Layer::open(Arc::new(Broken(layer_of(&image)))).expect("layer"));
    let guest = Guest::fork(None);
    let request = Request { base: base(&[layer]), ..request(&guest, &[memory.at(0)], dir.path().join("layer"), SIZE) };
    let error = capture(&request).expect_err("unreadable base");
    assert!(matches!(error, CaptureError::Base(_)), "{error}");
    assert_empty(dir.path());
}

/// Runs `test` in a thread of its own, which may give up what it likes.
fn in_thread(test: impl FnOnce() + Send) {
    std::thread::scope(|scope| scope.spawn(test).join()).unwrap_or_else(|panic| std::panic::resume_unwind(panic));
}

#[test]
fn a_full_disk() {
    in_thread(|| {
        let dir = tempfile::tempdir().expect("dir");
        let path = std::ffi::CString::new(dir.path().as_os_str().as_encoded_bytes()).expect("path");
        // SAFETY: gives this thread mounts of its own, and mounts there.
        let mounted = unsafe {
            libc::unshare(libc::CLONE_NEWNS) == 0
                && libc::mount(
                    std::ptr::null(),
                    c"/".as_ptr(),
                    std::ptr::null(),
                    libc::MS_REC | libc::MS_PRIVATE,
                    std::ptr::null(),
                ) == 0
                && libc::mount(c"t".as_ptr(), path.as_ptr(), c"tmpfs".as_ptr(), 0, c"size=2m".as_ptr().cast()) == 0
        };
        if !mounted {
            eprintln!("skipped: no small file system can be had: {}", io::Error::last_os_error());
            return;
        }
        let mut memory = Memory::anonymous(SIZE);
        Noise(1).fill(memory.bytes_mut());
        // A file that is gone takes its space until no other test's child has it open.
        let alone = alone();
        let guest = Guest::fork_alone(None, &alone);
        for digest in [false, true] {
            let request = Request { digest, ..request(&guest, &[memory.at(0)], dir.path().join("layer"), SIZE) };
            let error = Error::from(capture(&request).expect_err("full"));
            assert_eq!(error.code, Code::NoSpace, "{error}");
            assert!(error.message.contains("layer"), "{error}");
            assert_empty(dir.path());
            // The same once the guest goes on.
            let copied = AtomicI32::new(0);
            let note = || copied.store(1, Ordering::SeqCst);
            let stages = Stages { hold: HELD_LIMIT, ready: &|| Ok(()), copied: &note };
            let error = Error::from(capture_staged(&request, &stages).expect_err("full"));
            assert_eq!((error.code, copied.into_inner()), (Code::NoSpace, 1), "{error}");
            assert_empty(dir.path());
        }
        // There is room again for what fits, and the source is as it was.
        let half = Mapping { length: SIZE as u64 / 4, ..memory.at(0) };
        let output = dir.path().join("layer");
        capture(&request(&guest, &[half], output.clone(), SIZE / 4)).expect("fits");
        assert_same(&read(&[open(&output)]), &memory.bytes()[..SIZE / 4]);
        // SAFETY: what was mounted above.
        unsafe { libc::umount2(path.as_ptr(), libc::MNT_DETACH) };
    });
}

#[test]
fn another_users_process_needs_ptrace() {
    if rustix::thread::capabilities(None).is_ok_and(|caps| !caps.permitted.contains(CapabilitySet::SYS_PTRACE)) {
        eprintln!("skipped: without CAP_SYS_PTRACE there is nothing to give up");
        return;
    }
    let dir = tempfile::tempdir().expect("dir");
    std::fs::set_permissions(dir.path(), PermissionsExt::from_mode(0o777)).expect("mode");
    let mut memory = Memory::anonymous(SIZE);
    Noise(1).fill(memory.bytes_mut());
    let guest = Guest::fork(Some(65534));
    let (allowed, refused) = (dir.path().join("allowed"), dir.path().join("refused"));
    in_thread(|| {
        // As the daemon runs: no root, but these two.
        become_nobody(CapabilitySet::SYS_PTRACE | CapabilitySet::DAC_READ_SEARCH);
        capture(&request(&guest, &[memory.at(0)], allowed.clone(), SIZE)).expect("captured");
    });
    assert_same(&read(&[open(&allowed)]), memory.bytes());
    in_thread(|| {
        become_nobody(CapabilitySet::empty());
        let error = capture(&request(&guest, &[memory.at(0)], refused.clone(), SIZE)).expect_err("refused");
        assert!(matches!(error, CaptureError::NotPermitted { .. }), "{error}");
        assert!(error.to_string().contains("CAP_SYS_PTRACE"), "{error}");
    });
    assert!(!refused.exists());
}

fn become_nobody(keeping: CapabilitySet) {
    let user = 65533;
    // SAFETY: these concern the calling thread only: the raw calls, not the C library's, which would change all threads.
    unsafe {
        assert_eq!(libc::prctl(libc::PR_SET_KEEPCAPS, 1), 0);
        assert_eq!(libc::syscall(libc::SYS_setresuid, user, user, user), 0);
    }
    let sets = CapabilitySets { effective: keeping, permitted: keeping, inheritable: CapabilitySet::empty() };
    rustix::thread::set_capabilities(None, sets).expect("capabilities");
}
