//! The one error of file-system work, mapped to Connect codes and HTTP statuses at the two API boundaries.

use std::fmt;
use std::io;
use std::path::Path;

use rustix::io::Errno;

/// What kind of failure it was; decides the Connect code and the HTTP status.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FsErrorKind {
    /// The path does not exist.
    NotFound,
    /// The path exists and must not.
    AlreadyExists,
    /// The request can never succeed as written.
    InvalidArgument,
    /// The state of the file system forbids it (not empty, read-only, symlink loop, other device).
    FailedPrecondition,
    /// Not even root may do it: an immutable file, or a file system that forbids it.
    PermissionDenied,
    /// The daemon or the kernel ran out of descriptors, memory or watches, or the answer is too large.
    ResourceExhausted,
    /// No space, or quota exceeded.
    NoSpace,
    /// Anything else.
    Internal,
}

/// A failure of file-system work: its kind and a message naming the path and, where there is one, the remedy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FsError {
    /// Decides code and status.
    pub kind: FsErrorKind,
    /// Shown to the client.
    pub message: String,
}

impl fmt::Display for FsError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for FsError {}

impl FsError {
    /// An error with a message of its own.
    pub fn new(kind: FsErrorKind, message: impl Into<String>) -> Self {
        Self { kind, message: message.into() }
    }

    /// The request can never succeed as written.
    pub fn invalid(message: impl Into<String>) -> Self {
        Self::new(FsErrorKind::InvalidArgument, message)
    }

    /// The path does not exist. The wording is the protocol's (§3.5).
    pub fn not_found(path: &Path) -> Self {
        Self::new(FsErrorKind::NotFound, format!("path '{}' does not exist", path.display()))
    }

    /// Translates what the kernel answered when it was asked to `action` (an infinitive) on `path`.
    pub fn io(action: &str, path: &Path, error: &io::Error) -> Self {
        let errno = error.raw_os_error().map(Errno::from_raw_os_error);
        let (kind, reason) = match errno {
            Some(Errno::NOENT) => return Self::not_found(path),
            Some(Errno::EXIST) => (FsErrorKind::AlreadyExists, "it already exists"),
            Some(Errno::ACCESS | Errno::PERM) => (
                FsErrorKind::PermissionDenied,
                "permission denied, even to root (is it immutable, or part of a virtual file system?)",
            ),
            Some(Errno::ROFS) => (FsErrorKind::FailedPrecondition, "the file system is read-only"),
            Some(Errno::NOTDIR) => (FsErrorKind::InvalidArgument, "a component of the path is not a directory"),
            Some(Errno::ISDIR) => (FsErrorKind::InvalidArgument, "it is a directory"),
            Some(Errno::NAMETOOLONG) => {
                (FsErrorKind::InvalidArgument, "the path is too long (255 bytes a name, 4095 in all)")
            }
            Some(Errno::INVAL | Errno::ILSEQ) => (FsErrorKind::InvalidArgument, "the file system refuses the name"),
            Some(Errno::LOOP) => (FsErrorKind::FailedPrecondition, "cyclic symbolic link or chain too long"),
            Some(Errno::NOTEMPTY) => (FsErrorKind::FailedPrecondition, "the directory is not empty"),
            Some(Errno::BUSY) => (FsErrorKind::FailedPrecondition, "it is in use (a mount point?)"),
            Some(Errno::TXTBSY) => (FsErrorKind::FailedPrecondition, "it is a program being executed"),
            Some(Errno::MFILE | Errno::NFILE | Errno::NOMEM) => {
                (FsErrorKind::ResourceExhausted, "out of file descriptors or memory; try again later")
            }
            Some(Errno::NOSPC | Errno::DQUOT) => (FsErrorKind::NoSpace, "not enough space on the device"),
            Some(Errno::FBIG) => (FsErrorKind::NoSpace, "larger than a file may be on this file system"),
            _ => {
                let message = format!("cannot {action} '{}': {error}", path.display());
                return Self::new(FsErrorKind::Internal, message);
            }
        };
        Self::new(kind, format!("cannot {action} '{}': {reason}", path.display()))
    }

    /// As [`FsError::io`], for an error number.
    pub fn errno(action: &str, path: &Path, errno: Errno) -> Self {
        Self::io(action, path, &errno.into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernel_errors_map_to_kinds_and_name_the_path() {
        let cases = [
            (Errno::NOENT, FsErrorKind::NotFound),
            (Errno::ACCESS, FsErrorKind::PermissionDenied),
            (Errno::NOSPC, FsErrorKind::NoSpace),
            (Errno::DQUOT, FsErrorKind::NoSpace),
            (Errno::LOOP, FsErrorKind::FailedPrecondition),
            (Errno::NAMETOOLONG, FsErrorKind::InvalidArgument),
            (Errno::MFILE, FsErrorKind::ResourceExhausted),
            (Errno::IO, FsErrorKind::Internal),
        ];
        for (errno, kind) in cases {
            let error = FsError::errno("read", Path::new("/a/b"), errno);
            assert_eq!(error.kind, kind, "{errno:?}");
            assert!(error.message.contains("'/a/b'"), "{}", error.message);
        }
    }
}
