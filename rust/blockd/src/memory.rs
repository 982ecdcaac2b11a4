//! How the heap behaves.

/// Sets up the C library's allocator; to be called before there are threads.
///
/// Indexes of a megabyte and more come and go with each attach and seal, each in whatever thread is free. By default every
/// thread has a heap of its own, where freed memory stays unused, and what is large goes back to the kernel at once, to be
/// touched afresh a moment later. One heap that keeps a little costs less of both time and memory.
pub fn set_up() {
    #[cfg(target_env = "gnu")]
    {
        /// Bytes of free memory that are kept, and the size from which memory is the kernel's own.
        const KEEP: libc::c_int = 4 << 20;
        for (parameter, value) in
            [(libc::M_ARENA_MAX, 1), (libc::M_MMAP_THRESHOLD, KEEP), (libc::M_TRIM_THRESHOLD, KEEP)]
        {
            // SAFETY: it sets a number that the allocator reads, and no other thread allocates meanwhile.
            let taken = unsafe { libc::mallopt(parameter, value) };
            // Without it everything works, with more memory.
            debug_assert_eq!(taken, 1, "parameter {parameter}");
        }
    }
}
