//! The one error type of control operations: a code clients can act on and a message for people.

use std::error::Error as StdError;
use std::io;

use serde::Serialize;

use crate::origin::SharedError;

/// What kind of failure it was.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Code {
    /// No image, file or layer of that name.
    NotFound,
    /// There is one of that name already.
    Exists,
    /// In use; the call may succeed later.
    Busy,
    /// The request makes no sense.
    Invalid,
    /// Reading or writing failed.
    Io,
    /// The disk (or a quota) is full.
    NoSpace,
    /// This build or this kernel cannot do it.
    Unsupported,
    /// A file is not what it must be.
    Corrupt,
    /// A remote layer cannot be read.
    Origin,
}

/// A failed control operation.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, thiserror::Error)]
#[error("{message}")]
pub struct Error {
    /// What kind of failure it was.
    pub code: Code,
    /// What was wrong, with which value, and what to do.
    pub message: String,
}

impl Error {
    /// An error of the given kind.
    pub fn new(code: Code, message: impl Into<String>) -> Self {
        Self { code, message: message.into() }
    }

    /// A request that makes no sense.
    pub fn invalid(message: impl Into<String>) -> Self {
        Self::new(Code::Invalid, message)
    }

    /// An error that came from beneath while doing `what`. The code is that of the I/O error at the root, if there is one,
    /// otherwise `code`; the message names every cause.
    pub fn caused(code: Code, what: impl std::fmt::Display, error: &(dyn StdError + 'static)) -> Self {
        let mut message = format!("{what}: {error}");
        let mut found = None;
        let mut next = Some(error);
        while let Some(cause) = next {
            if !std::ptr::addr_eq(cause, error) {
                message.push_str(&format!(": {cause}"));
            }
            if let Some(io) = cause.downcast_ref::<io::Error>() {
                found = code_of(io).or(found);
            }
            next = cause.source();
        }
        Self { code: found.unwrap_or(code), message }
    }

    /// An I/O error while doing `what`.
    pub fn io(what: impl std::fmt::Display, error: &io::Error) -> Self {
        Self::caused(Code::Io, what, error)
    }
}

fn code_of(error: &io::Error) -> Option<Code> {
    if error.get_ref().is_some_and(|inner| inner.is::<SharedError>()) {
        return Some(Code::Origin);
    }
    match error.kind() {
        io::ErrorKind::NotFound => Some(Code::NotFound),
        io::ErrorKind::AlreadyExists => Some(Code::Exists),
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded | io::ErrorKind::FileTooLarge => Some(Code::NoSpace),
        io::ErrorKind::InvalidData | io::ErrorKind::UnexpectedEof => Some(Code::Corrupt),
        io::ErrorKind::Unsupported => Some(Code::Unsupported),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_code_is_that_of_the_root() {
        let full = io::Error::from_raw_os_error(28);
        let wrapped = overlaybd::SealError::Io(full);
        let error = Error::caused(Code::Io, "sealing image a", &wrapped);
        assert_eq!(error.code, Code::NoSpace);
        assert!(error.message.starts_with("sealing image a: writing the index failed: "), "{}", error.message);
        let other = overlaybd::SealError::Sealed;
        assert_eq!(Error::caused(Code::Invalid, "x", &other).code, Code::Invalid);
    }
}
