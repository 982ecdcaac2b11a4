//! Limits of open files.

use nix::sys::resource::{getrlimit, setrlimit, Resource};

use crate::process::spawn::FileLimit;

/// The kernel's default ceiling (`fs.nr_open`).
const CEILING: u64 = 1 << 20;

/// What processes get in a guest: a soft limit generous for servers, yet small enough for programs that close every possible
/// descriptor one by one.
pub const GUEST: FileLimit = Some((1 << 16, CEILING));

/// Raises our own soft limit as far as allowed: every process and connection of a client costs us a few descriptors. Returns what
/// the limits were, which is what processes get outside a guest.
pub fn raise_own() -> FileLimit {
    let (soft, hard) = getrlimit(Resource::RLIMIT_NOFILE).ok()?;
    if setrlimit(Resource::RLIMIT_NOFILE, CEILING.max(hard), CEILING.max(hard)).is_err() {
        let _ = setrlimit(Resource::RLIMIT_NOFILE, hard, hard);
    }
    Some((soft, hard))
}
