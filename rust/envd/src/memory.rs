//! What the daemon asks of the allocator: an idle sandbox should cost as little as a new one.

/// Blocks from this size on are mapped, and so given back, one by one. Setting it keeps glibc from raising it to the size of the
/// largest message it has seen.
const MAPPED: libc::c_int = 128 << 10;

/// One arena for the loop's thread, one for the threads of blocking work; more only keep more unused memory.
const ARENAS: libc::c_int = 2;

/// Sets the allocator up; to be called before there are other threads.
pub fn configure() {
    // SAFETY: only changes the allocator's parameters, and no other thread uses it yet.
    unsafe {
        libc::mallopt(libc::M_MMAP_THRESHOLD, MAPPED);
        libc::mallopt(libc::M_ARENA_MAX, ARENAS);
    }
}

/// Gives the memory a burst has left unused back to the kernel.
pub fn give_back() {
    // SAFETY: only returns free memory to the kernel.
    unsafe { libc::malloc_trim(0) };
}
