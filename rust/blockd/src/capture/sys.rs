//! The system calls no dependency wraps: `process_vm_readv(2)`, `process_vm_writev(2)` and the `PAGEMAP_SCAN` ioctl.

use std::io;
use std::os::fd::AsFd;

use rustix::ioctl::{self, opcode, Opcode, Updater};
use rustix::process::Pid;

/// The most ranges one `process_vm_readv` or `process_vm_writev` takes (`UIO_MAXIOV`).
pub const MAX_IOVECS: usize = 1024;

/// Categories of pages, from `linux/fs.h`.
pub const PAGE_IS_FILE: u64 = 1 << 2;
/// In memory.
pub const PAGE_IS_PRESENT: u64 = 1 << 3;
/// In swap, or on its way to another place in memory.
pub const PAGE_IS_SWAPPED: u64 = 1 << 4;
/// The kernel's shared page of zeroes.
pub const PAGE_IS_PFNZERO: u64 = 1 << 5;

/// `struct page_region` of `linux/fs.h`: pages of one kind.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub struct PageRegion {
    /// Address of the first byte.
    pub start: u64,
    /// Address after the last byte.
    pub end: u64,
    /// What the pages are.
    pub categories: u64,
}

/// `struct pm_scan_arg` of `linux/fs.h`.
#[repr(C)]
struct ScanArg {
    size: u64,
    flags: u64,
    start: u64,
    end: u64,
    walk_end: u64,
    vec: u64,
    vec_len: u64,
    max_pages: u64,
    category_inverted: u64,
    category_mask: u64,
    category_anyof_mask: u64,
    return_mask: u64,
}

const PAGEMAP_SCAN: Opcode = opcode::read_write::<ScanArg>(b'f', 16);

/// What `PAGEMAP_SCAN` looks for. A page matches if it is in none of `none_of` and in at least one of `any_of`.
#[derive(Debug, Clone, Copy)]
pub struct Categories {
    /// A page in one of these is left out.
    pub none_of: u64,
    /// A page must be in one of these.
    pub any_of: u64,
}

/// Finds at most `max_pages` (not zero) matching pages between two addresses. Gives how many of `regions` were filled, and the
/// address where the search stopped.
///
/// # Errors
/// `ENOTTY` before Linux 6.7; `ESRCH` if the process has died.
pub fn pagemap_scan(
    pagemap: impl AsFd,
    start: u64,
    end: u64,
    max_pages: u64,
    wanted: Categories,
    regions: &mut [PageRegion],
) -> io::Result<(usize, u64)> {
    let mut arg = ScanArg {
        size: size_of::<ScanArg>() as u64,
        flags: 0,
        start,
        end,
        walk_end: 0,
        vec: regions.as_mut_ptr() as u64,
        vec_len: regions.len() as u64,
        max_pages,
        category_inverted: wanted.none_of,
        category_mask: wanted.none_of,
        category_anyof_mask: wanted.any_of,
        return_mask: wanted.any_of,
    };
    // SAFETY: the opcode goes with this structure (both from `linux/fs.h`), which is live for the call. The kernel writes
    // `walk_end` in it and at most `vec_len` regions to `vec`, which is the borrowed slice. On a file that is no pagemap the
    // number means nothing and the kernel answers ENOTTY.
    let found = unsafe {
        let call = Updater::<PAGEMAP_SCAN, ScanArg>::new(&mut arg);
        ioctl::ioctl(pagemap, Counted(call))?
    };
    Ok((found.min(regions.len()), arg.walk_end))
}

/// The ioctl's return value, the number of regions, which [`Updater`] drops.
struct Counted<'a>(Updater<'a, PAGEMAP_SCAN, ScanArg>);

// SAFETY: everything is the updater's but the output, which is the plain return value of the call.
unsafe impl ioctl::Ioctl for Counted<'_> {
    type Output = usize;
    const IS_MUTATING: bool = true;

    fn opcode(&self) -> Opcode {
        self.0.opcode()
    }

    fn as_ptr(&mut self) -> *mut std::ffi::c_void {
        self.0.as_ptr()
    }

    unsafe fn output_from_ptr(
        count: ioctl::IoctlOutput,
        _: *mut std::ffi::c_void,
    ) -> Result<Self::Output, rustix::io::Errno> {
        Ok(usize::try_from(count).unwrap_or(0))
    }
}

/// Copies memory of another process: the bytes of `remote` (address, length), at most [`MAX_IOVECS`] of them are looked at, one
/// after another into `local`. Gives how many bytes were copied, fewer than asked for if a page could not be read.
///
/// # Errors
/// `EFAULT` if the first page cannot be read, `EPERM`, `ESRCH`.
pub fn process_vm_readv(pid: Pid, local: &mut [u8], remote: &[(u64, u64)]) -> io::Result<usize> {
    let iovecs = iovecs(remote);
    let into = libc::iovec { iov_base: local.as_mut_ptr().cast(), iov_len: local.len() };
    // SAFETY: the kernel writes only into `into`, which is the borrowed slice, and reads `iovecs`, live for the call. The remote
    // addresses are only used in the other process (or, for our own pid, read through the kernel, which fails rather than faults).
    let copied = unsafe {
        libc::process_vm_readv(pid.as_raw_nonzero().get(), &into, 1, iovecs.as_ptr(), iovecs.len() as libc::c_ulong, 0)
    };
    usize::try_from(copied).map_err(|_| io::Error::last_os_error())
}

/// The reverse: copies `local`, from its start, to the ranges of `remote`, one after another. Gives how many bytes were copied,
/// fewer than asked for if a page could not be written.
///
/// # Errors
/// `EFAULT` if the first page cannot be written, `EPERM`, `ESRCH`.
pub fn process_vm_writev(pid: Pid, local: &[u8], remote: &[(u64, u64)]) -> io::Result<usize> {
    let iovecs = iovecs(remote);
    let from = libc::iovec { iov_base: local.as_ptr().cast_mut().cast(), iov_len: local.len() };
    // SAFETY: the kernel only reads from `from`, which is the borrowed slice, and from `iovecs`, both live for the call. What is
    // written is another process's memory: this one's is refused before (`Mapping::check_all`), and nothing of it is shared.
    let copied = unsafe {
        libc::process_vm_writev(pid.as_raw_nonzero().get(), &from, 1, iovecs.as_ptr(), iovecs.len() as libc::c_ulong, 0)
    };
    usize::try_from(copied).map_err(|_| io::Error::last_os_error())
}

fn iovecs(ranges: &[(u64, u64)]) -> Vec<libc::iovec> {
    let iovec =
        |&(address, len): &(u64, u64)| libc::iovec { iov_base: address as *mut libc::c_void, iov_len: len as usize };
    ranges.iter().take(MAX_IOVECS).map(iovec).collect()
}
