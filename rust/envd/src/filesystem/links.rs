//! Links that other users may not take.
//!
//! The links in /proc/<pid>/fd lead to open files and directories without passing the directories above them. The kernel lets a
//! thread follow those of its own process whatever user it acts as, and envd's lead to what other users' requests have open:
//! without this, any user could read a file in root's closed directory while root downloads it. So paths are resolved without
//! links of that kind ("magic links", openat2(2)) unless the user is root, who needs no detour.

use std::path::Path;

use rustix::fs::{openat2, Mode, OFlags, ResolveFlags, CWD};
use rustix::io::Errno;
use rustix::process::geteuid;

use super::error::{FsError, FsErrorKind};

/// How the user of this thread may resolve paths.
pub fn allowed() -> ResolveFlags {
    if geteuid().is_root() {
        ResolveFlags::empty()
    } else {
        ResolveFlags::NO_MAGICLINKS
    }
}

/// Fails if `path` leads through a link that the user of this thread may not take; `last` says whether its last component is
/// followed too. For calls that cannot be told so themselves: they come after this check, so it narrows a race to the moment
/// between the two and does not close it. Blocks.
///
/// # Errors
/// `failed_precondition`, also for a loop of ordinary links.
pub fn check(path: &Path, last: bool) -> Result<(), FsError> {
    let follow = if last { OFlags::empty() } else { OFlags::NOFOLLOW };
    match openat2(CWD, path, OFlags::PATH | OFlags::CLOEXEC | follow, Mode::empty(), allowed()) {
        Err(Errno::LOOP) => Err(forbidden(path)),
        // What else is wrong with it, the call itself will find.
        _ => Ok(()),
    }
}

/// What `ELOOP` means to a client.
pub fn forbidden(path: &Path) -> FsError {
    let message = format!("'{}' is a cyclic symbolic link, or leads through a link into a process", path.display());
    FsError::new(FsErrorKind::FailedPrecondition, message)
}
