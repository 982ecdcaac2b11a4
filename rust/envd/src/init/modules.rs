//! Kernel modules of the initramfs.

use std::ffi::CStr;
use std::fs::{self, File};
use std::io;
use std::os::fd::AsRawFd;
use std::path::Path;

use nix::errno::Errno;

use crate::log;

/// Loads every `*.ko` of `dir` in lexical order, which the initramfs makes the order of dependency. A module that does not load is
/// logged; whether it was needed shows at the next step.
pub fn load_all(dir: &Path) {
    let mut paths: Vec<_> = fs::read_dir(dir)
        .map(|entries| entries.filter_map(|entry| Some(entry.ok()?.path())).collect())
        .unwrap_or_default();
    paths.retain(|path| path.extension().is_some_and(|extension| extension == "ko"));
    paths.sort();
    for path in paths {
        if let Err(error) = load(&path) {
            log!("module {}: {error}", path.display());
        }
    }
}

fn load(path: &Path) -> io::Result<()> {
    const NO_PARAMETERS: &CStr = c"";
    let file = File::open(path)?;
    // SAFETY: an open descriptor, a valid C string, no flags; the kernel checks the file's content.
    let result = unsafe { libc::syscall(libc::SYS_finit_module, file.as_raw_fd(), NO_PARAMETERS.as_ptr(), 0) };
    match Errno::result(result) {
        // EEXIST: built in, or loaded already.
        Ok(_) | Err(Errno::EEXIST) => Ok(()),
        Err(errno) => Err(errno.into()),
    }
}
