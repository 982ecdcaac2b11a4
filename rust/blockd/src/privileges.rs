//! Dropping what the daemon does not need.

use std::io;

use rustix::io::Errno;
use rustix::thread::{self, CapabilitySet, CapabilitySets};

use crate::Error;

/// A privilege that is held back and taken up by one thread for one action.
#[derive(Debug, Clone, Copy)]
pub enum Capability {
    /// Mounting, unmounting and controlling ublk devices.
    SysAdmin,
}

impl Capability {
    fn set(self) -> CapabilitySet {
        match self {
            Self::SysAdmin => CapabilitySet::SYS_ADMIN,
        }
    }
}

/// In effect all the time: reading the memory of VMMs, which run as other users, and layers that other users own.
const EFFECTIVE: CapabilitySet = CapabilitySet::SYS_PTRACE.union(CapabilitySet::DAC_READ_SEARCH);

/// Gives up, for good, every capability but the few named here, and the gaining of any. Must be called while the process has
/// one thread, as capabilities belong to threads.
///
/// # Errors
/// The kernel refuses.
pub fn drop_all_but_needed() -> Result<(), Error> {
    let dropped = || -> io::Result<()> {
        thread::set_no_new_privs(true)?;
        let held = thread::capabilities(None)?.permitted;
        let permitted = held & (EFFECTIVE | CapabilitySet::SYS_ADMIN);
        let sets = CapabilitySets { effective: permitted & EFFECTIVE, permitted, inheritable: CapabilitySet::empty() };
        Ok(thread::set_capabilities(None, sets)?)
    };
    dropped().map_err(|e| Error::io("dropping capabilities", &e))
}

/// Runs `action` with a capability in effect, if the process has it at all.
///
/// # Errors
/// Those of `action`.
pub fn with<T>(capability: Capability, action: impl FnOnce() -> Result<T, Errno>) -> Result<T, Errno> {
    let before = thread::capabilities(None)?;
    let raised = CapabilitySets { effective: before.effective | (before.permitted & capability.set()), ..before };
    thread::set_capabilities(None, raised)?;
    let result = action();
    thread::set_capabilities(None, before)?;
    result
}
