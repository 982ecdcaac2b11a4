//! The buffer of one worker: pages straight from the kernel, given back when the worker ends.

use std::io;
use std::ptr::NonNull;

use rustix::mm::{mmap_anonymous, munmap, MapFlags, ProtFlags};

/// Page-aligned memory that costs nothing until it is touched and goes back to the kernel at once when dropped, which a
/// heap block of a megabyte would not.
pub struct Buffer {
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: the memory is owned by the buffer alone, like that of a `Box<[u8]>`.
unsafe impl Send for Buffer {}

impl Buffer {
    /// Maps `len` bytes of zeroes.
    pub fn new(len: usize) -> io::Result<Self> {
        // SAFETY: a new private mapping at an address the kernel chooses touches no other memory.
        let start = unsafe {
            mmap_anonymous(std::ptr::null_mut(), len, ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE)?
        };
        let start = NonNull::new(start.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self { start, len })
    }

    /// The bytes.
    pub fn bytes(&mut self) -> &mut [u8] {
        // SAFETY: `len` readable and writable bytes are mapped at `start` as long as `self` lives, and the borrow of `self`
        // makes this the only reference to them.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // SAFETY: the mapping was made in `new` with this length, and no reference to it outlives `self`.
        // Unmapping a mapping of one's own does not fail.
        let _ = unsafe { munmap(self.start.as_ptr().cast(), self.len) };
    }
}
