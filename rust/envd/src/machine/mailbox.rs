//! Memory through which the host names a guest that it starts from a snapshot.
//!
//! Captured while it waits here, a restored guest goes on with an instruction of ours, finds who it is in front of it, and says
//! so in the same place: no interrupt, no network, no other program is between. Under emulation, where the first use of each
//! piece of code costs as much as a thousand later ones, that is most of the time a start takes.
//!
//! The layout, and who writes what when, is in docs/formats/mailbox.md.

use std::fs::File;
use std::io;
use std::num::NonZeroUsize;
use std::os::unix::fs::OpenOptionsExt;
use std::sync::atomic::{AtomicU32, AtomicU64, AtomicU8, Ordering};
use std::time::{Duration, Instant};

use nix::sys::mman::{mmap, MapFlags, ProtFlags};

/// Of physical memory, which the kernel leaves alone (`memmap=`).
const BYTES: usize = 32 << 10;
const MAGIC: u64 = u64::from_le_bytes(*b"aenvmbx1");
/// Where the words begin.
const WORDS: usize = 64;

/// Nobody waits.
const IDLE: u32 = 0;
/// We wait for words.
const HELD: u32 = 1;
/// The host has put words.
const TOLD: u32 = 2;
/// We have done as told.
const DONE: u32 = 3;
/// We could not.
const REFUSED: u32 = 4;

/// Longest wait, by the guest's clock, which stands still with it. From the host's call to its freezing the guest a few
/// milliseconds pass; if it never comes to that nothing else may be held up for long.
const PATIENCE: Duration = Duration::from_millis(250);

#[repr(C)]
#[derive(Debug)]
struct Header {
    magic: AtomicU64,
    state: AtomicU32,
    length: AtomicU32,
    /// The host's time, which it keeps up to date until we are done.
    unix_ns: AtomicU64,
}

/// The mapped memory.
#[derive(Debug)]
pub struct Mailbox {
    header: &'static Header,
    words: &'static [AtomicU8],
}

impl Mailbox {
    /// Maps the memory at `address`.
    ///
    /// # Errors
    /// Those of opening and mapping /dev/mem: not all kernels have it, nor let it show memory that they leave alone.
    pub fn open(address: u64) -> io::Result<Self> {
        let device = File::options().read(true).write(true).custom_flags(libc::O_CLOEXEC).open("/dev/mem")?;
        let offset = libc::off_t::try_from(address).map_err(io::Error::other)?;
        let length = NonZeroUsize::new(BYTES).ok_or(io::ErrorKind::InvalidInput)?;
        // SAFETY: a new mapping anywhere, of memory that is the kernel's to nobody (STRICT_DEVMEM refuses all other).
        let mapped = unsafe {
            mmap(None, length, ProtFlags::PROT_READ | ProtFlags::PROT_WRITE, MapFlags::MAP_SHARED, &device, offset)
        }?;
        // SAFETY: page-aligned, of that length, never unmapped, and only ever used through atomics.
        let (header, words) = unsafe {
            let start = mapped.cast::<u8>();
            let words = std::slice::from_raw_parts(start.add(WORDS).cast::<AtomicU8>().as_ptr(), BYTES - WORDS);
            (start.cast::<Header>().as_ref(), words)
        };
        header.state.store(IDLE, Ordering::Relaxed);
        header.magic.store(MAGIC, Ordering::Release);
        Ok(Self { header, words })
    }

    /// Begins to wait for the host's words: whatever happens from now on, they are not lost. [`Mailbox::wait`] has to follow.
    pub fn hold(&self) {
        self.header.state.store(HELD, Ordering::Release);
    }

    /// Waits for the host's words; `None` if none have come in time. Whoever gets some has to [`Mailbox::answer`].
    pub fn wait(&self) -> Option<Vec<u8>> {
        let since = Instant::now();
        loop {
            match self.header.state.load(Ordering::Acquire) {
                TOLD => break,
                HELD => {}
                // Somebody in this guest, who must be root, plays with our memory.
                _ => return None,
            }
            if since.elapsed() > PATIENCE && self.swap(HELD, IDLE) {
                return None;
            }
            std::hint::spin_loop();
        }
        let length = self.header.length.load(Ordering::Relaxed) as usize;
        Some(self.words.iter().take(length).map(|byte| byte.load(Ordering::Relaxed)).collect())
    }

    /// The host's time, at most two milliseconds ago.
    pub fn unix_ns(&self) -> i128 {
        self.header.unix_ns.load(Ordering::Relaxed).into()
    }

    /// Says whether all is done as told. The words, which hold secrets, are gone then.
    pub fn answer(&self, done: bool) {
        let length = self.header.length.load(Ordering::Relaxed) as usize;
        self.words.iter().take(length).for_each(|byte| byte.store(0, Ordering::Relaxed));
        self.header.state.store(if done { DONE } else { REFUSED }, Ordering::Release);
    }

    fn swap(&self, from: u32, to: u32) -> bool {
        self.header.state.compare_exchange(from, to, Ordering::AcqRel, Ordering::Relaxed).is_ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mailbox() -> Mailbox {
        let header = Header { magic: MAGIC.into(), state: IDLE.into(), length: 0.into(), unix_ns: 0.into() };
        let words: Vec<AtomicU8> = (0..BYTES - WORDS).map(|_| AtomicU8::new(0)).collect();
        Mailbox { header: Box::leak(Box::new(header)), words: words.leak() }
    }

    #[test]
    fn the_header_is_where_the_host_expects_it() {
        assert_eq!(std::mem::offset_of!(Header, magic), 0);
        assert_eq!(std::mem::offset_of!(Header, state), 8);
        assert_eq!(std::mem::offset_of!(Header, length), 12);
        assert_eq!(std::mem::offset_of!(Header, unix_ns), 16);
        assert!(size_of::<Header>() <= WORDS);
    }

    #[test]
    fn words_are_taken_answered_and_cleared() {
        let mailbox = mailbox();
        mailbox.hold();
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| mailbox.wait());
            for (place, byte) in mailbox.words.iter().zip(b"hello") {
                place.store(*byte, Ordering::Relaxed);
            }
            mailbox.header.length.store(5, Ordering::Relaxed);
            mailbox.header.unix_ns.store(7, Ordering::Relaxed);
            mailbox.header.state.store(TOLD, Ordering::Release);
            assert_eq!(waiting.join().expect("no panic").as_deref(), Some(&b"hello"[..]));
        });
        assert_eq!(mailbox.unix_ns(), 7);
        mailbox.answer(true);
        assert_eq!(mailbox.header.state.load(Ordering::Relaxed), DONE);
        assert!(mailbox.words.iter().all(|byte| byte.load(Ordering::Relaxed) == 0));
    }

    #[test]
    fn nobody_waits_for_ever_and_an_absurd_length_is_cut() {
        let mailbox = mailbox();
        mailbox.hold();
        assert_eq!(mailbox.wait(), None);
        assert_eq!(mailbox.header.state.load(Ordering::Relaxed), IDLE);
        for nonsense in [IDLE, DONE, 7] {
            mailbox.hold();
            mailbox.header.state.store(nonsense, Ordering::Relaxed);
            assert_eq!(mailbox.wait(), None);
        }
        mailbox.header.length.store(u32::MAX, Ordering::Relaxed);
        mailbox.hold();
        assert!(mailbox.swap(HELD, TOLD));
        assert_eq!(mailbox.wait().map(|words| words.len()), Some(BYTES - WORDS));
        mailbox.answer(false);
        assert_eq!(mailbox.header.state.load(Ordering::Relaxed), REFUSED);
    }
}
