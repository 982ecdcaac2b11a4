//! Why a restore fails.

use overlaybd::ReadError;

use crate::capture::CaptureError;
use crate::error::{Code, Error};

/// Why layers cannot be written into a process. Unless it is said that nothing was written, a part may have been: the guest
/// must not run then, and its VMM is of no more use.
#[derive(Debug, thiserror::Error, displaydoc::Display)]
pub enum RestoreError {
    /// {0}; nothing was written
    Invalid(String),
    /// {0}
    Process(CaptureError),
    /// process {0} ended while its memory was restored
    Died(u32),
    /// the page at {address:#x} of process {pid} cannot be written: its mapping changed or is read-only, memory is used up, or the image it shows there cannot be read
    Unwritable {
        /// Its number.
        pid: u32,
        /// Where the page is.
        address: u64,
    },
    /// reading a layer failed
    Layer(#[from] ReadError),
}

impl From<CaptureError> for RestoreError {
    fn from(error: CaptureError) -> Self {
        match error {
            CaptureError::Died(pid) => Self::Died(pid),
            CaptureError::Unreadable { pid, address } => Self::Unwritable { pid, address },
            CaptureError::Invalid(message) => Self::Invalid(message),
            other => Self::Process(other),
        }
    }
}

impl From<RestoreError> for Error {
    fn from(error: RestoreError) -> Self {
        const WHAT: &str = "restoring memory";
        match error {
            RestoreError::Invalid(_) => Error::caused(Code::Invalid, WHAT, &error),
            RestoreError::Process(CaptureError::NoProcess(_) | CaptureError::OtherProcess { .. }) => {
                Error::caused(Code::NotFound, WHAT, &error)
            }
            RestoreError::Process(CaptureError::Mapping(_)) => Error::caused(Code::Invalid, WHAT, &error),
            RestoreError::Process(_)
            | RestoreError::Died(_)
            | RestoreError::Unwritable { .. }
            | RestoreError::Layer(_) => Error::caused(Code::Io, WHAT, &error),
        }
    }
}
