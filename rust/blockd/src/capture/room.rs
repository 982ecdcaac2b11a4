//! Memory for pages that are copied while the guest stands still and written once it goes on.

use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicUsize, Ordering};

use rustix::mm::{madvise, mmap_anonymous, munmap, Advice, MapFlags, ProtFlags};

/// Bytes that all captures together hold at most.
pub const LIMIT: usize = 256 << 20;

static TAKEN: AtomicUsize = AtomicUsize::new(0);

/// A piece of memory, given back to the kernel when it is dropped.
pub struct Room {
    address: NonNull<u8>,
    len: usize,
}

// SAFETY: it is plain memory of this owner's alone.
unsafe impl Send for Room {}

impl Room {
    /// As much of `wanted` bytes as the limit leaves, perhaps nothing. It is all there already: what the kernel does for a page
    /// that is first touched costs more than copying it. Two threads do that, in huge pages where there are any.
    pub fn new(wanted: usize) -> Self {
        let mut len = 0;
        let take = |taken: usize| {
            len = wanted.min(LIMIT.saturating_sub(taken));
            Some(taken + len)
        };
        let _ = TAKEN.fetch_update(Ordering::Relaxed, Ordering::Relaxed, take);
        let mut room = Self { address: NonNull::dangling(), len };
        if len == 0 {
            return room;
        }
        // SAFETY: a new mapping, wherever the kernel likes.
        let mapped =
            unsafe { mmap_anonymous(ptr::null_mut(), len, ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE) };
        match mapped.ok().and_then(|address| NonNull::new(address.cast())) {
            Some(address) => room.address = address,
            None => {
                TAKEN.fetch_sub(len, Ordering::Relaxed);
                room.len = 0;
                return room;
            }
        }
        advise(room.bytes(), Advice::LinuxHugepage);
        let (first, second) = room.bytes().split_at_mut(len / 2 / HUGE * HUGE);
        std::thread::scope(|scope| {
            scope.spawn(|| advise(first, Advice::LinuxPopulateWrite));
            advise(second, Advice::LinuxPopulateWrite);
        });
        room
    }

    /// All of it.
    pub fn bytes(&mut self) -> &mut [u8] {
        // SAFETY: mapped memory (or none) of this owner's alone, which starts as zeroes, for as long as the owner is borrowed.
        unsafe { std::slice::from_raw_parts_mut(self.address.as_ptr(), self.len) }
    }
}

/// Bytes of a huge page, or a multiple: where the two threads meet.
const HUGE: usize = 2 << 20;

/// Without it everything works, only slower.
fn advise(bytes: &mut [u8], advice: Advice) {
    // SAFETY: neither advice changes what the bytes hold; they are pages of a mapping of our own.
    let _ = unsafe { madvise(bytes.as_mut_ptr().cast(), bytes.len(), advice) };
}

impl Drop for Room {
    fn drop(&mut self) {
        if self.len > 0 {
            // SAFETY: what was mapped, no longer borrowed.
            if let Err(error) = unsafe { munmap(self.address.as_ptr().cast(), self.len) } {
                tracing::error!(%error, bytes = self.len, "memory of a capture was not given back");
            }
            TAKEN.fetch_sub(self.len, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_together_have_a_limit_and_give_back_what_they_had() {
        let (mut first, mut second, mut none) = (Room::new(LIMIT - HUGE), Room::new(2 * HUGE), Room::new(1));
        assert_eq!((first.bytes().len(), second.bytes().len()), (LIMIT - HUGE, HUGE));
        assert!(none.bytes().is_empty());
        second.bytes().fill(7);
        drop(first);
        assert_eq!(Room::new(2 * HUGE).bytes(), vec![0; 2 * HUGE]);
        assert!(second.bytes().iter().all(|byte| *byte == 7));
        drop(second);
        assert_eq!(TAKEN.load(Ordering::Relaxed), 0);
    }
}
