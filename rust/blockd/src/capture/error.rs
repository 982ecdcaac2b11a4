//! Why a capture fails.

use std::io;
use std::path::PathBuf;

use overlaybd::{ReadError, StackError, WriteLayerError};

use crate::error::{Code, Error};

/// Why guest memory cannot be captured. Whatever it is, no output file is left and the source is as it was.
#[derive(Debug, thiserror::Error, displaydoc::Display)]
pub enum CaptureError {
    /// there is no process {0}
    NoProcess(u32),
    /// process {pid} started at tick {found}, not {expected}: it is another process of that number
    OtherProcess {
        /// Its number.
        pid: u32,
        /// Start time of the process that was meant, in clock ticks after boot.
        expected: u64,
        /// Start time of the process that is there.
        found: u64,
    },
    /// process {0} ended during the capture
    Died(u32),
    /// reading {what} of process {pid} is not permitted: it needs CAP_SYS_PTRACE (and CAP_DAC_READ_SEARCH), or the same user, a dumpable process and kernel.yama.ptrace_scope=0
    NotPermitted {
        /// Its number.
        pid: u32,
        /// What was to be read.
        what: &'static str,
    },
    /// reading {what} of process {pid} failed
    Process {
        /// Its number.
        pid: u32,
        /// What was to be read.
        what: &'static str,
        /// What the kernel said.
        source: io::Error,
    },
    /// {0}
    Invalid(String),
    /// {0}
    Mapping(String),
    /// the page at {address:#x} of process {pid} cannot be read: its mapping changed, or the page is poisoned or guarded
    Unreadable {
        /// Its number.
        pid: u32,
        /// Where the page is.
        address: u64,
    },
    /// the capture was given up before the guest stood still
    Abandoned,
    /// the base's layers cannot be stacked
    Stack(#[from] StackError),
    /// reading the base failed
    Base(#[from] ReadError),
    /// the output {0:?} is there already
    Exists(PathBuf),
    /// writing the output {path:?} failed
    Output {
        /// The layer that was to be.
        path: PathBuf,
        /// What went wrong.
        source: WriteLayerError,
    },
}

impl CaptureError {
    pub(super) fn output(path: impl Into<PathBuf>, source: impl Into<WriteLayerError>) -> Self {
        Self::Output { path: path.into(), source: source.into() }
    }
}

impl From<CaptureError> for Error {
    fn from(error: CaptureError) -> Self {
        let code = match &error {
            CaptureError::NoProcess(_) | CaptureError::OtherProcess { .. } => Code::NotFound,
            CaptureError::Invalid(_) | CaptureError::Mapping(_) | CaptureError::Abandoned => Code::Invalid,
            CaptureError::Exists(_) => Code::Exists,
            CaptureError::Stack(_) => Code::Corrupt,
            CaptureError::Died(_)
            | CaptureError::NotPermitted { .. }
            | CaptureError::Process { .. }
            | CaptureError::Unreadable { .. }
            | CaptureError::Base(_)
            | CaptureError::Output { .. } => Code::Io,
        };
        Error::caused(code, "capturing memory", &error)
    }
}
