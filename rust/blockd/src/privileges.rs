//! Dropping what the daemon does not need.

use std::io;

use rustix::thread::{self, CapabilitySet, CapabilitySets};

use crate::Error;

/// A privilege that is held back and taken up by one thread for one action.
#[derive(Debug, Clone, Copy)]
pub enum Capability {
    /// Mounting, unmounting and controlling ublk devices.
    SysAdmin,
    /// Giving block devices to their owners.
    Chown,
}

impl Capability {
    fn set(self) -> CapabilitySet {
        match self {
            Self::SysAdmin => CapabilitySet::SYS_ADMIN,
            Self::Chown => CapabilitySet::CHOWN,
        }
    }
}

/// Held back.
const PERMITTED: CapabilitySet = CapabilitySet::SYS_ADMIN.union(CapabilitySet::CHOWN);

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
        let permitted = held & (EFFECTIVE | PERMITTED);
        let sets = CapabilitySets { effective: permitted & EFFECTIVE, permitted, inheritable: CapabilitySet::empty() };
        Ok(thread::set_capabilities(None, sets)?)
    };
    dropped().map_err(|e| Error::io("dropping capabilities", &e))
}

/// Runs `action` with a capability in effect, if the process has it. Without it the kernel says what cannot be done.
pub fn with<T>(capability: Capability, action: impl FnOnce() -> T) -> T {
    let before = thread::capabilities(None);
    let raised = before.and_then(|before| {
        let effective = before.effective | (before.permitted & capability.set());
        thread::set_capabilities(None, CapabilitySets { effective, ..before })
    });
    let result = action();
    let lowered = raised.and(before).and_then(|before| thread::set_capabilities(None, before));
    if let Err(error) = lowered {
        tracing::warn!(%error, ?capability, "taking up or putting down a capability failed");
    }
    result
}

/// Puts down what the thread that started this one had taken up: threads inherit.
pub fn lower() {
    let lowered = thread::capabilities(None).and_then(|sets| {
        thread::set_capabilities(None, CapabilitySets { effective: sets.effective & EFFECTIVE, ..sets })
    });
    if let Err(error) = lowered {
        tracing::warn!(%error, "a thread keeps a capability it does not need");
    }
}
